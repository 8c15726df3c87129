"""Copies of objects on the local disk, at most so many bytes, and at most half of the room that the disk has without
them: blobs that arrive need some, too. Each is verified when it is read, and may be lost.

When room is short, the namespace that has the most loses its own copies first."""

import os
import threading
from collections import Counter, OrderedDict
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import Disk

_HASH_BYTES = 32  # behind the bytes of each file
_NEW = ".new-"


class DiskTier:
    """The copies that were used last. A write is renamed into place, so a crash leaves no half copy under a name; a
    file that does not verify is removed. From any thread."""

    def __init__(
        self,
        root: Path,
        most_bytes: int,
        disk: Disk | None = None,
        kept_bytes: int = 0,
        *,
        only_looks: bool = False,
    ) -> None:
        """`kept_bytes`: must stay free on the disk, whatever is there. One that `only_looks`, with no bytes of its own,
        gives up no copy: a store may run, whose copies these are."""
        self._root = root
        self._most_bytes = most_bytes
        self._disk = disk or Disk()
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, OrderedDict[Path, int]] = {}  # by namespace, the one that was used last at the end
        self._held: Counter[str] = Counter()
        self._numbers = count()
        if only_looks:
            return
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in root.glob("*/*"):
            if path.name.startswith(_NEW):
                path.unlink(missing_ok=True)
            else:
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        for _, path, size in sorted(found):
            self._add(path, size)
        self._shrink()

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._held.total()

    def names(self) -> dict[str, list[str]]:
        """Of the objects that have copies, by place."""
        with self._lock:
            return {place: [path.name for path in sizes] for place, sizes in self._sizes.items()}

    def get(self, place: str, name: str, digest: Digest | None = None) -> memoryview | None:
        """An object's bytes, if a whole copy is here; where the caller knows their digest, if they have that."""
        path = self._root / place / name
        try:
            data = memoryview(path.read_bytes())
        except OSError:
            return None
        found = Digest.of(data[:-_HASH_BYTES])
        if found != digest if digest else bytes.fromhex(found.hash) != data[-_HASH_BYTES:]:
            self.remove(place, name)
            return None
        with self._lock:
            if path in (sizes := self._sizes.get(place, OrderedDict())):
                sizes.move_to_end(path)
            self._shrink()
        with suppress(OSError):
            os.utime(path)  # the order after a restart
        return data[:-_HASH_BYTES]

    def put(self, place: str, name: str, data: bytes | memoryview, digest: Digest | None = None) -> None:
        """Keep a copy, and give up those that were not used for longest. A disk that is full keeps none. `digest`: of
        the bytes, where the caller has computed it."""
        size = len(data) + _HASH_BYTES
        with self._lock:
            has_room = size <= self._room_bytes()
        if not has_room:
            self.remove(place, name)
            return
        path = self._root / place / name
        new = path.with_name(f"{_NEW}{next(self._numbers)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(new, "xb", opener=_own) as file:
                file.write(data)
                file.write(bytes.fromhex((digest or Digest.of(data)).hash))
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            self.remove(place, name)  # it may be an older one
            return
        with self._lock:
            self._add(path, size)
            self._shrink()

    def remove(self, place: str, name: str) -> None:
        path = self._root / place / name
        with self._lock:
            self._forget(path)
            self._shrink()
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _add(self, path: Path, size_bytes: int) -> None:
        self._forget(path)
        self._sizes.setdefault(path.parent.name, OrderedDict())[path] = size_bytes
        self._held[path.parent.name] += size_bytes

    def _shrink(self) -> None:
        """Whatever is done, as others may have filled the disk."""
        most_bytes = self._room_bytes()
        while self._held.total() > most_bytes:
            [(largest, _)] = self._held.most_common(1)
            oldest = next(iter(self._sizes[largest]))
            self._forget(oldest)
            with suppress(OSError):
                oldest.unlink(missing_ok=True)

    def _room_bytes(self) -> int:
        try:
            free_bytes = self._disk.free_bytes(self._root)
        except OSError:
            return self._most_bytes
        return min(self._most_bytes, max(0, free_bytes + self._held.total() - self._kept_bytes) // 2)

    def _forget(self, path: Path) -> None:
        place = path.parent.name
        sizes = self._sizes.get(place, OrderedDict())
        self._held[place] -= sizes.pop(path, 0)
        if not sizes:
            self._sizes.pop(place, None)
            del self._held[place]


def _own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
