"""The measurements for the tables, in programs of their own; conversations are in `conversations.py`.

A case gets the contexts of all tables that need it, and returns rows whose `context_tokens` is one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvasir_bench.commands.paper import conversations
from kvasir_bench.commands.paper.bench import Bench
from kvasir_bench.memory_path import campaign, findings
from kvasir_bench.program import measured_by

Rows = list[dict[str, Any]]
_PEER_CHUNK = 2048
_SCENARIOS = ("prisoners-dilemma", "gossip")
_WAYS = ("kv", "prefill", "bm25-1")


def facts(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    return bench.facts


def kv_bytes(bench: Bench, lengths: Sequence[int]) -> Rows:
    """KV after a prompt in cells, with four bits and with sixteen."""
    ways = {"q4": "q4", "fp16": "fp"}
    return [_bytes(bench, length, ways, bench.facts["cell_tokens"]) for length in lengths]


def peaks(bench: Bench, lengths: Sequence[int]) -> Rows:
    """The most memory during a prompt, in cells and in one chunk."""
    cell = bench.facts["cell_tokens"]
    return [
        _bytes(bench, length, {"cells": "q4"}, cell) | _bytes(bench, length, {"one_chunk": "q4"}, length)
        for length in lengths
    ]


def growth(bench: Bench, lengths: Sequence[int]) -> Rows:
    """KV by length, of Kvasir and of mlx-lm."""
    cell = bench.facts["cell_tokens"]
    ways = {"kvasir, q4": ("q4", cell), "kvasir, 16 bits": ("fp", cell), "mlx-lm": ("mlx-lm", _PEER_CHUNK)}
    return [
        {"kv": name, **_bytes(bench, length, {"kv": kv}, cell_tokens)}
        for name, (kv, cell_tokens) in ways.items()
        for length in lengths
    ]


def _bytes(bench: Bench, length: int, ways: Mapping[str, str], cell_tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {"context_tokens": length}
    for name, kv in ways.items():
        found = bench.probed(length, kv, cell_tokens)
        row[f"{name}_bytes"] = found["after_bytes"] - found["before_bytes"]
        row[f"{name}_peak_bytes"] = found["peak_bytes"]
    return row


def path(bench: Bench, lengths: Sequence[int]) -> Rows:
    """Agents' memories on their way to the store and back, by `kvasir bench memory-path`."""
    scope = campaign.PathScope(lengths, bench.repeats, is_quick=bench.scope.is_quick)
    agents: Rows = findings.complete(campaign.measure(scope, bench.services, bench.say))["agents"]
    per_token = bench.facts["kv_bytes_per_token"]
    return [
        {"context_tokens": agent["length"], "file_bytes": per_token * agent["both_killed"]["cached_tokens"], **agent}
        for agent in agents
    ]


def _of_engine(name: str, key: str, **options: object) -> "CaseOfLengths":
    """A case of `kvasir bench engine`; `key` holds the wanted context."""

    def measured(bench: Bench, lengths: Sequence[int]) -> Rows:
        return [{"context_tokens": row[key], **row} for row in bench.engine_case(name, lengths, **options)]

    return measured


def attention(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    options = {"--quick": bench.scope.is_quick}
    return measured_by("attention", "attention could not be measured", options, bench.say)


def quality(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    options = {"--model": bench.scope.model, "--quick": bench.scope.is_quick}
    return measured_by("quality", "KV policies were not measured", options, bench.say)


def weights(bench: Bench, _lengths: Sequence[int]) -> Rows:
    """Loading the model over mapped files, and as a copy."""
    bench.say("loading weights, mapped and copied")
    ways = {"mapped": False, "copied": True}
    return [
        {
            "loading": name,
            **measured_by(
                "engine.weights_probe", "weights were not loaded", {"--model": bench.scope.model, "--copy": copies}
            ),
        }
        for name, copies in ways.items()
    ]


def scenarios(bench: Bench, _lengths: Sequence[int]) -> dict[str, Any]:
    """Scenarios under three ways to remember."""
    from kvasir_bench.scenarios import report  # the extra's packages are imported where they are needed

    variants = 1 if bench.scope.is_quick else 2 * bench.repeats
    options = {"variants": variants, "together": variants, "first": 1, "model": bench.scope.model}
    scope = report.scope_of(_SCENARIOS, _WAYS, is_quick=True, time_limit_s=None, **options)
    return report.run(scope, bench.say, None) | {"shapes": report.shapes(_SCENARIOS)}


CaseOfLengths = Callable[[Bench, Sequence[int]], Any]
CASES: Mapping[str, CaseOfLengths] = {
    "facts": facts,
    "kv_bytes": kv_bytes,
    "peaks": peaks,
    "growth": growth,
    "path": path,
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
    "attention": attention,
    "quality": quality,
    "weights": weights,
    "scenarios": scenarios,
}
