"""What a store knows of the database's clock, by which leases end. Once in every group it compares it with a clock
that nobody sets: a step forward must end no lease early, and after one back none may hold for longer than its whole
time. A machine that slept looks like a step: leases then hold for longer.
"""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from cachestore_svc.index.sqlite.rows import Connection

_LEAST_STEP = 100  # milliseconds; engines leave off 250 before their leases end
_LATE, _LOOKS = 250, 3  # milliseconds: an answer that comes later may hide a step: the clock is looked at again
_DRIFT = 1000  # one part in so many: clocks that run at different speeds are none that were set


class _Look(NamedTuple):
    """By how much the database's clock was ahead, in milliseconds: the server looked between question and answer."""

    answered: float
    least_ahead: float
    most_ahead: float


class ClockSteps:
    def __init__(self, steady: Callable[[], float]) -> None:
        """`steady`: seconds that nobody sets."""
        self._steady = steady
        self._sent_ms = 0.0
        self._last: _Look | None = None  # of the last group that took effect
        self._new: _Look | None = None
        self._since_ms: float | None = None
        self.unseen_ms = (
            0.0  # the most by which the clock may have been set forward in this group without being noticed
        )

    def begin(self) -> None:
        """Before the database looks at its clock."""
        self._sent_ms = 1000 * self._steady()

    def step_ms(self, server_ms: int, ask: Callable[[], int]) -> int | None:
        """The most by which its clock was set forward since the last group that took effect, 0 where it was set back;
        None where it may not have been set. At the first look everything may have been. `ask`: its clock again.
        """
        for _ in range(_LOOKS):
            if 1000 * self._steady() - self._sent_ms <= _LATE:
                break
            self.begin()
            server_ms = ask()
        now_ms, last = 1000 * self._steady(), self._last
        self._new = look = _Look(now_ms, server_ms - now_ms, server_ms - self._sent_ms)
        self._looked = self._sent_ms, now_ms, server_ms
        self.unseen_ms = 0.0
        if last is None:
            return 0
        most_ms, least_ms = look.most_ahead - last.least_ahead, look.least_ahead - last.most_ahead
        drift_ms = (now_ms - last.answered) / _DRIFT
        if least_ms > _LEAST_STEP + drift_ms:
            return int(most_ms)
        if -most_ms > _LEAST_STEP + drift_ms:
            return 0
        self.unseen_ms = most_ms if most_ms > _LATE else 0.0
        if now_ms - self._sent_ms > _LATE:
            self._new = last  # which knows more
        return None

    def keep(self) -> None:
        """The group took effect, and so did all that a step needed."""
        self._last = self._new
        if self._since_ms is None and self._new:
            self._since_ms = self._new.answered

    @property
    def least_now_ms(self) -> int:
        """The least that the database's clock shows, had it not been set since the group began."""
        _, answered_ms, server_ms = self._looked
        return server_ms + int(1000 * self._steady() - answered_ms)

    @property
    def most_now_ms(self) -> int:
        sent_ms, _, server_ms = self._looked
        return server_ms + ceil(1000 * self._steady() - sent_ms)

    @property
    def watched_ms(self) -> int:
        """For how long no step can have been missed. A lease that began before may have lost any of its time."""
        return 0 if self._since_ms is None else int(1000 * self._steady() - self._since_ms)


def now_of(connection: Connection) -> int:
    """The database's clock."""
    [[now_ms]] = connection.execute("SELECT now_ms()").fetchall()
    return int(now_ms)
