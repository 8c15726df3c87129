"""How many tokens ahead pay: one more row makes a step a little longer, and helps if all drafts before it were right.
Pure.
"""

from collections.abc import Hashable, Mapping
from heapq import heapify, heappop, heappush
from typing import TypeVar

RowT = TypeVar("RowT", bound=Hashable)

_KEPT = 0.97  # of what was learned, at each step
# A row's part of a step before any is known, which counts as so many squared rows of difference.
_USUAL_ROW, _USUAL_WEIGHT = 0.05, 8.0
_USUAL_SETTLED = 1.1  # a step that is read at once, beside one that is read behind the next, before both are known


class StepSeconds:
    """The seconds of a step by its rows: a line through the steps that were made, older ones counting less."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def learn(self, rows: int, seconds: float) -> None:
        self._weight = _KEPT * self._weight + 1
        self._rows = _KEPT * self._rows + rows
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + rows * rows
        self._products = _KEPT * self._products + rows * seconds

    def of(self, rows: int) -> float:
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        return max(mean_s + self.row_s * (rows - mean_rows), mean_s / 10)

    @property
    def row_s(self) -> float:
        """What one row more costs."""
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares - self._weight * mean_rows * mean_rows
        together = self._products - self._weight * mean_rows * mean_s
        return max(0.0, (together + _USUAL_WEIGHT * _USUAL_ROW * mean_s) / (spread + _USUAL_WEIGHT))


class DraftCosts:
    """What steps with drafts cost, which are read at once, beside steps without, which are read behind the next."""

    def __init__(self) -> None:
        self._drafted, self._plain = StepSeconds(), StepSeconds()

    def learn(self, rows: int, seconds: float, *, is_drafted: bool) -> None:
        (self._drafted if is_drafted else self._plain).learn(rows, seconds)

    def lengths(
        self, rows: int, chances: Mapping[RowT, float], most: Mapping[RowT, int], most_rows: int
    ) -> dict[RowT, int]:
        """Drafts of each row that has some, so that the step gives the most tokens a second; empty where none pay.
        `rows`: of the step without drafts. `chances`: that a draft is right if those before it are. `most`: of a row.
        """
        known = self._drafted if self._drafted.is_known else self._plain
        settled = _USUAL_SETTLED if known is self._plain else 1.0
        if not known.is_known:
            return dict(most)
        seconds, tokens, total = settled * known.of(rows), float(rows), rows
        lengths: dict[RowT, int] = {}
        likely = [(-chance, place, row) for place, (row, chance) in enumerate(chances.items()) if most[row]]
        heapify(likely)
        while likely and total < most_rows:
            negative, place, row = heappop(likely)
            if -negative * seconds <= settled * known.row_s * tokens:
                break
            lengths[row] = lengths.get(row, 0) + 1
            seconds, tokens, total = seconds + settled * known.row_s, tokens - negative, total + 1
            if lengths[row] < most[row]:
                heappush(likely, (negative * chances[row], place, row))
        plain_s = self._plain.of(rows) if self._plain.is_known else seconds / _USUAL_SETTLED
        return lengths if tokens * plain_s > rows * seconds else {}


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
