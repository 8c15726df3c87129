"""What makes bytes and names survive a loss of power: fsync, and on macOS F_FULLFSYNC, where fsync alone does not."""

import ctypes
import errno
import fcntl
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

_WRITES = 9
_OF_SHARES = {errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.ENOENT}  # the last one is macOS's, for SMB
_FULL_AND_WAIT = 0x01 | 0x02  # macOS: SYNC_VOLUME_FULLSYNC, SYNC_VOLUME_WAIT


def sync(descriptor: int) -> None:
    """The file's bytes, or the directory's names, survive a loss of power on return. Raises OSError."""
    if (full_sync := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
        except OSError as error:
            # A file system without it (a network share, some volumes of others) has fsync only; SQLite does the same.
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def sync_disk_of(path: Path) -> None:
    """All that was written to the file system of a path survives a loss of power on return."""
    # sync() of macOS does not wait for the disk.
    of_volume = getattr(ctypes.CDLL(None), "sync_volume_np", None)
    if of_volume is None or of_volume(os.fsencode(path), _FULL_AND_WAIT) != 0:
        os.sync()


def synced_write_s(directory: Path, clock: Callable[[], float]) -> float:
    """The median of small writes in this directory that survive a loss of power. Raises OSError."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:  # without a name: a kill leaves nothing
        for _ in range(_WRITES):
            began = clock()
            os.pwrite(file.fileno(), b"k" * 4096, 0)
            sync(file.fileno())
            times.append(clock() - began)
    return statistics.median(times)


def sync_directory(path: Path) -> None:
    """As `sync_names`, of a directory by its path."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(descriptor)
    finally:
        os.close(descriptor)


def sync_names(descriptor: int) -> None:
    """The directory's names survive a loss of power on return, except on a file system that cannot sync directories, as
    a network share. Raises OSError."""
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _OF_SHARES:
            raise
