"""Rows of the tables of the other three papers, from measurements. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]


def attention(found: Row) -> Iterator[Row]:
    for row in found["rows"]:
        yield {**row, "attention": row["who"], "context_tokens": row["tokens"], "error": row.get("error")}


def open_loop(found: Row) -> Iterator[Row]:
    phases, first = found["phases"], found["first_token_s"]
    times = {f"first_token_{rank}_s": first[rank] for rank in ("p50", "p95")}
    shares = {"turns": phases["steady"], "ramp_turns": phases["ramp"], "tail_s": phases["tail_s"]}
    yield {"rate_per_s": found["rate_per_s"], "tokens_per_s": found["tokens_per_s"], **times, **shares}


def backends(weights: Rows, peer: Rows) -> Iterator[Row]:
    """mlx-lm and Kvasir with the model that was given."""
    names = {"MLX": "peer_tokens_per_s", "Kvasir": "engine_tokens_per_s"}
    for name, key in names.items():
        yield {**weights[0], "backend": name, "tokens_per_s": peer[0][key]}


def decoding(peer: Rows) -> Iterator[Row]:
    yield {"method": "autoregressive", "tokens_per_s": peer[0]["engine_tokens_per_s"]}


def parts(found: Rows) -> Iterator[Row]:
    row = found[0]
    whole_s = row["tokenize_s"] + row["prefill_s"] + row["decode_s"]
    names = {"tokenization": "tokenize_s", "prefill": "prefill_s", "decode": "decode_s", "all": "all_s"}
    for name, key in names.items():
        yield {"part": name, "seconds_s": row[key], "share": row[key] / whole_s}


def growth(found: Rows) -> Iterator[Row]:
    """KV, and the most of everything, while one memory grows."""
    for row in found:
        yield {**row, "peak_bytes": row["kv_peak_bytes"]}
