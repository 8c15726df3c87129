"""Measures the wanted tables: each case once, at the contexts of all tables that need it."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvasir.errors import InvalidArgument, KvasirError

from kvasir_bench.commands.paper.bench import Bench
from kvasir_bench.commands.paper.cases import CASES
from kvasir_bench.paper.rows import rows_of
from kvasir_bench.paper.tables import Table, tables


def chosen(names: Sequence[str]) -> list[Table]:
    """The tables of these names; all if there are none. Raises InvalidArgument."""
    for name in names:
        if not any(table.is_called(name) for table in tables()):
            known = ", ".join(table.number for table in tables())
            raise InvalidArgument(f"--table {name}: expected 001 to 004, or one of {known}", field="table")
    return [table for table in tables() if not names or any(map(table.is_called, names))]


def measured(bench: Bench, wanted: Sequence[Table], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The results. `keep` gets those so far after each table. Raises FailedPrecondition for a model that cannot be
    used; another failure of a case is the note of its tables' rows.
    """
    facts, found = bench.facts, dict[str, Any]()
    results: dict[str, Any] = {
        "machine": {
            "platform": platform.platform(),
            "device": facts["device"],
            "cores": os.cpu_count(),
            **facts["versions"],
            "load_before": round(os.getloadavg()[0], 2),
        },
        "model": {name: facts[name] for name in ("name", "context_tokens", "compute_type", "kv_bytes_per_token")},
        "settings": {"repeats": bench.repeats, "is_quick": bench.scope.is_quick},
        "tables": [],
    }
    for table in wanted:
        failure = ""
        for case in table.source.cases:
            if case not in found:
                contexts = {each for other in wanted if case in other.source.cases for each in other.contexts}
                found[case] = _found(bench, case, sorted(contexts))
            failure = failure or (found[case].message if isinstance(found[case], KvasirError) else "")
        findings = () if failure else tuple(found[case] for case in table.source.cases)
        rows = list(rows_of(table, findings, bench.lengths_of(table.contexts), bench.why_left_out, failure))
        results["tables"].append({**_as_json(table), "rows": rows})
        results["machine"]["load_after"] = round(os.getloadavg()[0], 2)
        keep(results)
    return results


def _found(bench: Bench, case: str, contexts: Sequence[int]) -> Any:
    try:
        return CASES[case](bench, bench.lengths_of(contexts))
    except KvasirError as error:
        bench.say(f"{case}: {error.message}")
        return error


def _as_json(table: Table) -> dict[str, Any]:
    return {name: value for name, value in asdict(table).items() if name != "figures"}
