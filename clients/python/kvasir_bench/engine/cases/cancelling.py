"""How long a cancelled turn still runs: while it decodes, and in the middle of a long prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvasir_bench.arithmetic import Target
from kvasir_bench.engine.lab import Case, Lab, LabMemory, Run
from kvasir_bench.engine.texts import Texts

_MOST_S = 0.5
_CELLS = 4  # that a cancelled turn has computed of its prompt; it remembers the tokens before them


@dataclass(frozen=True)
class _Moment:
    prompt_tokens: int
    has_come: Callable[[Run], bool]
    remembered: LabMemory | None = None


def run(lab: Lab) -> Case:
    """Cancel right after a step reported its events: in decode the worst moment, because the next step runs whole."""
    tokens = lab.lengths(600, 8192)[-1]
    texts = Texts(lab)
    moments = {"decode": _Moment(256, lambda run: len(run.token_times) >= 8), **_prefills(lab, texts, tokens)}
    found = lab.pace.counted("cancelling", lambda: [_cancelled(lab, moment) for moment in moments.values()])
    lab.agents.forget(each.remembered for each in moments.values() if each.remembered is not None)
    texts.forget()
    rows = [_row(during, each) for during, each in zip(moments, zip(*found, strict=True), strict=True)]
    targets = [Target(f"cancel during {row['during']}, s", row["median_s"], _MOST_S, True) for row in rows]
    return Case("Cancel", rows, targets)


def _prefills(lab: Lab, texts: Texts, tokens: int) -> dict[str, _Moment]:
    """Half way through a prompt, and before its last cell."""
    moments, size = dict[str, _Moment](), lab.engine.model.cell_tokens
    cells = -(-tokens // size)
    for cell in sorted({cells // 2, cells - 1} - {0}):
        new = min(cell, _CELLS)
        remembered = texts.remember((cell - new) * size, 0) if cell > new else None
        moments[f"prefill of {tokens}, at {cell * size}"] = _Moment(tokens, _has_cells(new), remembered)
    return moments


def _has_cells(cells: int) -> Callable[[Run], bool]:
    return lambda run: len(run.cell_times) >= cells


def _cancelled(lab: Lab, moment: _Moment) -> tuple[float, float]:
    """Seconds until the cancelled turn was over, and the seconds of its last whole step or cell before that."""
    prompt = lab.prompts.tokens(moment.prompt_tokens, 0)
    turn, key = lab.agents.go_on(moment.remembered, prompt, 64)
    turn.wait_until(moment.has_come)
    seconds = turn.cancel()
    lab.agents.drop(key)
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
