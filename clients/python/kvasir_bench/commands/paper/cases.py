"""The measurements for the tables. A case gets all contexts, and returns rows whose `context_tokens` is one of them."""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument, KvasirError

from kvasir_bench.commands.paper import conversations
from kvasir_bench.commands.paper.bench import Bench
from kvasir_bench.memory_path import campaign
from kvasir_bench.paper.tables import Table, rows_of, tables

Rows = list[dict[str, Any]]
CaseOfLengths = Callable[[Bench, Sequence[int]], Any]
_PEER_CHUNK = 2048
_SCENARIOS = ("prisoners-dilemma", "gossip")
_THRESHOLDS = (0.1, 1.0)  # nats, beside the model's own
_WAYS = ("kv", "prefill", "bm25-1")


def _kv_bytes(bench: Bench, lengths: Sequence[int]) -> Rows:
    """KV after a prompt in cells, with four bits and with sixteen."""
    cell = bench.facts["cell_tokens"]
    return [_bytes(bench, length, q4=("q4", cell), fp16=("fp", cell)) for length in lengths]


def _peaks(bench: Bench, lengths: Sequence[int]) -> Rows:
    """The most memory during a prompt, in cells and in one chunk."""
    cell = bench.facts["cell_tokens"]
    return [_bytes(bench, length, cells=("q4", cell), one_chunk=("q4", length)) for length in lengths]


def _growth(bench: Bench, lengths: Sequence[int]) -> Rows:
    cell = bench.facts["cell_tokens"]
    ways = {"kvasir, q4": ("q4", cell), "kvasir, 16 bits": ("fp", cell), "mlx-lm": ("mlx-lm", _PEER_CHUNK)}
    return [{"kv": name, **_bytes(bench, length, kv=way)} for name, way in ways.items() for length in lengths]


def _bytes(bench: Bench, length: int, **ways: tuple[str, int]) -> dict[str, Any]:
    row: dict[str, Any] = {"context_tokens": length}
    for name, (kv, cell_tokens) in ways.items():
        found = bench.bytes_of(length, kv, cell_tokens)
        row[f"{name}_bytes"] = found["after_bytes"] - found["before_bytes"]
        row[f"{name}_peak_bytes"] = found["peak_bytes"]
    return row


def _path(bench: Bench, lengths: Sequence[int]) -> Rows:
    """Agents' memories on their way to the store and back, by `kvasir bench memory-path`."""
    scope = campaign.PathScope(lengths, bench.repeats, is_quick=bench.is_quick)
    agents = campaign.measure(scope, bench.services, bench.say)["agents"]
    size = bench.facts["kv_bytes_per_token"]
    return [
        {"context_tokens": agent["length"], "file_bytes": size * agent["both_killed"]["cached_tokens"], **agent}
        for agent in agents
    ]


def _of_engine(name: str, key: str, **options: object) -> CaseOfLengths:
    """A case of `kvasir bench engine`; `key` holds the wanted context."""

    def measured(bench: Bench, lengths: Sequence[int]) -> Rows:
        given = {"model": bench.model, "lengths": ",".join(map(str, lengths)), "repeats": bench.repeats, **options}
        found = bench.of_bench("engine", "the engine could not be measured", "--only", name, **given)
        return [{"context_tokens": row[key], **row} for row in found["cases"][name]["rows"]]

    return measured


