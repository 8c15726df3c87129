"""How many tokens ahead pay: one more row makes a step a little longer, and helps if all drafts before it were right.
Pure.
"""

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import fmean, median
from typing import TypeVar

RowT = TypeVar("RowT", bound=Hashable)

_STEPS = 24  # that are remembered
_FEW_STEPS = 3  # fewer mean nothing: a kernel may have been compiled in them
_FEW_DRAFTED = 8  # fewer with drafts mean less than many without: three that met a busy machine ended all drafts
# A row's part of a step before any is known, which counts as so many squared rows of difference.
_USUAL_ROW, _USUAL_WEIGHT = 0.05, 8.0
_USUAL_SETTLED = 1.1  # a step that is read at once, beside one that is read behind the next, before both are known
_PATIENCE, _FEW_DRAFTS = 12, 4  # looks after which so many drafts are tried though they do not seem to pay
_MOST_PATIENCE = 64  # looks; of turns that wait longest, 512 tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one row may try: at most `most` drafts. Each is right with `chance` if those before it were; the first
    `sure` ones always are.
    """

    most: int
    chance: float
    sure: int = 0

    def chance_at(self, place: int) -> float:
        """That the draft of this place and all before it are right."""
        return float(self.chance ** max(0, place + 1 - self.sure))


class StepSeconds:
    """The seconds of a step by its rows: a line through the newest steps but those that took twice as long as usual."""

    def __init__(self) -> None:
        self._made: deque[tuple[int, float]] = deque(maxlen=_STEPS)
        self._line: _Line | None = None  # through the newest steps

    def is_known(self, steps: int = _FEW_STEPS) -> bool:
        return len(self._made) >= steps

    def learn(self, rows: int, seconds: float) -> None:
        self._made.append((rows, seconds))
        self._line = None  # computed at its next use: not in each step of turns that try nothing

    def forget_half(self) -> None:
        """The machine may have been busy: of the steps, only the newer half counts, or none if that is few."""
        half = len(self._made) // 2
        for _ in range(half if half >= _FEW_DRAFTED else len(self._made)):
            self._made.popleft()

    @property
    def line(self) -> "_Line":
        if self._line is None:
            self._line = _Line.through(self._made)
        return self._line


@dataclass(frozen=True, slots=True)
class _Line:
    mean_rows: float = 1.0
    mean_s: float = 1.0
    row_s: float = _USUAL_ROW  # what one row more costs

    @classmethod
    def through(cls, made: Collection[tuple[int, float]]) -> "_Line":
        if not made:
            return cls()
        usual = median(took_s / (1 + _USUAL_ROW * rows) for rows, took_s in made)
        kept = [(rows, took_s) for rows, took_s in made if took_s <= 2 * usual * (1 + _USUAL_ROW * rows)]
        mean_rows, mean_s = fmean(rows for rows, _ in kept), fmean(took_s for _, took_s in kept)
        spread = sum((rows - mean_rows) ** 2 for rows, _ in kept)
        together = sum((rows - mean_rows) * took_s for rows, took_s in kept)
        usual_row_s = _USUAL_ROW * mean_s / (1 + _USUAL_ROW * mean_rows)
        row_s = (together + _USUAL_WEIGHT * usual_row_s) / (spread + _USUAL_WEIGHT)
        return cls(mean_rows, mean_s, max(0.0, row_s))

    def at(self, rows: int) -> float:
        return max(self.mean_s + self.row_s * (rows - self.mean_rows), self.mean_s / 10)


class DraftCosts:
    """What steps with drafts cost, which are read at once, beside steps without, which are read behind the next."""

    def __init__(self) -> None:
        self._drafted, self._plain = StepSeconds(), StepSeconds()
        self._refused = 0  # looks whose drafts did not seem to pay
        self._patience = _PATIENCE

    def learn(self, rows: int, seconds: float, *, is_drafted: bool) -> None:
        (self._drafted if is_drafted else self._plain).learn(rows, seconds)

    def lengths(self, rows: int, proposals: Mapping[RowT, Proposal], most_rows: int) -> dict[RowT, int]:
        """Drafts of each row that has some, so that the step gives the most tokens a second; empty where none pay.
        `rows`: of the step without drafts. Each next draft is the one most likely to be right, of all rows' next ones:
        every row costs the same. The first is compared with a step without drafts alone, as both were measured.
        """
        is_known = self._drafted.is_known(_FEW_DRAFTED if self._plain.is_known() else _FEW_STEPS)
        known, settled = (self._drafted, 1.0) if is_known else (self._plain, _USUAL_SETTLED)
        seconds, row_s = settled * known.line.at(rows), settled * known.line.row_s
        plain_s = self._plain.line.at(rows) if self._plain.is_known() else seconds / _USUAL_SETTLED
        tokens = float(rows)
        lengths: dict[RowT, int] = {}
        likely = [(-each.chance_at(0), place, row) for place, (row, each) in enumerate(proposals.items()) if each.most]
        heapify(likely)
        for _ in range(most_rows - rows):
            if not likely or (lengths and -likely[0][0] * seconds <= row_s * tokens):
                break
            negative, place, row = heappop(likely)
            lengths[row] = lengths.get(row, 0) + 1
            seconds, tokens = seconds + row_s, tokens - negative
            if lengths[row] < proposals[row].most:
                heappush(likely, (-proposals[row].chance_at(lengths[row]), place, row))
        if lengths and tokens * plain_s > rows * seconds:
            self._patience = _PATIENCE if is_known else self._patience
            return lengths
        return self._tried_again(proposals, most_rows - rows)

    def _tried_again(self, proposals: Mapping[RowT, Proposal], room: int) -> dict[RowT, int]:
        """Now and then a few drafts of the likeliest row, though they do not seem to pay. Once no costs are left
        to believe, the next steps try all again; each time that this does not pay, the next time comes half as soon.
        """
        rows = [row for row, each in proposals.items() if each.most]
        self._refused += bool(rows)
        if self._refused <= self._patience or not rows:
            return {}
        self._refused = 0
        self._drafted.forget_half()
        if not self._drafted.is_known(_FEW_DRAFTED):
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        likeliest = max(rows, key=lambda row: proposals[row].chance_at(0))
        return {likeliest: min(proposals[likeliest].most, _FEW_DRAFTS, room)}


class Trust:
    """How often drafts of one turn were right, by how many tokens had been equal before them."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._wrong: dict[int, float] = {}

    def chance(self, equal: int) -> float:
        """That a draft is right, after those before it were; a few right ones are presumed."""
        kind = _kind(equal)
        right, wrong = self._right.get(kind, 0.0) + 2 + kind, self._wrong.get(kind, 0.0) + 1
        return right / (right + wrong)

    def learn(self, equal: int, drafts: int, right: int) -> None:
        kind = _kind(equal)
        self._right[kind] = 0.9 * self._right.get(kind, 0.0) + right
        self._wrong[kind] = 0.9 * self._wrong.get(kind, 0.0) + (right < drafts)

    def forgive(self, equal: int) -> None:
        """Nothing was tried: what was wrong counts a little less, so that it is tried again."""
        kind = _kind(equal)
        self._wrong[kind] = 0.98 * self._wrong.get(kind, 0.0)


def _kind(equal: int) -> int:
    return min(equal.bit_length(), 5)
