"""Battery, heat and sleep of this machine: when a proof pauses, and how it stays awake."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvasir.waits import SILENCE_S, uptime_s

from kvasir_bench.system import output_of, text_of

_LOW_PERCENT = 30
_FULL_SPEED = 100
_UNKNOWN_LEVEL = 255  # of a thermal warning: nothing is known
_AWAKE_CLOCK = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)  # stands still during sleep


class Power:
    """Reasons to wait, from `pmset` on macOS, and from `files` on Linux."""

    def __init__(self, system: str = sys.platform, files: Path = Path("/sys")) -> None:
        self._is_mac, self._files = system == "darwin", files
        self._throttled = self._throttle_count()

    def reason_to_wait(self) -> str:
        """Empty if the machine is well. On Linux heat is a throttle counter that rose since the last call."""
        percent = self._mac_battery() if self._is_mac else self._linux_battery()
        if percent is not None and percent < _LOW_PERCENT:
            return f"the battery is at {percent} %, not charging, and {_LOW_PERCENT} % are wanted"
        return "the machine is hot and slows down" if self._is_hot() else ""

    def _is_hot(self) -> bool:
        if self._is_mac:
            text = output_of("pmset", "-g", "therm")
            limits = re.findall(r"CPU_(?:Speed|Scheduler)_Limit\s*=\s*(\d+)", text)
            levels = re.findall(r"(?:Thermal|Performance) Warning Level\s*=\s*(\d+)", text, re.IGNORECASE)
            return any(int(limit) < _FULL_SPEED for limit in limits) or any(
                int(level) not in (0, _UNKNOWN_LEVEL) for level in levels
            )
        before, self._throttled = self._throttled, self._throttle_count()
        return self._throttled > before

    def _mac_battery(self) -> int | None:
        text = output_of("pmset", "-g", "batt")
        found = re.search(r"(\d+)%;\s*discharging", text)
        return int(found[1]) if found and "Battery Power" in text else None

    def _linux_battery(self) -> int | None:
        """The fullest battery of this machine that discharges; a mouse's has the scope Device."""
        found = [
            int(text_of(supply / "capacity") or _FULL_SPEED)
            for supply in self._files.glob("class/power_supply/*")
            if (text_of(supply / "type"), text_of(supply / "status")) == ("Battery", "Discharging")
            and text_of(supply / "scope") != "Device"
        ]
        return max(found, default=None)

    def _throttle_count(self) -> int:
        counters = self._files.glob("devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
        return 0 if self._is_mac else sum(int(text_of(counter) or 0) for counter in counters)


def wait_until_well(power: Power, report: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when there is no reason to wait; `report` gets each new reason."""
    before = ""
    while reason := power.reason_to_wait():
        if reason != before:
            report(f"paused: {reason}. It goes on by itself; Ctrl-C keeps the finished steps")
        before = reason
        sleep(SILENCE_S)


def slept_s() -> float:
    return max(0.0, uptime_s() - time.clock_gettime(_AWAKE_CLOCK))


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """A Mac does not fall asleep by itself inside the block, nor after a kill of this process."""
    try:
        process = subprocess.Popen(["caffeinate", "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL)
    except OSError:  # not a Mac
        yield
        return
    with process:
        try:
            yield
        finally:
            process.terminate()
