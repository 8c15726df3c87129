"""Which hot memory to drop first: the one whose agent is expected last.

The time is counted in turns of all agents. An agent is expected again after as many turns as lay between its last two.
An agent that had one turn only, or that is overdue, is expected after as many turns as it has been silent. So among
strangers the least recently used memory goes first. Of agents that take turns in a ring too large for the budget, the
agent that has just had its turn goes and the others stay: least recently used would drop each memory just before its
turn, and no agent would ever find its own (LESSONS 27).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_REMEMBERED = 4_096  # agents whose rhythm is known, with and without a memory
_PLANNED_TURNS = 16  # a plan that read a memory is submitted within so many turns of others, or never


@dataclass
class _Rhythm:
    last: int  # turn number of the agent's last turn
    interval: int | None = None  # turns between its last two
    planned: int | None = None  # turn number at which its next turn was planned


class ExpectedUse(Generic[KeyT]):
    """Counts turns; knows each agent's rhythm."""

    def __init__(self) -> None:
        self._now = 0
        self._rhythms: dict[KeyT, _Rhythm] = {}  # last turn first to go

    def took_turn(self, key: KeyT) -> None:
        """A turn of the agent left a memory: count it."""
        self._now += 1
        before = self._rhythms.pop(key, None)
        self._rhythms[key] = _Rhythm(self._now, None if before is None else self._now - before.last)
        if len(self._rhythms) > _REMEMBERED:
            del self._rhythms[next(iter(self._rhythms))]

    def plans(self, key: KeyT) -> None:
        """A turn of the agent is being planned: its memory is about to be used."""
        if rhythm := self._rhythms.get(key):
            rhythm.planned = self._now

    def turns_until(self, key: KeyT) -> int:
        """After how many turns of all agents this agent is expected. An unknown agent is expected last."""
        rhythm = self._rhythms.get(key)
        if rhythm is None:
            return self._now + 1
        if rhythm.planned is not None and self._now - rhythm.planned < _PLANNED_TURNS:
            return -1
        silent = self._now - rhythm.last
        if rhythm.interval is not None and silent <= rhythm.interval:
            return rhythm.interval - silent
        return silent
