"""The name under which this engine holds leases: the same after its restart, so that it need not wait for its own."""

import ctypes
import ctypes.util
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvasir.errors import InvalidArgument
from kvasir.names import check_owner

_FILE = "lease-owner"
_MAX_BYTES = 300
_IN_FILE = " in file "  # between the name and which file it is
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class LeaseOwner:
    """A name that no other living process has. The process keeps it until it ends."""

    def __init__(self, state_dir: Path, new_name: Callable[[], str]) -> None:
        """Read the name from `state_dir`, or make it there. If a living process has that name, make another one; also
        if the file is a copy, as that of a home or of a whole disk that was copied to another machine: with one name
        for two engines, one would take the other's leases, which would go on answering from its RAM."""
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(state_dir / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # The lock ends with the process, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.name = new_name()
        else:
            self.name = self._read() or new_name()
            self._write()

    def close(self) -> None:
        os.close(self._lock)

    def _read(self) -> str:
        """The name; empty if there is none, or another file's. A file of an earlier Kvasir does not name it."""
        try:
            name, _, file = os.pread(self._lock, _MAX_BYTES, 0).decode("ascii").strip().partition(_IN_FILE)
            return check_owner(name) if file in ("", self._file()) else ""
        except (UnicodeDecodeError, InvalidArgument):
            return ""

    def _write(self) -> None:
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{self.name}{_IN_FILE}{self._file()}\n".encode(), 0)
        os.fsync(self._lock)

    def _file(self) -> str:
        """Device and number, which a copy has not, but for that of a whole disk; and the start of the machine, before
        which no lease was given that still holds."""
        at = os.fstat(self._lock)
        return f"{at.st_dev}:{at.st_ino} since start {_boot()}"


def _boot() -> str:
    """Which start of this machine it is; empty where the system does not report it."""
    if sys.platform == "darwin":
        text = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(len(text))
        libc = ctypes.CDLL(ctypes.util.find_library("c"))
        failed = libc.sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, ctypes.c_size_t(0))
        return "" if failed else text.value.decode("ascii", "replace")
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
