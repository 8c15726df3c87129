"""How many tokens ahead pay: one more row makes a step a little longer, and helps if all drafts before it were right.
Pure.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from heapq import heapify, heappop, heappush
from statistics import fmean, median
from typing import TypeVar

RowT = TypeVar("RowT", bound=Hashable)

_STEPS = 24  # that are remembered
_FEW_STEPS = 3  # fewer say nothing: a kernel may have been compiled in them
# A row's part of a step before any is known, which counts as so many squared rows of difference.
_USUAL_ROW, _USUAL_WEIGHT = 0.05, 8.0
_USUAL_SETTLED = 1.1  # a step that is read at once, beside one that is read behind the next, before both are known
_PATIENCE, _FEW_DRAFTS = 32, 4  # steps after which so many drafts are tried though they do not seem to pay


class StepSeconds:
    """The seconds of a step by its rows: a line through the newest steps but those that took twice as long as usual."""

    def __init__(self) -> None:
        self._made: deque[tuple[int, float]] = deque(maxlen=_STEPS)
        self._mean_rows = self._mean_s = self.row_s = 0.0  # `row_s`: what one row more costs

    @property
    def is_known(self) -> bool:
        return len(self._made) >= _FEW_STEPS

    def learn(self, rows: int, seconds: float) -> None:
        self._made.append((rows, seconds))
        usual = median(took_s / (1 + _USUAL_ROW * rows) for rows, took_s in self._made)
        kept = [(rows, took_s) for rows, took_s in self._made if took_s <= 2 * usual * (1 + _USUAL_ROW * rows)]
        self._mean_rows, self._mean_s = fmean(rows for rows, _ in kept), fmean(took_s for _, took_s in kept)
        spread = sum((rows - self._mean_rows) ** 2 for rows, _ in kept)
        together = sum((rows - self._mean_rows) * took_s for rows, took_s in kept)
        self.row_s = max(0.0, (together + _USUAL_WEIGHT * _USUAL_ROW * self._mean_s) / (spread + _USUAL_WEIGHT))

    def of(self, rows: int) -> float:
        return max(self._mean_s + self.row_s * (rows - self._mean_rows), self._mean_s / 10)


class DraftCosts:
    """What steps with drafts cost, which are read at once, beside steps without, which are read behind the next."""

    def __init__(self) -> None:
        self._drafted, self._plain = StepSeconds(), StepSeconds()
        self._refused = 0  # steps whose drafts did not seem to pay

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
            return _first_lengths(most, most_rows - rows)
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
        if lengths and tokens * plain_s > rows * seconds:
            return lengths
        self._refused += bool(chances)
        if self._refused <= _PATIENCE:
            return {}
        self._refused = 0
        likeliest = max(chances, key=chances.__getitem__)
        return {likeliest: min(most[likeliest], _FEW_DRAFTS, most_rows - rows)}


def _first_lengths(most: Mapping[RowT, int], room: int) -> dict[RowT, int]:
    """Drafts in the order of rows, as many as there is room for."""
    lengths: dict[RowT, int] = {}
    for row, count in most.items():
        if taken := min(count, room):
            lengths[row] = taken
            room -= taken
    return lengths


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
