"""A second agent arrives while the first decodes: the second's time to its first token, and the first's gaps."""

from itertools import pairwise
from statistics import median

from kvasir_bench.arithmetic import Summary, Target, gaps, medians
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
    budget_s = lab.engine.longest_gap_s
    allowed = [budget_s + each["cell_s"] + each["step_s"] for each in found]
    seconds = medians(found)
    firsts, others = (
        {name: seconds[name] for name in names}
        for names in (("alone_first_s", "first_s", "sequential_s", "staggered_s"), ("cell_s", "step_s"))
    )
    return {
        "prompt_tokens": length,
        **firsts,
        **Summary.of([each["sequential_s"] / each["staggered_s"] for each in found]).named("ratio"),
        "longest_gap_s": seconds["longest_gap_s"],
        "allowed_gap_s": median(allowed),
        "gap_ratio": median(each["longest_gap_s"] / limit for each, limit in zip(found, allowed, strict=True)),
        "budget_s": budget_s,
        **others,
    }


def _round(lab: Lab, prompt_tokens: int) -> dict[str, float]:
    reply_tokens = 24 if lab.scope.is_quick else 427
    first, second = (lab.prompts.tokens(prompt_tokens, number) for number in (0, 1))
    third = reply_tokens // 3
    # One after the other: B arrives at the same point of A, and waits.
    alone, waited = lab.start(first, reply_tokens).ended(), lab.start(second, 1).ended()
    running, joined = lab.start_together(first, second, reply_tokens)
    return {
        "alone_first_s": alone.first_token_s,
        "first_s": running.first_token_s,
        "sequential_s": alone.token_times[-1] - alone.token_times[third - 1] + waited.first_token_s,
        "staggered_s": joined.first_token_s,
        "longest_gap_s": max(gaps(running.token_times, joined.submitted_s, joined.token_times[0])),
        "cell_s": max(later - earlier for earlier, later in pairwise((waited.submitted_s, *waited.cell_times))),
        "step_s": median(gaps(running.token_times, joined.token_times[0], running.token_times[-1])),
    }
