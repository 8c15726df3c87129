"""Decode throughput by rows in the batch, with equal and mixed lengths."""

from collections.abc import Sequence

from kvasir_bench.arithmetic import Summary, Target, rate_of_all
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Row
from kvasir_bench.engine.prompts import mixed_lengths
from kvasir_bench.engine.texts import Texts

MIXED = "200-4000"
_CONTEXTS = (128, 512, 2048)
_BATCHES = (1, 2, 4, 8, 16)
_MOST_TOKENS = 1 << 17  # of all rows: more would take longer to compute than to measure
# The least that so many rows do to one, by device.
_CPU_RATIO = ("128", 8, 3.0)
_GPU_RATIO = ("2048", 16, 6.0)


def run(lab: Lab) -> Case:
    batches = lab.batches((1, 2), _BATCHES)
    tokens = 6 if lab.scope.is_quick else 48
    texts = Texts(lab)
    rows = lab.pace.rows(contexts(lab), lambda context: _rows(lab, texts, context, fitting(context, batches), tokens))
    texts.forget()
    wanted_context, wanted_batch, least = _GPU_RATIO if lab.is_gpu else _CPU_RATIO
    ratios = [row["ratio_to_one"] for row in rows if (row["context"], row["batch"]) == (wanted_context, wanted_batch)]
    what = f"{wanted_batch} rows / 1 row, {wanted_context} tokens of context"
    return Case("Decode throughput", rows, [Target(what, ratio, least) for ratio in ratios])


def contexts(lab: Lab) -> list[str]:
    """Contexts to decode at: lengths, and the mix, which one row is none of."""
    lengths = lab.lengths(64, *_CONTEXTS)
    return [*map(str, lengths), *([] if lab.scope.is_quick or lab.scope.batches == (1,) else [MIXED])]


def fitting(context: str, batches: Sequence[int]) -> list[int]:
    """The batches whose rows hold no more tokens together than are worth computing."""
    return [batch for batch in batches if sum(lengths_of(context, batch)) <= _MOST_TOKENS]


def lengths_of(context: str, batch: int) -> list[int]:
    """The context length of each row. A single row of a mix has the mean length."""
    if context != MIXED:
        return [int(context)] * batch
    return mixed_lengths(batch) if batch > 1 else [sum(mixed_lengths(2)) // 2]


def decode_rate(lab: Lab, memories: Sequence[LabMemory], tokens: int) -> float:
    """Tokens per second of all memories together, for about `tokens` tokens each while all of them decode."""
    forks = [lab.agents.fork(memory) for memory in memories]
    # Rows join one after another, a suffix of one token each: as many steps pass until the last has joined.
    runs = [lab.agents.resume(fork, fork.tokens[:1], tokens + len(forks)) for fork in forks]
    for each in runs:
        each.end()
    lab.agents.forget(forks)
    return rate_of_all([each.token_times for each in runs])


def _rows(lab: Lab, texts: Texts, context: str, batches: Sequence[int], tokens: int) -> list[Row]:
    wanted = {length for batch in batches for length in lengths_of(context, batch)}
    numbers = range(max(batches) if context != MIXED else 1)
    known = {(length, n): texts.remember(length, n) for length in sorted(wanted) for n in numbers}
    chosen = [
        [known[length, n % len(numbers)] for n, length in enumerate(lengths_of(context, batch))] for batch in batches
    ]
    rates = lab.pace.counted(f"decode at {context} tokens", lambda: [decode_rate(lab, each, tokens) for each in chosen])
    lab.agents.forget(known.values())
    found = [Summary.of(each) for each in zip(*rates, strict=True)]
    return [
        {
            "context": context,
            "batch": batch,
            **each.named("tokens_per_s"),
            "ratio_to_one": each.median / found[0].median,
        }
        for batch, each in zip(batches, found, strict=True)
    ]
