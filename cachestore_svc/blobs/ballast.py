"""A file that reserves disk space for the index: removed when the disk is full, as freeing space writes a little."""

import threading
from pathlib import Path

from cachestore_svc.blobs.disk import Disk

_PIECE = bytes(1 << 20)


class Ballast:
    """Bytes set aside in one file. Used from any thread."""

    def __init__(self, path: Path, size_bytes: int, disk: Disk) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._disk = disk
        self._lock = threading.Lock()

    def fill(self, reserve_bytes: int) -> None:
        """Set the bytes aside, unless they are, or less than `reserve_bytes` would stay free beside them."""
        with self._lock:
            held = self._disk.size_bytes(self._path) or 0
            missing = self._size_bytes - held
            if missing <= 0 or self._disk.free_bytes(self._path.parent) < missing + reserve_bytes:
                return
            try:
                descriptor = self._disk.open_append(self._path)
            except OSError:
                # Something else has its name: there is no ballast, and the store works all the same.
                return
            try:
                while missing > 0:
                    self._disk.write(descriptor, _PIECE[:missing])
                    missing -= len(_PIECE)
            except OSError:
                # Somebody else took the room meanwhile; a smaller ballast is still one.
                return
            finally:
                self._disk.close(descriptor)

    def missing_bytes(self) -> int:
        """Bytes that were given up, or never found room: no blob may take them."""
        return max(0, self._size_bytes - (self._disk.size_bytes(self._path) or 0))

    def give_up(self) -> bool:
        """Free the bytes. False when there were none."""
        with self._lock:
            if not self._disk.size_bytes(self._path):
                return False
            self._disk.remove(self._path)
            return True
