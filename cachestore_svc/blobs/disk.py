"""Everything the store does to a file system, one method per effect, so that a test can count, refuse or kill at each.
A name is durable once its directory was synced, bytes once their file was. On macOS only F_FULLFSYNC does that.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvasir.clients.blob_memory import BlobMemory
from kvasir.errors import KvasirError, ResourceExhausted, Unavailable
from kvasir.syncing import begin_writing_back, sync, try_file

StrPath = str | Path
READ_BACK_BYTES = 4 << 20  # pieces large enough for all cores to hash one
NO_FILE = errno.ENXIO  # A name that something else has than a file. Opening a socket fails by itself.
_memory = BlobMemory(8 * READ_BACK_BYTES)


class Disk:
    """The real file system. Files are 0600 and directories 0700; no symbolic link is followed at a path's end."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, durably. Expensive: callers remember that it exists."""
        if path.is_dir():
            # Where one may not look, one could not have made it either.
            with contextlib.suppress(PermissionError):
                self.fsync_directory(path.parent)
            return
        if not path.parent.is_dir():
            self.make_directory(path.parent)
        self.add_directory(path)
        self.fsync_directory(path.parent)

    def add_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def open_append(self, path: StrPath) -> int:
        """A descriptor that reads, and writes at the end; the file is made. Raises OSError (NO_FILE)."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return _of_file(os.open(path, flags, 0o600))

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def overwrite(self, path: Path, data: bytes) -> None:
        """Write over a file's first bytes where they lie, durably. An SSD may keep what was there for a while."""
        descriptor = _of_file(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            self.write(descriptor, data)
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)

    def begin_writing_back(self, descriptor: int) -> None:
        begin_writing_back(descriptor)

    def fsync(self, descriptor: int) -> None:
        sync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: StrPath, target: StrPath) -> None:
        os.replace(source, target)  # noqa: PTH105  its result is not made into another path

    def fsync_directory(self, path: StrPath) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: StrPath) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108  as above

    def read(self, path: StrPath, max_bytes: int) -> memoryview:
        """The file's bytes, at most `max_bytes`. Raises OSError (NO_FILE). O_NONBLOCK: a pipe would block for ever."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            wanted = min(max_bytes, _size_of_file(descriptor))
            data = os.read(descriptor, wanted)
            while len(data) < wanted and (more := os.read(descriptor, wanted - len(data))):
                data += more
        finally:
            os.close(descriptor)
        return memoryview(data)

    def read_back(self, descriptor: int, size_bytes: int) -> Iterator[memoryview]:
        """The bytes of an open file of this size from its start, in pieces, each of which lasts until the next."""
        buffer = _memory.take(READ_BACK_BYTES)[:size_bytes] if size_bytes else memoryview(b"")
        offset = 0
        while buffer and (count := os.preadv(descriptor, [buffer], offset)):
            offset += count
            yield buffer[:count].toreadonly()

    def names(self, path: StrPath) -> list[str]:
        try:
            return os.listdir(path)  # noqa: PTH208  a third of the time of entries
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_empty(self, path: Path) -> bool:
        """Whether it is a directory without a file. Of thousands of files one is read."""
        try:
            with os.scandir(path) as entries:
                return next(entries, None) is None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size_bytes(self, path: StrPath) -> int | None:
        try:
            status = os.stat(path, follow_symlinks=False)  # noqa: PTH116  as above
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def has(self, path: Path) -> bool:
        return os.path.lexists(path)

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def try_file(self, path: Path) -> None:
        """Raises OSError where the disk takes no file."""
        try_file(path)

    def reached(self, point: str) -> None:
        """A place between effects, named for tests: around each commit of the index."""


def _of_file(descriptor: int) -> int:
    """The descriptor of a regular file. Any other (a pipe, a device, a directory) is closed and refused."""
    try:
        _size_of_file(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _size_of_file(descriptor: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(NO_FILE, "it is no regular file")
    return status.st_size


def is_no_room(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(what: str) -> ResourceExhausted:
    return ResourceExhausted(f"the disk is full: no room for {what}", reason="DISK_FULL", retry_after_s=60)


def refusal(error: OSError, what: str) -> KvasirError:
    """A failed effect in words that a caller can act on."""
    if is_no_room(error):
        return disk_full(what)
    name = errno.errorcode.get(error.errno or 0, "an unknown error")
    is_of_bucket = error.errno == errno.EHOSTUNREACH  # its words are the answer
    why = error.strerror if is_of_bucket else f"the disk failed with {name}"
    # Until a person mounts it again.
    retry_after_s = 60 if error.errno == errno.EROFS else 1
    return Unavailable(f"{why} on {what}", reason="DISK_FAILED", retry_after_s=retry_after_s)
