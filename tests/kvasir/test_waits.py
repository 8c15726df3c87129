"""The clock that leases are counted by: it goes on while a laptop sleeps."""

import sys
from pathlib import Path

import pytest
from kvasir.waits import uptime_s


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/uptime is Linux's")
def test_it_is_the_kernels_count_with_sleep() -> None:
    before = float(Path("/proc/uptime").read_text().split()[0])
    assert before - 0.011 <= uptime_s()
    assert uptime_s() <= float(Path("/proc/uptime").read_text().split()[0]) + 1
