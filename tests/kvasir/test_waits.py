"""The clock that leases are counted by: it goes on while a laptop sleeps."""

import sys
import time
from pathlib import Path

import pytest
from kvasir.waits import never_ahead, uptime_s


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/uptime is Linux's")
def test_it_is_the_kernels_count_with_sleep() -> None:
    before = float(Path("/proc/uptime").read_text().split()[0])
    assert before - 0.011 <= uptime_s()
    assert uptime_s() <= float(Path("/proc/uptime").read_text().split()[0]) + 1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has a clock of its own that counts sleep")
def test_it_is_read_from_the_clock_that_counts_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that never slept shows no difference between the clocks."""
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 7.0}.__getitem__)
    assert uptime_s() == 7.0


def test_time_that_surely_passed_follows_no_clock_that_is_set_ahead() -> None:
    clocks = {"unix_ms": 10_000, "uptime_s": 5.0}
    surely_ms = never_ahead(lambda: int(clocks["unix_ms"]), lambda: clocks["uptime_s"])
    found = []
    for unix_ms, uptime in ((10_000, 5.0), (12_000, 7.0), (10**12, 8.0), (13_500, 8.5), (4_000, 9.0)):
        clocks.update(unix_ms=unix_ms, uptime_s=uptime)
        found.append(surely_ms())
    assert found == [10_000, 12_000, 13_000, 13_500, 4_000]
