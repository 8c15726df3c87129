"""A second agent arrives while the first decodes: the second's time to its first token, and the first's gaps."""

from itertools import pairwise
from statistics import median

from kvasir_bench.arithmetic import Target, gaps, medians
from kvasir_bench.engine.lab import Case, Lab, Row

_LEAST_RATIO = 2.0


def run(lab: Lab) -> Case:
    """Two prompts of one length; B arrives after a third of A's 427 tokens (the seed's two seconds, to scale)."""
    rows = lab.pace.rows(lab.lengths(96, 1024), lambda length: [_row(lab, length)])
    targets = [
        target
        for row in rows
        for target in (
            Target(f"B's first token, sequential / staggered, {row['prompt_tokens']}", row["ratio"], _LEAST_RATIO),
            Target("A's longest gap / (budget + one cell + one step)", row["gap_ratio"], 1.0, is_most=True),
        )
    ]
    return Case("The staggered case", rows, targets)


def _row(lab: Lab, length: int) -> Row:
    found = lab.pace.counted(f"B joins A, and waits for A, {length} tokens", lambda: _round(lab, length))
    return {"prompt_tokens": length, **medians(found, "ratio")}


def _round(lab: Lab, prompt_tokens: int) -> dict[str, float]:
    reply_tokens = 24 if lab.scope.is_quick else 427
    first, second = (lab.prompts.tokens(prompt_tokens, number) for number in (0, 1))
    third = reply_tokens // 3
    # One after the other: B arrives at the same point of A, and waits.
    alone, waited = lab.start(first, reply_tokens).ended(), lab.start(second, 1).ended()
    running, joined = lab.start_together(first, second, reply_tokens)
    waited_s = alone.token_times[-1] - alone.token_times[third - 1] + waited.first_token_s
    gap_s, budget_s = (
        max(gaps(running.token_times, joined.submitted_s, joined.token_times[0])),
        lab.engine.longest_gap_s,
    )
    cell_s = max(later - earlier for earlier, later in pairwise((waited.submitted_s, *waited.cell_times)))
    step_s = median(gaps(running.token_times, joined.token_times[0], running.token_times[-1]))
    return {
        "alone_first_s": alone.first_token_s,
        "first_s": running.first_token_s,
        "sequential_s": waited_s,
        "staggered_s": joined.first_token_s,
        "ratio": waited_s / joined.first_token_s,
        "longest_gap_s": gap_s,
        "allowed_gap_s": budget_s + cell_s + step_s,
        "gap_ratio": gap_s / (budget_s + cell_s + step_s),
        "budget_s": budget_s,
        "cell_s": cell_s,
        "step_s": step_s,
    }
