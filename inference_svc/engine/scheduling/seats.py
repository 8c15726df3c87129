"""Which rows of one namespace speak in a step, when not all may: so many at a time, each for so many steps. Pure.

A row that joins the batch has its whole context decoded into it, so a seat is kept for many steps; and it is given up
only to somebody who waits for it. Urgent rows are seated first, then those that have waited longest.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

TurnT = TypeVar("TurnT", bound=Hashable)


class Seats(Generic[TurnT]):
    """The seats of one namespace."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._now = 0
        self._spoken: dict[TurnT, int] = {}  # who has a seat: steps since
        self._waits_since: dict[TurnT, int] = {}

    def seat(
        self,
        speaking: Sequence[TurnT],
        seats: int,
        is_urgent: Callable[[TurnT], bool],
        is_ending: Callable[[TurnT], bool],
    ) -> set[TurnT]:
        """Who speaks in the next step, of all that could. `is_ending`: it needs this one step more, then it is gone."""
        self._now += 1
        self._spoken = {turn: steps for turn, steps in self._spoken.items() if turn in speaking}
        self._waits_since = {
            turn: self._waits_since.get(turn, self._now) for turn in speaking if turn not in self._spoken
        }
        # Fewer seats than before: who has spoken longest gets up.
        for turn in sorted(self._spoken, key=self._spoken.__getitem__)[seats:]:
            if not is_ending(turn):
                self._rise(turn)
        done = [turn for turn, steps in self._spoken.items() if steps >= self._steps and not is_ending(turn)]
        order = sorted(self._waits_since, key=lambda turn: (not is_urgent(turn), self._waits_since[turn]))
        chosen = order[: max(0, seats - len(self._spoken) + len(done))]
        for turn in done[: max(0, len(self._spoken) + len(chosen) - seats)]:
            self._rise(turn)
        for turn in chosen:
            del self._waits_since[turn]
            self._spoken[turn] = 0
        for turn in self._spoken:
            self._spoken[turn] += 1
        return set(self._spoken)

    def _rise(self, turn: TurnT) -> None:
        del self._spoken[turn]
        self._waits_since[turn] = self._now
