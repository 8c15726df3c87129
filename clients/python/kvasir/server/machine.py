"""The machine that a service runs on."""

import contextlib
import os
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def machine_bytes() -> int:
    """Its RAM, or as much of it as a container may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        return min(physical, int(_CONTAINER.read_text(encoding="ascii")))
    return physical
