"""Time to the first token, and to the end of a short reply, over context: recomputed, restored, and from memory.

With a peer, mlx-lm computes the same prompt in the same rounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir_bench.arithmetic import Summary, Target
from kvasir_bench.engine.lab import Case, Lab, Run
from kvasir_bench.program import MEASURED_WITHIN_S

_SUFFIX_TOKENS = 48
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
# The project's targets for a GPU: context, most warm / cold.
_MOST_WARM_TO_COLD = {8192: 0.3, 32768: 0.15}
_MOST_COLD_TO_PEER = 1.05
_MOST_LINK_TIMES = 2.0
_MOST_HOT_TO_HOT = 1.3


@dataclass(frozen=True, slots=True)
class FirstTokenRow:
    """A context; keys as in `kvasir_bench.engine.keys`."""

    context_tokens: int
    cold_s: float
    cold_s_spread: float
    warm_s: float
    warm_s_spread: float
    hot_s: float
    hot_s_spread: float
    cold_to_warm: float
    cold_to_hot: float
    cold_end_to_end_s: float
    warm_end_to_end_s: float
    hot_end_to_end_s: float
    hot_tokens_per_s: float
    warm_bytes: int
    link_s: float
    warm_in_links: float
    peer_cold_s: float | None
    cold_to_peer: float | None


def run(lab: Lab) -> Case:
    """A restored turn gets its files from memory: `kvasir bench store` measures disk and wire."""
    contexts = lab.chosen_lengths((96,) if lab.is_quick else _LENGTHS)
    rows = lab.rows(contexts, lambda context: [_row(lab, context)])
    return Case("Time to the first token", rows, list(_targets(rows)) if lab.is_gpu else ())


def _row(lab: Lab, context: int) -> FirstTokenRow:
    suffix = lab.prompts.tokens(_SUFFIX_TOKENS, 1)
    reply_tokens = 4 if lab.is_quick else 32
    memory = lab.remember(lab.prompts.tokens(context - 1, 0))
    prompt, files = (*memory.tokens, *suffix), lab.restored(memory)
    found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": [], "hot": []}
    peers: list[float] = []
    for counts in lab.rounds(f"first token after {context} tokens"):
        fork = lab.fork(memory)
        seconds = {
            "cold": _times(lab.start(prompt, reply_tokens)),
            "warm": _times(lab.start(prompt, reply_tokens, files)),
            "hot": _times(lab.resume(fork, suffix, reply_tokens)),
        }
        lab.forget([fork])
        peer_s = _peer_first_token_s(lab, prompt) if lab.has_peer else None
        if counts:
            for name, times in seconds.items():
                found[name].append(times)
            peers += [peer_s] if peer_s is not None else []
    lab.forget([memory])
    cold, warm, hot = (Summary.of([first for first, _ in found[name]]) for name in ("cold", "warm", "hot"))
    ends = {name: Summary.of([end for _, end in times]).median for name, times in found.items()}
    rates = [(reply_tokens - 1) / (end - first) for first, end in found["hot"]]
    warm_bytes = sum(len(data) for data in files.blobs)
    link_s = warm_bytes / lab.link_bytes_per_s
    peer = Summary.of(peers).median if peers else None
    return FirstTokenRow(
        context_tokens=len(memory.tokens),
        cold_s=cold.median,
        cold_s_spread=cold.spread,
        warm_s=warm.median,
        warm_s_spread=warm.spread,
        hot_s=hot.median,
        hot_s_spread=hot.spread,
        cold_to_warm=cold.median / warm.median,
        cold_to_hot=cold.median / hot.median,
        cold_end_to_end_s=ends["cold"],
        warm_end_to_end_s=ends["warm"],
        hot_end_to_end_s=ends["hot"],
        hot_tokens_per_s=Summary.of(rates).median,
        warm_bytes=warm_bytes,
        link_s=link_s,
        warm_in_links=(warm.median - hot.median) / link_s,
        peer_cold_s=peer,
        cold_to_peer=cold.median / peer if peer else None,
    )


def _times(run: Run) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    run.end()
    return run.first_token_s, run.token_times[-1] - run.submitted_s


def _peer_first_token_s(lab: Lab, prompt: Sequence[int]) -> float:
    return lab.peer.post(lambda worker: worker.first_token_s(prompt)).result(MEASURED_WITHIN_S)


def _targets(rows: Sequence[FirstTokenRow]) -> Iterator[Target]:
    for row in rows:
        at = f"{row.context_tokens} tokens"
        if row.cold_to_peer is not None and row.context_tokens >= 2048:
            yield Target(f"cold / mlx-lm, {at}", row.cold_to_peer, _MOST_COLD_TO_PEER, is_most=True)
        yield Target(f"(warm − hot) / (bytes / link), {at}", row.warm_in_links, _MOST_LINK_TIMES, is_most=True)
        if row.context_tokens in _MOST_WARM_TO_COLD:
            most = _MOST_WARM_TO_COLD[row.context_tokens]
            yield Target(f"warm / cold, {at}", row.warm_s / row.cold_s, most, is_most=True)
    hot = {row.context_tokens: row.hot_s for row in rows}
    if {1024, 32768} <= hot.keys():
        yield Target("hot at 32 K / hot at 1 K", hot[32768] / hot[1024], _MOST_HOT_TO_HOT, is_most=True)
