"""Whether the machine is short of memory, as its kernel counts it."""

import ctypes
import ctypes.util
import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LEVEL = b"kern.memorystatus_vm_pressure_level"
_WARNS = 2  # of 1 (normal), 2 (warning), 4 (critical)
_LITTLE_PART = 0.04


def is_short_of_memory() -> bool:
    """Whether programs should give memory back now. False where the kernel does not report it."""
    return _warns_of_pressure() if sys.platform == "darwin" else _is_little_available() or _is_limit_near()


def _is_little_available() -> bool:
    """On Linux: whether little is left before it swaps or kills."""
    try:
        rows = (line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        kib = {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
        return kib["MemAvailable:"] < _LITTLE_PART * kib["MemTotal:"]
    except (OSError, KeyError):
        return False


def _is_limit_near() -> bool:
    """Whether the control group (version 2) of this process, or one that it is in, has little left of its limit, as a
    container's. The kernel takes cached files back before it kills.
    """
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return False
    group = _GROUPS / own.lstrip("/")
    return any(_is_near(folder) for folder in (group, *group.parents) if folder.is_relative_to(_GROUPS))


def _is_near(group: Path) -> bool:
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit.isdigit() and int(limit) - int(used) + int(rows["inactive_file"]) < _LITTLE_PART * int(limit)
    except (OSError, ValueError, LookupError):
        return False


def _warns_of_pressure() -> bool:
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    failed = libc.sysctlbyname(_LEVEL, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return not failed and level.value >= _WARNS
