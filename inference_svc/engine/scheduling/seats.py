"""Which rows of one namespace decode in a step, when not all may: so many at a time, each for so many steps. Pure.

A row that joins the batch has its whole context decoded into it, so a seat is kept for many steps; a row gives it up
only to a row that waits for it. Urgent rows are seated first, then those that have waited longest.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

TurnT = TypeVar("TurnT", bound=Hashable)


class Seats(Generic[TurnT]):
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._now = 0
        self._seated: dict[TurnT, int] = {}  # rows that have a seat: steps since they sat down
        self._waits_since: dict[TurnT, int] = {}

    def seat(
        self,
        decoding: Sequence[TurnT],
        seats: int,
        is_urgent: Callable[[TurnT], bool],
        is_ending: Callable[[TurnT], bool],
    ) -> set[TurnT]:
        """The rows that decode in the next step. `is_ending`: the row needs one more step, then it is gone."""
        self._now += 1
        self._seated = {turn: steps for turn, steps in self._seated.items() if turn in decoding}
        self._waits_since = {
            turn: self._waits_since.get(turn, self._now) for turn in decoding if turn not in self._seated
        }
        # Fewer seats than before: the rows that have sat longest get up.
        for turn in sorted(self._seated, key=self._seated.__getitem__)[seats:]:
            if not is_ending(turn):
                self._rise(turn)
        done = [turn for turn, steps in self._seated.items() if steps >= self._steps and not is_ending(turn)]
        order = sorted(self._waits_since, key=lambda turn: (not is_urgent(turn), self._waits_since[turn]))
        chosen = order[: max(0, seats - len(self._seated) + len(done))]
        for turn in done[: max(0, len(self._seated) + len(chosen) - seats)]:
            self._rise(turn)
        for turn in chosen:
            del self._waits_since[turn]
            self._seated[turn] = 0
        for turn in self._seated:
            self._seated[turn] += 1
        return set(self._seated)

    def _rise(self, turn: TurnT) -> None:
        del self._seated[turn]
        self._waits_since[turn] = self._now
