"""A second agent arrives while the first decodes: the second's time to its first token, and the first's gaps."""

from itertools import pairwise
from statistics import median

from kvasir_bench.arithmetic import Summary, Target, gaps
from kvasir_bench.engine.lab import Case, Lab

_LEAST_RATIO = 2.0


def run(lab: Lab) -> Case:
    """A: 1,024 tokens and a reply of 427. B: 1,024 tokens, after a third of that reply (the seed's two seconds, to
    scale).
    """
    found, budget_s = lab.counted("B joins A, and waits for A", lambda: _round(lab)), lab.engine.longest_gap_s
    allowed = [budget_s + each["cell_s"] + each["step_s"] for each in found]
    medians = {name: median(each[name] for each in found) for name in found[0]}
    row = {
        "sequential_s": medians["sequential_s"],
        "staggered_s": medians["staggered_s"],
        **Summary.of([each["sequential_s"] / each["staggered_s"] for each in found]).named("ratio"),
        "longest_gap_s": medians["longest_gap_s"],
        "allowed_gap_s": median(allowed),
        "gap_ratio": median(each["longest_gap_s"] / limit for each, limit in zip(found, allowed, strict=True)),
        "budget_s": budget_s,
        "cell_s": medians["cell_s"],
        "step_s": medians["step_s"],
    }
    targets = [
        Target("B's first token, sequential / staggered", row["ratio"], _LEAST_RATIO),
        Target("A's longest gap / (budget + one cell + one step)", row["gap_ratio"], 1.0, is_most=True),
    ]
    return Case("The staggered case", [row], targets)


def _round(lab: Lab) -> dict[str, float]:
    """One repeat, all times in seconds."""
    prompt_tokens, reply_tokens = (96, 24) if lab.is_quick else (1024, 427)
    first, second = (lab.prompts.tokens(prompt_tokens, number) for number in (0, 1))
    third = reply_tokens // 3
    # One after the other: B arrives at the same point of A, and waits.
    alone, waited = lab.start(first, reply_tokens).ended(), lab.start(second, 1).ended()
    running, joined = lab.start_together(first, second, reply_tokens)
    return {
        "sequential_s": alone.token_times[-1] - alone.token_times[third - 1] + waited.first_token_s,
        "staggered_s": joined.first_token_s,
        "longest_gap_s": max(gaps(running.token_times, joined.submitted_s, joined.token_times[0])),
        "cell_s": max(later - earlier for earlier, later in pairwise((waited.submitted_s, *waited.cell_times))),
        "step_s": median(gaps(running.token_times, joined.token_times[0], running.token_times[-1])),
    }
