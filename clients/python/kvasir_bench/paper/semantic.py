"""Rows of the tables of "Agent Memory Below the Prompt", from measurements. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from kvasir_bench.arithmetic import median

Row = Mapping[str, Any]
Rows = Sequence[Row]
_RESTORED = "both_killed"  # with the page cache dropped
_AGENT_TOKENS = 4096


def bytes_a_token(facts: Row) -> Iterator[Row]:
    """Of well-known layouts, and of the loaded model."""
    loaded: dict[tuple[str, int], int] = {}
    for layer in facts["layers"]:
        loaded[layer["kind"], layer["window"]] = loaded.get((layer["kind"], layer["window"]), 0) + 1
    own = {"layers": [{"kind": kind, "window": window, "count": n} for (kind, window), n in loaded.items()]}
    models = {**facts["families"], facts["name"]: {**facts, **own}}
    for name, model in models.items():
        layers = " + ".join(_layers(each) for each in model["layers"])
        costs = {"kv_bytes_per_token_fp16": model["kv_bytes_per_token_fp16"]}
        yield {"model": name, "layers": layers, **costs, "kv_bytes_per_token_q4": model["kv_bytes_per_token"]}


def _layers(kind: Row) -> str:
    return f"{kind['count']} of {kind['window']}" if kind["window"] else f"{kind['count']} {kind['kind']}"


def savings(kv_bytes: Rows) -> Iterator[Row]:
    for row in kv_bytes:
        yield {**row, "savings": 1 - row["q4_bytes"] / row["fp16_bytes"]}


def peaks(found: Rows) -> Iterator[Row]:
    for row in found:
        yield {**row, "reduction": 1 - row["cells_peak_bytes"] / row["one_chunk_peak_bytes"]}


def scenarios(found: Row) -> Iterator[Row]:
    """The turns of agents with a KV memory."""
    for row in found["rows"]:
        if row["way"] == "kv" and row["scenario"] in found["shapes"]:
            yield {**row, **found["shapes"][row["scenario"]]}


def retrieval(found: Row) -> Iterator[Row]:
    for row in found["rows"]:
        if row["scenario"] == "all":
            yield {"memory": row["way"], **row}


def _by_length(agents: Rows) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    for length in dict.fromkeys(agent["context_tokens"] for agent in agents):
        yield {"context_tokens": length}, [agent for agent in agents if agent["context_tokens"] == length]


def loads(agents: Rows) -> Iterator[Row]:
    for row, alike in _by_length(agents):
        restored = [agent for agent in alike if agent[_RESTORED]["source"] == "warm"]
        load_s = median(agent[_RESTORED]["restore_s"] for agent in restored)
        yield {**row, "file_bytes": median(agent["file_bytes"] for agent in restored), "load_s": load_s}


def cold_turns(agents: Rows) -> Iterator[Row]:
    for row, alike in _by_length(agents):
        cold = [agent["cold"] for agent in alike]
        rates = [
            (turn["tokens"] - 1) / (turn["last_token_s"] - turn["first_token_s"]) for turn in cold if turn["tokens"] > 1
        ]
        yield {**row, **_seconds(cold), "decode_tokens_per_s": median(rates)}


def _seconds(turns: Rows) -> dict[str, float | None]:
    names = {"first_token_s": "first_token_s", "end_to_end_s": "last_token_s"}
    return {name: median(turn[key] for turn in turns) for name, key in names.items()}


def first_tokens(agents: Rows) -> Iterator[Row]:
    for row, alike in _by_length(agents):
        phases = {"cold_s": "cold", "warm_s": _RESTORED, "hot_s": "hot"}
        seconds = {name: _seconds([agent[phase] for agent in alike])["first_token_s"] for name, phase in phases.items()}
        ratios = {f"cold_to_{to}": _ratio(seconds["cold_s"], seconds[f"{to}_s"]) for to in ("warm", "hot")}
        yield {**row, **seconds, **ratios}


def ends(agents: Rows) -> Iterator[Row]:
    for row, alike in _by_length(agents):
        cold, hot = (_seconds([agent[phase] for agent in alike])["end_to_end_s"] for phase in ("cold", "hot"))
        yield {**row, "cold_end_to_end_s": cold, "hot_end_to_end_s": hot, "speedup": _ratio(cold, hot)}


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def turns(found: Rows) -> Iterator[Row]:
    """Behind the longest context; speed-ups against the first."""
    longest = max(row["context_tokens"] for row in found)
    of_longest = [row for row in found if row["context_tokens"] == longest]
    for place, row in enumerate(of_longest):
        speedup = of_longest[0]["end_to_end_s"] / row["end_to_end_s"] if place else None
        yield {**row, "tokens_per_s": row["tokens"] / row["end_to_end_s"], "speedup": speedup}


def modes(found: Rows) -> Iterator[Row]:
    streamed = {row["context_tokens"]: row["first_token_s"] for row in found if row["mode"] == "streaming"}
    for row in found:
        decoding_s = row["end_to_end_s"] - streamed[row["context_tokens"]]
        yield {**row, "decode_tokens_per_s": row["tokens"] / decoding_s if decoding_s > 0 else None}


def pairs(found: Rows) -> Iterator[Row]:
    """One of two that follow each other, and two at once."""
    for row in found:
        same = {name: row[name] for name in ("context_tokens", "tokens_per_s", "stream_tokens_per_s")}
        if row["arrival"] == "sequential":
            yield {**same, "requests": 1, "wall_s": row["end_to_end_s"] / 2, "first_token_s": row["first_s"]}
        elif row["arrival"] == "simultaneous":
            firsts = mean((row["first_s"], row["second_s"]))
            yield {**same, "requests": 2, "wall_s": row["end_to_end_s"], "first_token_s": firsts}


def staggered(found: Rows) -> Iterator[Row]:
    for row in found:
        ways = {"sequential": ("alone_first_s", "sequential_s"), "staggered": ("first_s", "staggered_s")}
        for way, (first, second) in ways.items():
            at = {"context_tokens": row["context_tokens"], "scheduling": way}
            yield {**at, "a_first_token_s": row[first], "b_first_token_s": row[second]}


def capacity(facts: Row, found: Rows) -> Iterator[Row]:
    """Agents into all memory that is left for KV, by the bytes of a token and of a prompt's computing."""
    memory, of_prompt = facts["memory"], max(found, key=lambda row: row["context_tokens"])
    available, tokens = memory["most_kv_bytes"], of_prompt["context_tokens"]
    cells, chunk = (
        max(0, of_prompt[f"{way}_peak_bytes"] - memory["weights_bytes"] - of_prompt[f"{way}_bytes"])
        for way in ("cells", "one_chunk")
    )
    exact, quantized = facts["kv_bytes_per_token_fp16"], facts["kv_bytes_per_token"]
    ways = {
        "FP16 cache, no chunking": (exact, 0, chunk / tokens),
        "FP16 cache, chunked": (exact, cells, 0.0),
        "Q4 cache, chunked": (quantized, cells, 0.0),
    }
    for name, (per_token, fixed, computing) in ways.items():
        agents = (available - fixed - computing * _AGENT_TOKENS) / (per_token * _AGENT_TOKENS)
        longest = (available - fixed) / (per_token + computing)
        sizes = {"agents_of_4k": max(0, int(agents)), "longest_context_tokens": max(0, int(longest))}
        yield {"configuration": name, "available_bytes": available, **sizes}
    on_disk = facts["free_disk_bytes"] // (quantized * _AGENT_TOKENS)
    longest_on_disk = min(sizes["longest_context_tokens"], facts["free_disk_bytes"] // quantized)
    persisted = {"agents_of_4k": on_disk, "longest_context_tokens": longest_on_disk}
    yield {"configuration": "Q4 cache, chunked, persisted", "available_bytes": facts["free_disk_bytes"], **persisted}


def servers(found: Rows) -> Iterator[Row]:
    for row in found:
        yield {**row, "turn_1_to_2": _ratio(row.get("turn_1_s"), row.get("turn_2_s")), "note": row.get("left_out", "")}


def matching(found: Rows) -> Iterator[Row]:
    """The third turn of a transcript."""
    for row in found:
        if (row["chat"], row["turn"]) == ("transcript", "3"):
            reused = {f"reused_{way}": row[way] / row["prompt_tokens"] for way in ("by_tokens", "by_characters")}
            yield {**row, **reused}


def perplexity(found: Row) -> Iterable[Row]:
    for way in (found["reference"], *found["rungs"], *found["peers"]):
        yield {**way, "kv_policy": way["name"], "kv_bytes_per_token": way["bytes_per_token"]}
