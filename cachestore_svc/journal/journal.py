"""The journal's file: appended and synced with each group commit, cut back if that fails, rewritten when long."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvasir.errors import Unavailable

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.journal.journal_lines import Parsed, Position, group_line, parse, state_lines
from cachestore_svc.journal.last_run import LastRun
from cachestore_svc.journal.replay import State

NAME = "journal"
_NEW_SUFFIX = ".new"
_STRANGE_SUFFIX = ".strange"  # A directory where the journal should lie, which no file can replace
_TIMES = 3  # it is rewritten when its groups take so many times the bytes of its state, and at least so many bytes
_LEAST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


def read(path: Path, disk: Disk, *, salvages: bool = False, until: Position | None = None) -> Parsed | None:
    """The content of a journal; None when there is none. A journal that is no file, or is unreadable, is empty."""
    try:
        size = disk.size_bytes(path)
        if size is None:
            return Parsed() if disk.has(path) else None
        return parse(bytes(disk.read(path, size)), salvages=salvages, until=until)
    except OSError:
        return Parsed(damaged_lines=1)


class Journal:
    """An open journal that stands where its index stands."""

    def __init__(
        self, path: Path, disk: Disk, store: str, position: Position, base_bytes: int, size_bytes: int
    ) -> None:
        """Open the whole part of a journal, up to `size_bytes`; the rest is cut off. Raises OSError."""
        self.store = store
        self.position = position
        self.path = path
        self._disk = disk
        self.base_bytes = base_bytes
        self.size_bytes = size_bytes
        self._is_broken = False
        self.last_run: LastRun | None = None  # notes each commit from when it is set
        self._before: tuple[Position, int] | None = None
        self._descriptor = disk.open_append(path)
        if os.fstat(self._descriptor).st_size != size_bytes:
            self._cut(size_bytes)

    @classmethod
    def begin(cls, path: Path, disk: Disk, store: str, position: Position, state: State) -> "Journal":
        """Write a journal that begins with this state in place of any file there. Raises OSError."""
        size = _write(path.with_name(path.name + _NEW_SUFFIX), disk, state_lines(store, position, state))
        if path.is_dir():
            disk.rename(path, path.with_name(path.name + _STRANGE_SUFFIX))
        _put_in_place(path, disk)
        return cls(path, disk, store, position, size, size)

    def append(self, changes: Sequence[str]) -> Position:
        """Write changes in JSON, durably. Raises OSError if nothing was written, Unavailable after an undo failed."""
        if self._is_broken:
            raise Unavailable("the journal cannot be written; restart the store", reason="INDEX_FAILED")
        line, position = group_line(self.position, changes)
        self._before = self.position, self.size_bytes
        try:
            self._disk.write(self._descriptor, line)
            self._disk.fsync(self._descriptor)
        except OSError:
            self.take_back()
            raise
        self.position, self.size_bytes = position, self.size_bytes + len(line)
        return position

    def keep(self) -> None:
        if self._before is not None and self.last_run is not None:
            self.last_run.note(self.position)
        self._before = None

    def take_back(self) -> None:
        """The commit of the last group failed: cut it off. Where that fails, nothing more is written."""
        if self._before is None:
            return
        (self.position, self.size_bytes), self._before = self._before, None
        try:
            self._cut(self.size_bytes)
        except OSError:
            self._is_broken = True

    def shorten(self, state: State, position: Position, read_bytes: int) -> None:
        """Begin with this state, of the first `read_bytes`, and go on with lines that came since. Raises OSError."""
        new = self.path.with_name(self.path.name + _NEW_SUFFIX)
        size = _write(new, self._disk, [*state_lines(self.store, position, state), *self._pieces(read_bytes)])
        base_bytes = size - (self.size_bytes - read_bytes)
        descriptor = self._disk.open_append(new)
        try:
            _put_in_place(self.path, self._disk)
        except BaseException:
            self._is_broken = True  # which of the two has the name after a loss of power is not known
            self._disk.close(descriptor)
            raise
        self._disk.close(self._descriptor)
        self._descriptor, self.base_bytes, self.size_bytes = descriptor, base_bytes, size

    @property
    def is_long(self) -> bool:
        return self.size_bytes - self.base_bytes > max(_LEAST_BYTES, _TIMES * self.base_bytes)

    def shorter(self, size_bytes: int) -> Parsed:
        """The content of the first `size_bytes`. From any thread: they never change."""
        return parse(bytes(self._disk.read(self.path, size_bytes)))

    def close(self) -> None:
        if self.last_run is not None:
            self.last_run.close()
        with contextlib.suppress(OSError):
            self._disk.close(self._descriptor)

    def _cut(self, size_bytes: int) -> None:
        self._disk.truncate(self._descriptor, size_bytes)
        self._disk.fsync(self._descriptor)

    def _pieces(self, start: int) -> list[bytes]:
        pieces = []
        while start < self.size_bytes:
            piece = os.pread(self._descriptor, min(_PIECE_BYTES, self.size_bytes - start), start)
            if not piece:
                raise OSError(f"{self.path} was cut short")
            pieces.append(piece)
            start += len(piece)
        return pieces


def _write(path: Path, disk: Disk, lines: Iterable[bytes]) -> int:
    disk.remove(path)
    descriptor = disk.open_append(path)
    size = 0
    try:
        for line in lines:
            disk.write(descriptor, line)
            size += len(line)
        disk.fsync(descriptor)
    finally:
        disk.close(descriptor)
    return size


def _put_in_place(path: Path, disk: Disk) -> None:
    disk.rename(path.with_name(path.name + _NEW_SUFFIX), path)
    disk.fsync_directory(path.parent)
