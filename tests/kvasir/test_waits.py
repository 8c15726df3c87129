"""The clock that leases are counted by: it goes on while a laptop sleeps."""

import sys
import time
from pathlib import Path

import pytest
from kvasir.waits import uptime_s


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
