"""Where tests put directories: in memory where there is room. Half of what a store's tests take is waiting for a disk.

What a sync is for, a loss of power, is tested on a recording of all effects; and a kill leaves this memory as it leaves
the page cache of a disk.
"""

import os
import shutil
import tempfile
from pathlib import Path

_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 8 << 30


def directory() -> Path:
    """With a short name: a socket's path has to fit into a hundred bytes."""
    is_roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    return _MEMORY if is_roomy else Path("/tmp")


def home() -> Path:
    """A new directory."""
    return Path(tempfile.mkdtemp(prefix="kv", dir=directory()))
