"""Whole blobs as files for a store on this host, whose directories only the store makes: no socket has their bytes."""

import contextlib
import ctypes
import os
import secrets
import threading
from pathlib import Path

from kvasir.formats.blob_place import handed_place
from kvasir.formats.digest import Buffer

# The store reserves no room for a file before it is named to it. So this many bytes at most wait, of all uploads, and
# only while more than a store keeps free by default is left beside them: else bytes are sent, and counted first.
_MAX_WAITING_BYTES = 256 << 20
LEFT_FREE_BYTES = 1 << 30
_SYNC_FILE_RANGE_WRITE = 2
_PIECE_BYTES = 1 << 20  # after each the disk begins to write it: a file of 9 MB is durable a fifth sooner
_C = ctypes.CDLL(None)


class HandedFiles:
    """The files that wait for the store of one namespace. From any thread."""

    def __init__(self, data_dir: Path, namespace: str) -> None:
        self._directory = handed_place(data_dir, namespace)
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}  # bytes of each file, by token

    def new_token(self) -> str:
        """A name for a file that nobody can guess."""
        return secrets.token_hex(16)

    def write(self, token: str, data: Buffer) -> bool:
        """Write a new file. False where that is not possible: too much waits, the disk is nearly full, or the store has
        no place for it."""
        view = memoryview(data).cast("B")
        if self._free_bytes() < LEFT_FREE_BYTES + len(view):
            return False
        with self._lock:
            if sum(self._waiting.values()) + len(view) > _MAX_WAITING_BYTES:
                return False
            self._waiting[token] = len(view)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._directory / token, flags, 0o600)
            try:
                written = 0
                while written < len(view):
                    count = os.write(descriptor, view[written : written + _PIECE_BYTES])
                    _begin_writeback(descriptor, written, count)
                    written += count
            finally:
                os.close(descriptor)
        except OSError:
            self.forget(token)
            return False
        return True

    def _free_bytes(self) -> int:
        try:
            status = os.statvfs(self._directory)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize

    def forget(self, token: str) -> None:
        """The file waits no more. Removes it, if the store has not taken it."""
        with contextlib.suppress(OSError):
            (self._directory / token).unlink()
        with self._lock:
            self._waiting.pop(token, None)


def _begin_writeback(descriptor: int, first: int, count: int) -> None:
    """Let the system begin to write these bytes to the disk, if it can: the store's sync then waits for less."""
    if (call := getattr(_C, "sync_file_range", None)) is not None:
        call(descriptor, ctypes.c_int64(first), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)
