"""Steps of the database's clock, by which leases end: a step forward must end none early. Each store compares
it with a clock that nobody sets, in every group. A machine that slept looks like such a step: leases then hold for
longer, each at most for its whole time.
"""

from collections.abc import Callable

from cachestore_svc.index.sqlite.rows import Connection

_LEAST_STEP = 500  # milliseconds
_LATE, _LOOKS = 250, 3  # milliseconds: an answer that comes later may hide a step: the clock is looked at again
_DRIFT = 1000  # one part in so many: clocks that run at different speeds are none that were set
# Those that held before the step have as long to go as before it.
_GIVE_BACK = """UPDATE leases SET ends_ms = LEAST(ends_ms + :step_ms, now_ms() + ttl_ms)
    WHERE granted = generation AND NOT is_released AND ends_ms > now_ms() - :step_ms"""


class ClockSteps:
    def __init__(self, steady: Callable[[], float]) -> None:
        """`steady`: seconds that nobody sets."""
        self._steady = steady
        self._sent_ms = 0.0
        # When the last group that took effect was answered, and the most that the database's clock was ahead then.
        self._last: tuple[float, float] | None = None
        self._new = (0.0, 0.0)

    def begin(self) -> None:
        """Before the database looks at its clock."""
        self._sent_ms = 1000 * self._steady()

    def step_ms(self, server_ms: int, ask: Callable[[], int]) -> int:
        """By how much its clock was surely set forward since the last group that took effect; 0 where it may not have
        been. However late an answer comes, it is no step: the server looked at any time between question and answer.
        `ask`: its clock again."""
        for _ in range(_LOOKS):
            if 1000 * self._steady() - self._sent_ms <= _LATE:
                break
            self.begin()
            server_ms = ask()
        now_ms = 1000 * self._steady()
        self._new = now_ms, server_ms - self._sent_ms
        if self._last is None:
            return 0
        answered_ms, most_ahead_ms = self._last
        step = server_ms - now_ms - most_ahead_ms
        return int(step) if step > _LEAST_STEP + (now_ms - answered_ms) / _DRIFT else 0

    def keep(self) -> None:
        """The group took effect, and so did all that a step needed."""
        self._last = self._new


def now_of(connection: Connection) -> int:
    """The database's clock."""
    [[now_ms]] = connection.execute("SELECT now_ms()").fetchall()
    return int(now_ms)


def give_back(connection: Connection, step_ms: int) -> None:
    """Let leases hold that the step would have ended."""
    connection.execute(_GIVE_BACK, {"step_ms": step_ms})
