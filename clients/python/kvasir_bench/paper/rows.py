"""A table's rows as they are shown: published figures, and the measured ones beside them. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvasir_bench.arithmetic import rounded_row
from kvasir_bench.paper.tables import Table

HERE = "here"


def rows_of(
    table: Table,
    findings: Sequence[Any],
    contexts: Sequence[int],
    why_left_out: Callable[[int], str],
    failure: str = "",
) -> Iterator[dict[str, Any]]:
    """Published rows, each before the measured row of the same key; then the measured rows that have no other. A row
    that was not measured has the reason as its note.
    """
    measured_rows = {_key(table, row): row for row in (() if failure else table.source.rows(*findings))}
    published: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table.published:
        published.setdefault(_key(table, row), []).append(row)
    for key in {**published, **measured_rows}:
        for row in published.get(key, ()):
            yield _row(table, row, str(row["by"]))
        named = dict(zip(table.keys, key, strict=True))
        context = named.get("context_tokens")
        is_others = table.contexts and context and key not in published and context not in contexts
        if None in key or is_others:
            continue  # a published sentence; another table's context
        why = failure or (context and why_left_out(context)) or table.source.missing
        yield _row(table, measured_rows.get(key, {**named, "note": why}), HERE)


def _key(table: Table, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in table.keys)


def _row(table: Table, row: Mapping[str, Any], by: str) -> dict[str, Any]:
    keys, values = ({name: row.get(name) for name in names} for names in (table.keys, table.values))
    return {**keys, "by": by, **rounded_row(values), "note": row.get("note") or _other_context(table, row)}


def _other_context(table: Table, row: Mapping[str, Any]) -> str:
    """The context of a row that was measured at another one than the table's title has."""
    context = row.get("context_tokens")
    is_other = context and "context_tokens" not in table.keys and context not in table.contexts
    return f"behind {context:,} tokens" if is_other else ""
