"""How long the programs wait for each other, a name for each kind of wait; and the clock that counts sleep."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# Of one thread for another that holds the interpreter, where Python's usual time at each step would add up.
SWITCH_S = 0.0002
_USUAL_SWITCH_S = sys.getswitchinterval()
# Between two looks at what ends soon: a process, a lock, a turn; and of a person at a reply that grows.
LOOK_S = 0.02
# Before another try at what comes back soon, as a stream that was cut.
PAUSE_S = 0.2
# Before another try at what may be away for long. Who goes on trying doubles it up to the longest: some refusals are
# lines of an audit.
RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
# Between two reports to a person who waits.
PROGRESS_S = 2.0
# A service that is well answers a call without work by then; so long a program that ends waits for the last of it.
SOON_S = 2.0
# The same of a service that is busy, or behind a network.
ANSWER_S = 5.0
# The same of a call that needs some work or a handshake first.
PATIENCE_S = 10.0
# Who moves nothing for so long is gone.
SILENCE_S = 30.0
# What does not answer at all for so long hangs.
HANGS_S = 60.0
# The most that others wait for work of minutes, as a model that is read.
WORK_S = 120.0

# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC counts sleep, unlike the one of `time.monotonic`.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def uptime_s() -> float:
    """Seconds, those of sleep included, from an origin of its own: `time.monotonic` stands still in sleep."""
    return time.clock_gettime(_CLOCK)


def never_ahead(now_ms: Callable[[], int], uptime_s: Callable[[], float] = uptime_s) -> Callable[[], int]:
    """The Unix time of `now_ms`, but never more than it was at first and has surely passed since: somebody may set the
    clock ahead, and a deletion is for good.
    """
    began_ms, began_s = now_ms(), uptime_s()
    return lambda: min(now_ms(), began_ms + round(1e3 * (uptime_s() - began_s)))


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """For this time a thread waits little until another gives it the interpreter."""
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_SWITCH_S)
