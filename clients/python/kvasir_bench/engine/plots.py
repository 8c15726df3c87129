"""The picture of each case of `kvasir bench engine`."""

from collections.abc import Mapping
from typing import Any

from kvasir_bench.pictures import Picture, Plots

PICTURES: Mapping[str, Picture] = {
    "decode": Picture("Tokens per second by rows in the batch", "batch", ("tokens_per_s",), by="context"),
    "peer": Picture("Engine / mlx-lm with exact KV, decoding", "context", ("ratio",), by="batch"),
    "first_token": Picture(
        "Seconds to the first token", "context_tokens", ("cold_s", "warm_s", "hot_s", "peer_cold_s"), is_log=True
    ),
    "parts": Picture(
        "Seconds of a turn's parts", "prompt_tokens", ("tokenize_s", "prefill_s", "decode_s"), is_log=True
    ),
    "pairs": Picture("Tokens per second of two agents", "arrival", ("tokens_per_s",), by="prompt_tokens"),
    "staggered": Picture(
        "Seconds of the staggered case",
        "prompt_tokens",
        ("sequential_s", "staggered_s", "longest_gap_s", "allowed_gap_s"),
    ),
    "gaps": Picture("Longest gap of a stream, s", "beside", ("median_gap_s", "longest_gap_s"), is_log=True),
    "cancel": Picture("Seconds until a cancelled turn is gone", "during", ("median_s", "longest_s", "step_s")),
    "decoding_bytes": Picture(
        "Bytes of agents that decode", "agents", ("kv_bytes", "scratch_bytes", "fp16_bytes"), is_log=True
    ),
    "memory": Picture(
        "Bytes of one long prompt", "prompt_tokens", ("peak_bytes", "resident_bytes"), by="how", is_log=True
    ),
    "matching": Picture("Tokens reused over a chat", "turn", ("by_characters", "by_tokens"), by="chat"),
    "shared_prefix": Picture(
        "Tokens computed for agents with one prefix", "prefix_tokens", ("prefilled_tokens",), by="sharing"
    ),
}


def plots(results: Mapping[str, Any]) -> Plots:
    """A picture for each case that was measured."""
    machine = results["machine"]
    computer = f"{machine['processor']}, {machine['cores']} cores"
    computer = computer if machine["device"] == "cpu" else machine["device_name"]
    note = f"{computer}, mlx {machine['mlx']}, {results['model']['name']}"
    return Plots(note, {name: (PICTURES[name], case["rows"]) for name, case in results["cases"].items()})
