"""The papers' tables: the published figures of `published.json`, and the measured rows beside them."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvasir_bench.arithmetic import rounded_row
from kvasir_bench.paper import measured_rows as of
from kvasir_bench.paper.measured_rows import Row, with_columns

HERE = "here"


@dataclass(frozen=True, slots=True)
class Source:
    """The cases that a table needs, and its rows of their findings."""

    cases: tuple[str, ...] = ()
    rows: Callable[..., Iterable[Row]] = lambda: ()
    lengths: tuple[int, ...] = ()  # contexts to measure where the published rows have none
    missing: str = "not measured"  # why a published row has none beside it


SOURCES: Mapping[str, Source] = {
    "3.1": Source(("facts",), of.bytes_a_token),
    "3.2": Source(("kv_bytes",), with_columns(savings=lambda row: 1 - row["q4_bytes"] / row["fp16_bytes"])),
    "3.4": Source(
        ("peaks",), with_columns(reduction=lambda row: 1 - row["cells_peak_bytes"] / row["one_chunk_peak_bytes"])
    ),
    "4.4": Source(("scenarios",), of.scenarios),
    **dict.fromkeys(("5.2", "5.3", "5.5", "5.5 end to end"), Source(("path",), of.by_length)),
    "5.4": Source(("three_turns",), of.turns, (2000,)),
    "5.4 prefix": Source(("prefix",), of.turns, (1000,)),
    "5.6": Source(("over_http",), of.modes),
    "5.7": Source(("pairs",), of.pairs),
    "5.7 staggered": Source(("staggered",), of.staggered),
    "5.8": Source(("facts", "peaks"), of.capacity, (4096,)),
    "5.9": Source(("servers",), of.servers, (2000,), "another system; LM Studio: --http URL"),
    "5.10": Source(("matching",), of.matching),
    "6.6 perplexity": Source(("quality",), of.perplexity),
    "6.6 retrieval": Source(("scenarios",), of.retrieval),
    "001 attention": Source(("attention",), of.attention),
    "001 open loop": Source(("open_loop",), of.open_loop),
    "002 backends": Source(("weights", "peer"), of.backends, (512,), "other weights, or not MLX"),
    "002 decoding": Source(("windows",), of.decoding, (512,), "needs a WeDLM model (--model)"),
    "002 GSM8K": Source(missing="not built: GSM8K"),
    "002 cacheability": Source(("windows",), of.cacheability, (512,), "one kind of prompts here: conversations"),
    "002 KV": Source(("kv_bytes",), iter),
    "002 latency": Source(("parts",), of.parts, (512,)),
    "002 selective": Source(("fewer_bits",), of.fewer_bits, missing="no such matrix in this model"),
    "002 operations": Source(missing="not built: a profile by operations"),
    "003 loading": Source(("weights",), iter),
    # KV, and the most of everything, while one memory grows.
    "003 KV": Source(
        ("growth",), with_columns(peak_bytes=lambda row: row["kv_peak_bytes"]), (512, 1024, 2048, 4096, 8192)
    ),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table as its paper has it. `figures` are rows by the model that was measured, some with a note behind them."""

    number: str
    paper: str
    title: str
    keys: Sequence[str]  # the columns that name a row
    values: Sequence[str]
    figures: Mapping[str, list[list[Any]]]
    note: str = ""

    @property
    def source(self) -> Source:
        return SOURCES[self.number]

    @property
    def published(self) -> list[dict[str, Any]]:
        """Rows by column, `by` whom, and with a `note`."""
        columns = (*self.keys, *self.values, "note")
        named = ((by, row) for by, rows in self.figures.items() for row in rows)
        return [{"by": by, "note": "", **dict(zip(columns, row, strict=False))} for by, row in named]

    @property
    def contexts(self) -> list[int]:
        of_rows = [row["context_tokens"] for row in self.published if row.get("context_tokens")]
        return sorted({*(self.source.lengths or of_rows)})

    def is_called(self, name: str) -> bool:
        """By its number, or by a paper's or a section's number before it."""
        return name in (self.number, self.number.split()[0], self.paper)

    def key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.keys)

    def shown(self, row: Row, by: str) -> dict[str, Any]:
        """The table's columns of a row. One of another context than the title has is noted."""
        context = row.get("context_tokens")
        is_other = context and "context_tokens" not in self.keys and context not in self.contexts
        keys, values = ({name: row.get(name) for name in names} for names in (self.keys, self.values))
        note = row.get("note") or (f"behind {context:,} tokens" if is_other else "")
        return {**keys, "by": by, **rounded_row(values), "note": note}


def rows_of(
    table: Table,
    findings: Sequence[Any],
    contexts: Sequence[int],
    why_left_out: Callable[[int], str],
    failure: str = "",
) -> Iterator[dict[str, Any]]:
    """Published rows, each before the measured row of its key; then the other measured rows. A note names gaps."""
    measured = {table.key(row): row for row in (() if failure else table.source.rows(*findings))}
    published: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table.published:
        published.setdefault(table.key(row), []).append(row)
    for key in {**published, **measured}:
        yield from (table.shown(row, row["by"]) for row in published.get(key, ()))
        named = dict(zip(table.keys, key, strict=True))
        context = named.get("context_tokens")
        is_others = table.contexts and context and key not in published and context not in contexts
        if None in key or is_others:
            continue  # a published sentence; another table's context
        why = failure or (context and why_left_out(context)) or table.source.missing
        yield table.shown(measured.get(key, {**named, "note": why}), HERE)


@cache
def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    return found


@cache
def tables() -> tuple[Table, ...]:
    return tuple(Table(**row) for row in content()["tables"])
