"""A second agent arrives while the first decodes: the second's time to its first token, and the first's gaps."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from kvasir_bench.arithmetic import Summary, Target, gaps
from kvasir_bench.engine.lab import Case, Lab, Run

_LEAST_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class StaggeredRow:
    """Medians over the repeats; keys as in `kvasir_bench.engine.keys`."""

    sequential_s: float
    staggered_s: float
    ratio: float
    ratio_spread: float
    longest_gap_s: float
    allowed_gap_s: float
    gap_ratio: float
    budget_s: float
    cell_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class _Round:
    """One repeat, all times in seconds."""

    sequential_s: float
    staggered_s: float
    longest_gap_s: float
    cell_s: float
    step_s: float


def run(lab: Lab) -> Case:
    """A: 1,024 tokens and a reply of 427. B: 1,024 tokens, after a third of that reply (the seed's two seconds, to
    scale).
    """
    found: list[_Round] = []
    for counts in lab.rounds("B joins A, and waits for A"):
        each = _round(lab)
        found += [each] if counts else []
    budget_s = lab.engine.longest_gap_s
    allowed = [budget_s + each.cell_s + each.step_s for each in found]
    ratio = Summary.of([each.sequential_s / each.staggered_s for each in found])
    gap_ratio = median(each.longest_gap_s / limit for each, limit in zip(found, allowed, strict=True))
    row = StaggeredRow(
        sequential_s=median(each.sequential_s for each in found),
        staggered_s=median(each.staggered_s for each in found),
        ratio=ratio.median,
        ratio_spread=ratio.spread,
        longest_gap_s=median(each.longest_gap_s for each in found),
        allowed_gap_s=median(allowed),
        gap_ratio=gap_ratio,
        budget_s=budget_s,
        cell_s=median(each.cell_s for each in found),
        step_s=median(each.step_s for each in found),
    )
    targets = [
        Target("B's first token, sequential / staggered", row.ratio, _LEAST_RATIO),
        Target("A's longest gap / (budget + one cell + one step)", row.gap_ratio, 1.0, is_most=True),
    ]
    return Case("The staggered case", [row], targets)


def _round(lab: Lab) -> _Round:
    prompt_tokens, reply_tokens = (96, 24) if lab.is_quick else (1024, 427)
    first, second = (lab.prompts.tokens(prompt_tokens, number) for number in (0, 1))
    third = reply_tokens // 3
    # One after the other: B arrives at the same point of A, and waits.
    alone = lab.start(first, reply_tokens)
    alone.end()
    waited = lab.start(second, 1)
    waited.end()
    # Together: B is submitted in the very step that tells a third of A's tokens.
    joined = lab.run()

    def arrive() -> None:
        lab.start(second, reply_tokens, run=joined)

    running = lab.run().when(lambda run: len(run.token_times) >= third, arrive)
    lab.start(first, reply_tokens, run=running).end()
    joined.end()
    noticed = gaps(running.token_times, joined.submitted_s, joined.token_times[0])
    return _Round(
        sequential_s=alone.token_times[-1] - alone.token_times[third - 1] + waited.first_token_s,
        staggered_s=joined.first_token_s,
        longest_gap_s=max(noticed),
        cell_s=_longest_cell(waited),
        step_s=median(gaps(running.token_times, joined.token_times[0], running.token_times[-1])),
    )


def _longest_cell(run: Run) -> float:
    return max(later - earlier for earlier, later in pairwise((run.submitted_s, *run.cell_times)))
