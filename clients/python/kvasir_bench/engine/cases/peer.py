"""The same work through the engine and through mlx-lm's BatchGenerator with its own KV caches, alternating."""

from kvasir_bench.arithmetic import Target, medians, rate_of_all
from kvasir_bench.engine.cases.decode import MIXED, contexts, decode_rate, fitting, lengths_of
from kvasir_bench.engine.lab import Case, Lab, Row
from kvasir_bench.engine.texts import Texts
from kvasir_bench.program import MEASURED_WITHIN_S

_BATCHES = (1, 8)
_LONG = 10.0  # seconds of mlx-lm
# The least engine / mlx-lm by context and rows. Attention over 4-bit KV costs a CPU more than over exact KV.
_CPU_RATIOS = {("128", 8): 0.6, ("512", 8): 0.6, ("2048", 8): 0.6}
_GPU_RATIOS = {("2048", 1): 1.0, ("2048", 8): 1.3, (MIXED, 16): 2.0}


def run(lab: Lab) -> Case:
    """Same prompts, token counts and compute type; both warmed; decode alone, and everything."""
    batches, tokens = lab.batches((2,), _BATCHES), 6 if lab.scope.is_quick else 48
    pairs = [
        (context, batch)
        for context in contexts(lab)
        for batch in fitting(context, batches)
        if context != MIXED or batch > 1  # one row is no mix
    ]
    texts = Texts(lab)
    rows = lab.pace.rows(pairs, lambda pair: [_row(lab, texts, *pair, tokens)])
    texts.forget()
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


def _row(lab: Lab, texts: Texts, context: str, batch: int, tokens: int) -> Row:
    lengths = lengths_of(context, batch)
    prompts = [lab.prompts.tokens(length, n) for n, length in enumerate(lengths)]
    memories = [texts.remember(length, n) for n, length in enumerate(lengths)]

    totals: list[dict[str, float]] = []

    def measured() -> dict[str, float]:
        rate = decode_rate(lab, memories, tokens)
        # A CPU takes minutes for eight long prompts: once they have taken long, both sides only decode behind them.
        goes_on = not lab.is_gpu and sum(each["peer_total_s"] for each in totals) >= _LONG
        total_s = 0.0 if goes_on else _engine_total(lab, prompts, tokens)
        peer_rate, peer_total_s = _peer(lab, prompts, tokens, goes_on=goes_on)
        if not goes_on:
            ratio = peer_total_s / total_s
            totals.append({"engine_total_s": total_s, "peer_total_s": peer_total_s, "total_ratio": ratio})
        return {"engine_tokens_per_s": rate, "peer_tokens_per_s": peer_rate, "ratio": rate / peer_rate}

    found = lab.pace.counted(f"{batch} rows beside mlx-lm at {context} tokens", measured)
    lab.agents.forget(memories)
    return {"context": context, "batch": batch, **medians(found, "ratio"), **medians(totals)}


def _engine_total(lab: Lab, prompts: list[tuple[int, ...]], tokens: int) -> float:
    runs = [lab.start(prompt, tokens) for prompt in prompts]
    for each in runs:
        each.end()
    return max(each.last_event_s for each in runs) - runs[0].submitted_s


def _peer(lab: Lab, prompts: list[tuple[int, ...]], tokens: int, *, goes_on: bool) -> tuple[float, float]:
    """Tokens per second of decoding, and seconds of everything. `goes_on`: behind the prompts of the last call."""
    how = {"keeps": not lab.is_gpu, "goes_on": goes_on}
    times = lab.peer.post(lambda worker: worker.generate(prompts, tokens, **how)).result(MEASURED_WITHIN_S)
    return rate_of_all([row[1:] for row in times]), max(row[-1] for row in times) - times[0][0]
