"""Time to the first token and to a short reply's end: recomputed, restored, from memory, and by a peer."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from kvasir_bench.arithmetic import Summary, Target
from kvasir_bench.engine.lab import Case, Lab, Row, Run
from kvasir_bench.engine.texts import Texts
from kvasir_bench.program import MEASURED_WITHIN_S

_SUFFIX_TOKENS = 48
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_CPU_LENGTHS = (256, 1024, 4096, 8192)
# The project's targets for a GPU: context, most warm / cold.
_MOST_WARM_TO_COLD = {8192: 0.3, 32768: 0.15}
_MOST_COLD_TO_PEER = 1.05
_MOST_LINK_TIMES = 2.0
_MOST_HOT_TO_HOT = 1.3


def run(lab: Lab) -> Case:
    """A restored turn gets its files from memory: `kvasir bench store` measures disk and wire."""
    texts, lengths = Texts(lab), lab.lengths(96, *(_LENGTHS if lab.is_gpu else _CPU_LENGTHS))
    rows = lab.pace.rows(lengths, lambda context: [_row(lab, texts, context)])
    texts.forget()
    return Case("Time to the first token", rows, list(_targets(rows)) if lab.is_gpu else ())


def _row(lab: Lab, texts: Texts, context: int) -> dict[str, Any]:
    suffix = lab.prompts.tokens(_SUFFIX_TOKENS, 1)
    reply_tokens = 4 if lab.scope.is_quick else 32
    memory = texts.remember(context - 1, 0)
    prompt, files = (*memory.tokens, *suffix), lab.agents.restored(memory)

    def computed() -> tuple[tuple[float, float], float | None]:
        cold = _times(lab.start(prompt, reply_tokens))
        if not lab.scope.has_peer:
            return cold, None
        return cold, lab.peer.post(lambda worker: worker.first_token_s(prompt)).result(MEASURED_WITHIN_S)

    def remembered() -> tuple[tuple[float, float], tuple[float, float]]:
        fork = lab.agents.fork(memory)
        warm = _times(lab.start(prompt, reply_tokens, files))
        hot = _times(lab.agents.resume(fork, suffix, reply_tokens))
        lab.agents.forget([fork])
        return warm, hot

    cold, peers = zip(*lab.pace.counted(f"first token after {context} tokens, computed", computed), strict=True)
    warm, hot = zip(*lab.pace.counted(f"first token after {context} tokens, remembered", remembered), strict=True)
    lab.agents.forget([memory])
    found = {"cold": cold, "warm": warm, "hot": hot}
    first = {name: Summary.of([first for first, _ in times]) for name, times in found.items()}
    cold_s, warm_s, hot_s = (each.median for each in first.values())
    warm_bytes = sum(len(data) for data in files.blobs)
    link_s = warm_bytes / lab.links.slowest
    peer_s = median(peers) if lab.scope.has_peer else None
    return {
        "context_tokens": len(memory.tokens),
        **{key: value for name, each in first.items() for key, value in each.named(f"{name}_s").items()},
        "cold_to_warm": cold_s / warm_s,
        "cold_to_hot": cold_s / hot_s,
        **{f"{name}_end_to_end_s": median(end for _, end in times) for name, times in found.items()},
        "hot_tokens_per_s": median((reply_tokens - 1) / (end - first) for first, end in found["hot"]),
        "warm_bytes": warm_bytes,
        "link_s": link_s,
        "warm_in_links": (warm_s - hot_s) / link_s,
        "peer_cold_s": peer_s,
        "cold_to_peer": cold_s / peer_s if peer_s else None,
    }


def _times(run: Run) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    run.end()
    return run.first_token_s, run.token_times[-1] - run.submitted_s


def _targets(rows: Sequence[Row]) -> Iterator[Target]:
    for row in rows:
        context, at = row["context_tokens"], f"{row['context_tokens']} tokens"
        if row["cold_to_peer"] is not None and context >= 2048:
            yield Target(f"cold / mlx-lm, {at}", row["cold_to_peer"], _MOST_COLD_TO_PEER, is_most=True)
        yield Target(f"(warm − hot) / (bytes / link), {at}", row["warm_in_links"], _MOST_LINK_TIMES, is_most=True)
        if context in _MOST_WARM_TO_COLD:
            yield Target(f"warm / cold, {at}", row["warm_s"] / row["cold_s"], _MOST_WARM_TO_COLD[context], is_most=True)
    hot = {row["context_tokens"]: row["hot_s"] for row in rows}
    if {1024, 32768} <= hot.keys():
        yield Target("hot at 32 K / hot at 1 K", hot[32768] / hot[1024], _MOST_HOT_TO_HOT, is_most=True)
