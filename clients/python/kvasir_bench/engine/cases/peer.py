"""The same work through the engine and through mlx-lm's BatchGenerator with its own KV caches, alternating."""

from kvasir_bench.arithmetic import Target, medians, rate_of_all
from kvasir_bench.engine.cases.decode import MIXED, contexts, decode_rate, fitting, lengths_of
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row
from kvasir_bench.program import MEASURED_WITHIN_S

_BATCHES = (1, 8)
# The least engine / mlx-lm by context and rows. Attention over 4-bit KV costs a CPU more than over exact KV.
_CPU_RATIOS = {("128", 8): 0.6, ("512", 8): 0.6, ("2048", 8): 0.6}
_GPU_RATIOS = {("2048", 1): 1.0, ("2048", 8): 1.3, (MIXED, 16): 2.0}


def run(lab: Lab) -> Case:
    """Same prompts, token counts and compute type; both warmed; decode alone, and everything."""
    batches, tokens = lab.batches((2,), _BATCHES), 6 if lab.scope.is_quick else 48
    pairs = [(context, batch) for context in contexts(lab) for batch in fitting(context, batches)]
    rows = lab.pace.rows(pairs, lambda pair: [_row(lab, *pair, tokens)])
    least = _GPU_RATIOS if lab.is_gpu else _CPU_RATIOS
    targets = [
        Target(
            f"engine / mlx-lm, {row['batch']} rows, {row['context']} tokens of context",
            row["ratio"],
            least[row["context"], row["batch"]],
        )
        for row in rows
        if (row["context"], row["batch"]) in least
    ]
    return Case("Against mlx-lm's BatchGenerator with exact KV", rows, targets)


def _row(lab: Lab, context: str, batch: int, tokens: int) -> Row:
    prompts = [lab.prompts.tokens(length, n) for n, length in enumerate(lengths_of(context, batch))]
    memories: list[LabMemory] = [lab.agents.remember(prompt) for prompt in prompts]

    def measured() -> dict[str, float]:
        rate, total_s = decode_rate(lab, memories, tokens), _engine_total(lab, prompts, tokens)
        peer_rate, peer_total_s = _peer(lab, prompts, tokens)
        rates = {"engine_tokens_per_s": rate, "peer_tokens_per_s": peer_rate, "ratio": rate / peer_rate}
        totals = {"engine_total_s": total_s, "peer_total_s": peer_total_s, "total_ratio": peer_total_s / total_s}
        return rates | totals

    found = lab.pace.counted(f"{batch} rows beside mlx-lm at {context} tokens", measured)
    lab.agents.forget(memories)
    return {"context": context, "batch": batch, **medians(found, "ratio")}


def _engine_total(lab: Lab, prompts: list[tuple[int, ...]], tokens: int) -> float:
    runs = [lab.start(prompt, tokens) for prompt in prompts]
    for each in runs:
        each.end()
    return max(each.last_event_s for each in runs) - runs[0].submitted_s


def _peer(lab: Lab, prompts: list[tuple[int, ...]], tokens: int) -> tuple[float, float]:
    """Tokens per second of decoding, and seconds of everything."""
    times = lab.peer.post(lambda worker: worker.generate(prompts, tokens)).result(MEASURED_WITHIN_S)
    return rate_of_all([row[1:] for row in times]), max(row[-1] for row in times) - times[0][0]
