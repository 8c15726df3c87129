"""The names in the JSON of `kvasir bench engine` and their meanings. They do not change, because scripts read them.

The measuring program (`python -m kvasir_bench.engine`) prints these names only, and the command line's help shows them.
"""

from collections.abc import Mapping

TOP: Mapping[str, str] = {
    "machine": "platform, processor, cores, device, device_name, device_bytes, blas, versions, the load average before "
    "and after, and links_bytes_per_s: copies to the device and on it, and BLAKE3 (of first_token)",
    "model": "name, layers, bytes of KV per token, cell size, compute type, KV policy",
    "settings": "is_quick, repeats, lengths, batches, time_limit_s, elapsed_s",
    "cases": "by case: title, and rows of the keys below",
    "targets": "case, what, found, wanted, is_met",
}

CASES: Mapping[str, Mapping[str, str]] = {
    "decode": {
        "context": "tokens that each row has before it; 200-4000 is a mix",
        "batch": "rows that decode together",
        "tokens_per_s": "of all rows, while all of them decode",
        "tokens_per_s_spread": "",
        "ratio_to_one": "tokens_per_s / that of one row, same context (of a mix: the mean context)",
    },
    "peer": {
        "context": "as in decode",
        "batch": "as in decode",
        "engine_tokens_per_s": "decoded, after all prompts are computed",
        "peer_tokens_per_s": "the same by mlx-lm's BatchGenerator with its own KV caches",
        "ratio": "engine / peer",
        "ratio_spread": "",
        "engine_total_s": "prompts and tokens, from the first submit to the last end",
        "peer_total_s": "the same by mlx-lm",
        "total_ratio": "peer_total_s / engine_total_s: above 1 the engine is faster",
    },
    "first_token": {
        "context_tokens": "that are remembered; 48 new ones follow",
        "cold_s": "to the first token, everything computed",
        "cold_s_spread": "",
        "warm_s": "restored from tensor files",
        "warm_s_spread": "",
        "hot_s": "from the engine's own memory",
        "hot_s_spread": "",
        "cold_to_warm": "cold_s / warm_s",
        "cold_to_hot": "cold_s / hot_s",
        "cold_end_to_end_s": "to the end of a reply of 32 tokens",
        "warm_end_to_end_s": "the same, restored",
        "hot_end_to_end_s": "the same, from the engine's own memory",
        "hot_tokens_per_s": "of that reply, after its first token",
        "warm_bytes": "of the tensor files that are restored",
        "link_s": "warm_bytes over the slowest of links_bytes_per_s",
        "warm_in_links": "(warm_s - hot_s) / link_s",
        "peer_cold_s": "cold_s of mlx-lm; none without --peer",
        "cold_to_peer": "cold_s / peer_cold_s",
    },
    "pairs": {
        "arrival": "of the second agent: sequential (after the first's end), simultaneous, or staggered (at a third "
        "of the first's reply)",
        "prompt_tokens": "of each agent, recomputed",
        "reply_tokens": "of each agent",
        "first_s": "the first agent's time to its first token",
        "second_s": "the second agent's, from its own arrival",
        "end_to_end_s": "from the first arrival to the last token",
        "tokens_per_s": "of both replies, over end_to_end_s",
        "ratio_to_sequential": "sequential end_to_end_s / this",
    },
    "staggered": {
        "sequential_s": "from B's arrival, at a third of A's tokens, to B's first token when B waits for A's end",
        "staggered_s": "the same when B joins at once",
        "ratio": "sequential_s / staggered_s",
        "ratio_spread": "",
        "longest_gap_s": "between two tokens of A",
        "allowed_gap_s": "budget_s + cell_s + step_s",
        "gap_ratio": "longest_gap_s / allowed_gap_s",
        "budget_s": "a step's time budget beside decoding",
        "cell_s": "the longest cell of B's prompt, alone",
        "step_s": "a step that decodes A and B",
    },
    "gaps": {
        "beside": "what another agent does while streams run: nothing, prefill, fork, restore",
        "tokens": "of the agent that joins so",
        "streams": "that run",
        "median_gap_s": "between two tokens of a stream",
        "longest_gap_s": "the longest of them",
        "longest_gap_s_spread": "",
        "ratio_to_nothing": "longest_gap_s / that beside nothing",
        "stalled_steps": "longest_gap_s / the median gap beside nothing, less one",
    },
    "cancel": {
        "during": "decode, or prefill of a prompt of so many tokens, at so many of them",
        "median_s": "from cancel() until the turn's failure is reported and its row is gone",
        "longest_s": "the longest of the repeats",
        "step_s": "the turn's last whole step, or cell, before it",
        "ratio": "until it is gone / step_s: about 1 when the step under way is all that is waited for",
    },
    "decoding_bytes": {
        "agents": "that decode together",
        "context_tokens": "of each",
        "kv_bytes": "that the engine counts for them",
        "scratch_bytes": "that MLX held beyond that at most while they decoded",
        "fp16_bytes": "of the same tokens at 16 bits",
        "ratio": "(kv_bytes + scratch_bytes) / fp16_bytes",
    },
    "memory": {
        "how": "whose KV, and in which pieces the prompt is computed",
        "prompt_tokens": "computed, each row in a process of its own",
        "peak_bytes": "most memory that MLX held, the weights among it",
        "resident_bytes": "of KV after the turn: what the engine counts, or what MLX holds more with mlx-lm's own",
        "kv_bytes_per_token": "resident_bytes / tokens",
        "peak_ratio": "peak_bytes / that of one chunk",
        "resident_ratio": "resident_bytes / that of 16-bit KV",
    },
    "matching": {
        "chat": "messages (through the model's template) or transcript (lines of plain text)",
        "turn": "of the chat; the last row is their sum",
        "prompt_tokens": "of the whole prompt",
        "by_characters": "tokens reused when texts are compared",
        "by_tokens": "tokens reused when the whole prompt is tokenized again and tokens are compared",
        "ratio": "by_characters / by_tokens; none where that is 0",
    },
    "shared_prefix": {
        "sharing": "whether the agents are of one namespace",
        "agents": "that arrive together, with one prefix and 64 tokens each of their own",
        "prefix_tokens": "of the shared prefix",
        "prefilled_tokens": "computed for all of them",
        "mean_first_token_s": "over the agents",
        "last_first_token_s": "until every agent has its first token",
        "prefilled_ratio": "prefilled_tokens / that without sharing",
        "time_ratio": "last_first_token_s without sharing / this",
    },
}
SPREAD = "…_spread: (largest − smallest) / median over the repeats"


def help_text() -> str:
    """All names, a paragraph for each case."""
    paragraphs = [_paragraph("JSON", TOP), *(_paragraph(case, keys) for case, keys in CASES.items()), SPREAD]
    return "\n\n".join(paragraphs)


def _paragraph(name: str, keys: Mapping[str, str]) -> str:
    meanings = "; ".join(f"{key}: {meaning}" for key, meaning in keys.items() if meaning)
    return f"{name}: {meanings}."
