"""Rows of the tables from the findings of their cases. A row may have more columns than a table shows. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from kvasir_bench.arithmetic import median

Row = Mapping[str, Any]
Rows = Sequence[Row]
_RESTORED = "both_killed"  # with the page cache dropped
_AGENT_TOKENS = 4096


def with_columns(**columns: Callable[[Row], Any]) -> Callable[[Rows], Iterator[Row]]:
    """Each measured row, with columns that follow from it."""
    return lambda found: ({**row, **{name: of(row) for name, of in columns.items()}} for row in found)


def bytes_a_token(facts: Row) -> Iterator[Row]:
    """Of well-known layouts, and of the loaded model."""
    loaded = Counter((layer["kind"], layer["window"]) for layer in facts["layers"])
    own = [{"kind": kind, "window": window, "count": count} for (kind, window), count in loaded.items()]
    for name, model in {**facts["families"], facts["name"]: {**facts, "layers": own}}.items():
        kinds = (
            (each["count"], f"of {each['window']}" if each["window"] else each["kind"]) for each in model["layers"]
        )
        layers = " + ".join(f"{count} {kind}" for count, kind in kinds)
        yield {**model, "model": name, "layers": layers, "kv_bytes_per_token_q4": model["kv_bytes_per_token"]}


def scenarios(found: Row) -> Iterator[Row]:
    """The turns of agents with a KV memory."""
    for row in found["rows"]:
        if row["way"] == "kv" and row["scenario"] in found["shapes"]:
            yield {**row, **found["shapes"][row["scenario"]]}


def retrieval(found: Row) -> Iterable[Row]:
    return ({"memory": row["way"], **row} for row in found["rows"] if row["scenario"] == "all")


def by_length(agents: Rows) -> Iterator[Row]:
    for length in dict.fromkeys(agent["context_tokens"] for agent in agents):
        alike = [agent for agent in agents if agent["context_tokens"] == length]
        restored = [agent for agent in alike if agent[_RESTORED]["source"] == "warm"]
        first, last = (
            {phase: median(agent[phase][key] for agent in alike) for phase in ("cold", _RESTORED, "hot")}
            for key in ("first_token_s", "last_token_s")
        )
        colds = [agent["cold"] for agent in alike if agent["cold"]["tokens"] > 1]
        rates = [(cold["tokens"] - 1) / (cold["last_token_s"] - cold["first_token_s"]) for cold in colds]
        yield {
            "context_tokens": length,
            "file_bytes": median(agent["file_bytes"] for agent in restored),
            "load_s": median(agent[_RESTORED]["restore_s"] for agent in restored),
            "first_token_s": first["cold"],
            "end_to_end_s": last["cold"],
            "decode_tokens_per_s": median(rates),
            "cold_s": first["cold"],
            "warm_s": first[_RESTORED],
            "hot_s": first["hot"],
            "cold_to_warm": _ratio(first["cold"], first[_RESTORED]),
            "cold_to_hot": _ratio(first["cold"], first["hot"]),
            **{f"{phase}_end_to_end_s": last[phase] for phase in ("cold", "hot")},
            "speedup": _ratio(last["cold"], last["hot"]),
        }


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def turns(found: Rows) -> Iterator[Row]:
    """Behind the longest context; speed-ups against the first."""
    longest = max(row["context_tokens"] for row in found)
    first, *others = (row for row in found if row["context_tokens"] == longest)
    for row in (first, *others):
        speedup = None if row is first else first["end_to_end_s"] / row["end_to_end_s"]
        yield {**row, "tokens_per_s": row["tokens"] / row["end_to_end_s"], "speedup": speedup}


def modes(found: Rows) -> Iterator[Row]:
    streamed = {row["context_tokens"]: row["first_token_s"] for row in found if row["mode"] == "streaming"}
    for row in found:
        decoding_s = row["end_to_end_s"] - streamed[row["context_tokens"]]
        yield {**row, "decode_tokens_per_s": row["tokens"] / decoding_s if decoding_s > 0 else None}


def pairs(found: Rows) -> Iterator[Row]:
    """One of two that follow each other, and two at once."""
    for row in found:
        if row["arrival"] == "sequential":
            yield {**row, "requests": 1, "wall_s": row["end_to_end_s"] / 2, "first_token_s": row["first_s"]}
        elif row["arrival"] == "simultaneous":
            first_s = mean((row["first_s"], row["second_s"]))
            yield {**row, "requests": 2, "wall_s": row["end_to_end_s"], "first_token_s": first_s}


def staggered(found: Rows) -> Iterator[Row]:
    ways = {"sequential": ("alone_first_s", "sequential_s"), "staggered": ("first_s", "staggered_s")}
    for row in found:
        for way, (first, second) in ways.items():
            yield {**row, "scheduling": way, "a_first_token_s": row[first], "b_first_token_s": row[second]}


def capacity(facts: Row, found: Rows) -> Iterator[Row]:
    """Agents into all memory that is left for KV, by the bytes of a token and of a prompt's computing."""
    memory, of_prompt = facts["memory"], max(found, key=lambda row: row["context_tokens"])
    available, disk = memory["most_kv_bytes"], facts["free_disk_bytes"]
    cells, chunk = (
        max(0, of_prompt[f"{way}_peak_bytes"] - memory["weights_bytes"] - of_prompt[f"{way}_bytes"])
        for way in ("cells", "one_chunk")
    )
    exact, quantized = facts["kv_bytes_per_token_fp16"], facts["kv_bytes_per_token"]
    ways = {
        "FP16 cache, no chunking": (exact, 0, chunk / of_prompt["context_tokens"]),
        "FP16 cache, chunked": (exact, cells, 0.0),
        "Q4 cache, chunked": (quantized, cells, 0.0),
    }
    for name, (per_token, fixed, computing) in ways.items():
        agents = (available - fixed - computing * _AGENT_TOKENS) / (per_token * _AGENT_TOKENS)
        longest = max(0, int((available - fixed) / (per_token + computing)))
        sizes = {"agents_of_4k": max(0, int(agents)), "longest_context_tokens": longest}
        yield {"configuration": name, "available_bytes": available, **sizes}
    sizes = {
        "agents_of_4k": disk // (quantized * _AGENT_TOKENS),
        "longest_context_tokens": min(longest, disk // quantized),
    }
    yield {"configuration": "Q4 cache, chunked, persisted", "available_bytes": disk, **sizes}


def servers(found: Rows) -> Iterator[Row]:
    for row in found:
        yield {**row, "turn_1_to_2": _ratio(row.get("turn_1_s"), row.get("turn_2_s")), "note": row.get("left_out", "")}


def matching(found: Rows) -> Iterator[Row]:
    for row in found:
        if (row["chat"], row["turn"]) == ("transcript", "3"):
            reused = {f"reused_{way}": row[way] / row["prompt_tokens"] for way in ("by_tokens", "by_characters")}
            yield {**row, **reused}


def perplexity(found: Row) -> Iterator[Row]:
    for way in (found["reference"], *found["rungs"], *found["peers"]):
        yield {**way, "kv_policy": way["name"], "kv_bytes_per_token": way["bytes_per_token"]}


def attention(found: Row) -> Iterator[Row]:
    for row in found["rows"]:
        yield {**row, "attention": row["who"], "context_tokens": row["tokens"], "error": row.get("error")}


def open_loop(found: Row) -> Iterator[Row]:
    phases, first = found["phases"], found["first_token_s"]
    times = {f"first_token_{rank}_s": first[rank] for rank in ("p50", "p95")}
    yield {**found, **times, "turns": phases["steady"], "ramp_turns": phases["ramp"], "tail_s": phases["tail_s"]}


def backends(weights: Rows, peer: Rows) -> Iterator[Row]:
    """mlx-lm and Kvasir with the model that was given."""
    for name, key in {"MLX": "peer_tokens_per_s", "Kvasir": "engine_tokens_per_s"}.items():
        yield {**weights[0], "backend": name, "tokens_per_s": peer[0][key]}


def fewer_bits(found: Row) -> Iterator[Row]:
    """The model's own weights, as of 16 bits, and each choice of matrices: recall, or the same likeliest token."""
    names = {"4 bits, all": "4 bits, all layers", "8 bits, all": "8 bits, all layers"}
    for row in ({**found["reference"], "name": "bfloat16"}, *found["weights"]):
        accuracy = row["recall"]["share"] if "recall" in row else row["top1_agreement"]
        yield {**row, "weights": names.get(row["name"], row["name"]), "accuracy": accuracy}


def decoding(found: Row) -> Iterator[Row]:
    """One mask a pass, each window, and the model's own window under other thresholds."""
    for row in found["windows"]:
        if row["window"] == 1:
            yield {**row, "method": "autoregressive", "tokens_per_forward": row["tokens_per_pass"], "speedup": None}
        else:
            yield _by_window(row, "")
    yield from (_by_window(row, f", {row['threshold']} nats") for row in found["thresholds"])


def _by_window(row: Row, behind: str) -> Row:
    method = f"WeDLM, window {row['window']}{behind}"
    return {**row, "method": method, "tokens_per_forward": row["tokens_per_pass"]}


def cacheability(found: Row) -> Iterator[Row]:
    yield from ({**row, "prompts": "all"} for row in found["own"])


def parts(found: Rows) -> Iterator[Row]:
    row = found[0]
    whole_s = row["tokenize_s"] + row["prefill_s"] + row["decode_s"]
    names = {"tokenization": "tokenize_s", "prefill": "prefill_s", "decode": "decode_s", "all": "all_s"}
    for name, key in names.items():
        yield {"part": name, "seconds_s": row[key], "share": row[key] / whole_s}
