"""The same work through the engine and through mlx-lm's BatchGenerator with its own KV caches, alternating."""

from dataclasses import dataclass

from inference_svc.bench.arithmetic import Summary, Target, rate_of_all
from inference_svc.bench.cases.decode import MIXED, decode_rate, lengths_of
from inference_svc.bench.lab import PATIENCE_S, Case, Lab, LabMemory
from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.model.mlx_lm_peer import MlxLmPeer

_LEAST_RATIO = 0.6  # attention over 4-bit KV costs a CPU more than over exact KV


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A context and a batch; keys as in `kvasir.bench.engine_keys`."""

    context: str
    batch: int
    engine_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    ratio_spread: float
    engine_total_s: float
    peer_total_s: float
    total_ratio: float


def run(lab: Lab) -> Case:
    """Same prompts, token counts and compute type; both warmed; decode alone, and everything."""
    batches, contexts, tokens = ((2,), ("64",), 6) if lab.is_quick else ((1, 8), ("128", "512", "2048", MIXED), 48)
    compute_type = lab.engine.model.compute_type
    peer = MlxThread(lambda: MlxLmPeer(lab.model, compute_type, lab.clock), name="mlx-lm")
    try:
        rows = [_row(lab, peer, context, batch, tokens) for context in contexts for batch in batches]
    finally:
        peer.close()
    targets = [
        Target(f"engine / mlx-lm, {row.batch} rows, {row.context} tokens of context", row.ratio, _LEAST_RATIO)
        for row in rows
        if row.batch == 8 and row.context != MIXED
    ]
    return Case("Against mlx-lm's BatchGenerator with exact KV", rows, targets)


def _row(lab: Lab, peer: MlxThread[MlxLmPeer], context: str, batch: int, tokens: int) -> PeerRow:
    prompts = [lab.prompts.tokens(length, n) for n, length in enumerate(lengths_of(context, batch))]
    memories: list[LabMemory] = [lab.remember(prompt) for prompt in prompts]
    ours: list[float] = []
    theirs: list[float] = []
    our_totals: list[float] = []
    their_totals: list[float] = []
    for counts in lab.rounds(f"{batch} rows beside mlx-lm at {context} tokens"):
        rate = decode_rate(lab, memories, tokens)
        total = _engine_total(lab, prompts, tokens)
        peer_rate, peer_total = _peer(peer, prompts, tokens)
        if counts:
            ours.append(rate)
            our_totals.append(total)
            theirs.append(peer_rate)
            their_totals.append(peer_total)
    lab.forget(memories)
    ratio = Summary.of([one / other for one, other in zip(ours, theirs, strict=True)])
    total_ratio = Summary.of([other / one for one, other in zip(our_totals, their_totals, strict=True)])
    return PeerRow(
        context,
        batch,
        Summary.of(ours).median,
        Summary.of(theirs).median,
        ratio.median,
        ratio.spread,
        Summary.of(our_totals).median,
        Summary.of(their_totals).median,
        total_ratio.median,
    )


def _engine_total(lab: Lab, prompts: list[tuple[int, ...]], tokens: int) -> float:
    runs = [lab.start(prompt, tokens) for prompt in prompts]
    for each in runs:
        each.end()
    return max(each.last_event_s for each in runs) - runs[0].submitted_s


def _peer(peer: MlxThread[MlxLmPeer], prompts: list[tuple[int, ...]], tokens: int) -> tuple[float, float]:
    """Tokens per second of decoding, and seconds of everything."""
    times = peer.post(lambda worker: worker.generate(prompts, tokens)).result(PATIENCE_S)
    return rate_of_all([row[1:] for row in times]), max(row[-1] for row in times) - times[0][0]