def _attention(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    return bench.of_bench("attention", "attention could not be measured", quick=bench.is_quick)


def _quality(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    return bench.of_bench("quality", "KV policies were not measured", model=bench.model, quick=bench.is_quick)


def _windows(bench: Bench, lengths: Sequence[int]) -> dict[str, Rows]:
    """By window; and the own one under other thresholds, for which the model stands in directories of their own."""
    rows, others = _of_windows(bench, lengths), Rows()
    model = Path(bench.model).expanduser()
    for threshold in _THRESHOLDS if len(rows) > 1 and model.is_dir() else ():
        bench.say(f"windows with a threshold of {threshold} nats")
        with tempfile.TemporaryDirectory() as folder:
            with_field(model, Path(folder), wedlm_entropy_threshold=threshold)
            others += _own(_of_windows(replace(bench, model=folder), lengths))
    return {"windows": rows, "own": _own(rows), "thresholds": others}


def _of_windows(bench: Bench, lengths: Sequence[int]) -> Rows:
    rows: Rows = _of_engine("windows", "context", batches=1)(bench, lengths)
    return rows


def _own(rows: Rows) -> Rows:
    return [row for row in rows if row["window"] == row["own_window"] > 1]


def with_field(model: Path, folder: Path, **fields: Any) -> None:
    """The model again, in an empty folder, with other fields in its config.json. Its weights are linked."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **fields}), "utf-8")


def _fewer_bits(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    given = {"model": bench.model, "quick": bench.is_quick, "weights": True}
    return bench.of_bench("quality", "fewer bits of weights were not measured", **given)


def _weights(bench: Bench, _lengths: Sequence[int]) -> Rows:
    bench.say("loading weights, mapped and copied")
    probe, failure = "engine.weights_probe", "weights were not loaded"
    ways = {"mapped": False, "copied": True}
    return [{"loading": name, **bench.of_bench(probe, failure, model=bench.model, copy=ways[name])} for name in ways]


def _scenarios(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    from kvasir_bench.scenarios import report  # the extra's packages are imported where they are needed

    variants = 1 if bench.is_quick else 2 * bench.repeats
    options = {"variants": variants, "together": variants, "first": 1, "model": bench.model}
    scope = report.scope_of(_SCENARIOS, _WAYS, is_quick=True, time_limit_s=None, **options)
    return report.run(scope, bench.say, None) | {"shapes": report.shapes(_SCENARIOS)}


CASES: Mapping[str, CaseOfLengths] = {
    "facts": lambda bench, _lengths: bench.facts,
    "kv_bytes": _kv_bytes,
    "peaks": _peaks,
    "growth": _growth,
    "path": _path,
    "three_turns": conversations.three_turns,
    "prefix": conversations.prefix,
    "over_http": conversations.over_http,
    "servers": conversations.servers,
    "open_loop": conversations.open_loop,
    "pairs": _of_engine("pairs", "prompt_tokens"),
    "staggered": _of_engine("staggered", "prompt_tokens"),
    "matching": _of_engine("matching", "text_tokens"),
    "parts": _of_engine("parts", "prompt_tokens"),
    "peer": _of_engine("peer", "context", batches=1, peer="mlx-lm"),
    "attention": _attention,
    "quality": _quality,
    "weights": _weights,
    "windows": _windows,
    "fewer_bits": _fewer_bits,
    "scenarios": _scenarios,
}


def chosen(names: Sequence[str]) -> list[Table]:
    """The tables of these names; all if there are none. Raises InvalidArgument."""
    for name in names:
        if not any(table.is_called(name) for table in tables()):
            known = ", ".join(table.number for table in tables())
            raise InvalidArgument(f"--table {name}: expected 001 to 004, or one of {known}", field="table")
    return [table for table in tables() if not names or any(map(table.is_called, names))]


def measured(bench: Bench, wanted: Sequence[Table], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`keep` gets the results after each table. A case's failure is a note; a model's raises FailedPrecondition."""
    facts, found = bench.facts, dict[str, Any]()
    machine = {"platform": platform.platform(), "device": facts["device"], "cores": os.cpu_count(), **facts["versions"]}
    results: dict[str, Any] = {
        "machine": {**machine, "load_before": round(os.getloadavg()[0], 2)},
        "model": {name: facts[name] for name in ("name", "context_tokens", "compute_type", "kv_bytes_per_token")},
        "settings": {"repeats": bench.repeats, "is_quick": bench.is_quick},
        "tables": [],
    }
    for table in wanted:
        for case in table.source.cases:
            if case not in found:
                contexts = {each for other in wanted if case in other.source.cases for each in other.contexts}
                found[case] = _found(bench, case, sorted(contexts))
        findings = [found[case] for case in table.source.cases]
        failure = next((each.message for each in findings if isinstance(each, KvasirError)), "")
        rows = list(rows_of(table, findings, bench.lengths_of(table.contexts), bench.why_left_out, failure))
        head = {name: value for name, value in asdict(table).items() if name != "figures"}
        results["tables"].append({**head, "rows": rows})
        results["machine"]["load_after"] = round(os.getloadavg()[0], 2)
        keep(results)
    return results


def _found(bench: Bench, case: str, contexts: Sequence[int]) -> Any:
    try:
        return CASES[case](bench, bench.lengths_of(contexts))
    except KvasirError as error:
        bench.say(f"{case}: {error.message}")
        return error
