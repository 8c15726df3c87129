"""Copies of objects on the local disk, at most so many bytes: each is verified when it is read, and may be lost."""

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from itertools import count
from pathlib import Path

from blake3 import blake3

_HASH_BYTES = 32  # behind the bytes of each file
_NEW = ".new-"


class DiskTier:
    """The copies that were used last. A write is renamed into place, so a crash leaves no half copy under a name; a
    file that does not verify is removed. From any thread."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # the one that was used last at the end
        self._total_bytes = 0
        self._numbers = count()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in root.glob("*/*"):
            if path.name.startswith(_NEW):
                path.unlink(missing_ok=True)
            else:
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        for _, path, size in sorted(found):
            self._count(path, size)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def get(self, place: str, name: str) -> memoryview | None:
        """An object's bytes, if a whole copy is here."""
        path = self._root / place / name
        try:
            data = memoryview(path.read_bytes())
        except OSError:
            return None
        if blake3(data[:-_HASH_BYTES]).digest() != data[-_HASH_BYTES:]:
            self.remove(place, name)
            return None
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
        with suppress(OSError):
            os.utime(path)  # the order after a restart
        return data[:-_HASH_BYTES]

    def put(self, place: str, name: str, data: bytes | memoryview) -> None:
        """Keep a copy, and give up those that were not used for longest. A disk that is full keeps none."""
        size = len(data) + _HASH_BYTES
        if size > self._most_bytes:
            self.remove(place, name)
            return
        path = self._root / place / name
        new = path.with_name(f"{_NEW}{next(self._numbers)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(new, "xb", opener=_own) as file:
                file.write(data)
                file.write(blake3(data).digest())
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            self.remove(place, name)  # it may be an older one
            return
        self._count(path, size)

    def remove(self, place: str, name: str) -> None:
        path = self._root / place / name
        with self._lock:
            self._total_bytes -= self._sizes.pop(path, 0)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _count(self, path: Path, size_bytes: int) -> None:
        with self._lock:
            self._total_bytes += size_bytes - self._sizes.pop(path, 0)
            self._sizes[path] = size_bytes
            while self._total_bytes > self._most_bytes:
                oldest, size = self._sizes.popitem(last=False)
                self._total_bytes -= size
                with suppress(OSError):
                    oldest.unlink(missing_ok=True)


def _own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
