"""Seconds that pass while the machine sleeps, too: `time.monotonic` stands still there on macOS and on Linux."""

import time

# macOS has no CLOCK_BOOTTIME; its CLOCK_MONOTONIC counts sleep, unlike the one of `time.monotonic`.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def uptime_s() -> float:
    """Monotonic, from an origin of its own: not to be compared with another clock's."""
    return time.clock_gettime(_CLOCK)
