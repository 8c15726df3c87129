"""The same work through the engine and through mlx-lm's BatchGenerator with its own KV caches, alternating."""

from dataclasses import dataclass

from kvasir_bench.arithmetic import Summary, Target, rate_of_all
from kvasir_bench.engine.cases.decode import MIXED, contexts, decode_rate, fitting, lengths_of
from kvasir_bench.engine.lab import Case, Lab, LabMemory
from kvasir_bench.program import MEASURED_WITHIN_S

_BATCHES = (1, 8)
# The least engine / mlx-lm by context and rows. Attention over 4-bit KV costs a CPU more than over exact KV.
_CPU_RATIOS = {("128", 8): 0.6, ("512", 8): 0.6, ("2048", 8): 0.6}
_GPU_RATIOS = {("2048", 1): 1.0, ("2048", 8): 1.3, (MIXED, 16): 2.0}


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A context and a batch; keys as in `kvasir_bench.engine.keys`."""

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
    batches, tokens = lab.scope.batches or ((2,) if lab.is_quick else _BATCHES), 6 if lab.is_quick else 48
    pairs = [(context, batch) for context in contexts(lab) for batch in fitting(context, batches)]
    rows = lab.rows(pairs, lambda pair: [_row(lab, *pair, tokens)])
    least = _GPU_RATIOS if lab.is_gpu else _CPU_RATIOS
    targets = [
        Target(
            f"engine / mlx-lm, {row.batch} rows, {row.context} tokens of context",
            row.ratio,
            least[row.context, row.batch],
        )
        for row in rows
        if (row.context, row.batch) in least
    ]
    return Case("Against mlx-lm's BatchGenerator with exact KV", rows, targets)


def _row(lab: Lab, context: str, batch: int, tokens: int) -> PeerRow:
    prompts = [lab.prompts.tokens(length, n) for n, length in enumerate(lengths_of(context, batch))]
    memories: list[LabMemory] = [lab.remember(prompt) for prompt in prompts]
    ours: list[float] = []
    theirs: list[float] = []
    our_totals: list[float] = []
    their_totals: list[float] = []
    for counts in lab.rounds(f"{batch} rows beside mlx-lm at {context} tokens"):
        rate = decode_rate(lab, memories, tokens)
        total = _engine_total(lab, prompts, tokens)
        peer_rate, peer_total = _peer(lab, prompts, tokens)
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


def _peer(lab: Lab, prompts: list[tuple[int, ...]], tokens: int) -> tuple[float, float]:
    """Tokens per second of decoding, and seconds of everything."""
    times = lab.peer.post(lambda worker: worker.generate(prompts, tokens)).result(MEASURED_WITHIN_S)
    return rate_of_all([row[1:] for row in times]), max(row[-1] for row in times) - times[0][0]
