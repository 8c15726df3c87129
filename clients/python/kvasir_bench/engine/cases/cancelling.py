"""How long a cancelled turn still runs: while it decodes, and in the middle of a long prompt."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvasir_bench.arithmetic import Target
from kvasir_bench.engine.lab import Case, Lab, Run

_MOST_S = 0.5


def run(lab: Lab) -> Case:
    """Cancel right after a step reported its events: in decode the worst moment, because the next step runs whole."""
    tokens = lab.lengths(600, 8192)[-1]
    cells = -(-tokens // lab.engine.model.cell_tokens)
    moments: dict[str, tuple[int, Callable[[Run], bool]]] = {"decode": (256, lambda run: len(run.token_times) >= 8)}
    for cell in sorted({cells // 2, cells - 1} - {0}):
        at = f"prefill of {tokens}, at {cell * lab.engine.model.cell_tokens}"
        moments[at] = (tokens, lambda run, cell=cell: len(run.cell_times) >= cell)  # type: ignore[misc]
    found = lab.pace.counted("cancelling", lambda: [_cancelled(lab, *moment) for moment in moments.values()])
    rows = [_row(during, each) for during, each in zip(moments, zip(*found, strict=True), strict=True)]
    targets = [Target(f"cancel during {row['during']}, s", row["median_s"], _MOST_S, True) for row in rows]
    return Case("Cancel", rows, targets)


def _cancelled(lab: Lab, prompt_tokens: int, has_come: Callable[[Run], bool]) -> tuple[float, float]:
    """Seconds until the cancelled turn was over, and the seconds of its last whole step or cell before that."""
    turn = lab.start(lab.prompts.tokens(prompt_tokens, 0), 64)
    turn.wait_until(has_come)
    seconds = turn.cancel()
    times = turn.token_times if len(turn.token_times) > 1 else [turn.submitted_s, *turn.cell_times]
    return seconds, times[-1] - times[-2]


def _row(during: str, found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    seconds, steps = zip(*found, strict=True)
    return {
        "during": during,
        "median_s": median(seconds),
        "longest_s": max(seconds),
        "step_s": median(steps),
        "ratio": median(each / step for each, step in found),
    }
