"""Reads blobs' files into memory. A file is read by all threads, in pieces, and the file that was begun first before
others: so files come one after the other, and go to the device while others are read. A disk gives one thread less than
it has, for which the last files would wait.
"""

import os
import stat
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from threading import Event, Lock

from kvasir.clients.blob_memory import BlobMemory
from kvasir.formats.digest import Digest

PIECE_BYTES = 1 << 20  # of a disk: larger ones come later
CACHED_PIECE_BYTES = 4 << 20  # of the page cache: each piece takes the interpreter's lock a few times
_OPENING = -1  # the place of a file's opening, before its pieces
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux has it
_LOOKS = count()
_GOLDEN = 0.6180339887498949  # the parts behind the points of its multiples are far from each other


class OrderedThreads:
    """Threads that work at the file that was begun first. All of them begin now: the event loop would wait for each,
    while those before it read a restore's first files.
    """

    def __init__(self, threads: int) -> None:
        self._threads, all_began = ThreadPoolExecutor(threads, "store-files"), Event()
        for _ in range(threads):
            self._threads.submit(all_began.wait)
        all_began.set()
        self._left = PriorityQueue[tuple[int, int, Callable[[], None]]]()
        self._numbers = count()

    def next_number(self) -> int:
        """Of a file that is begun now."""
        return next(self._numbers)

    def submit(self, number: int, offset: int, work: Callable[[], None]) -> None:
        """`number` and `offset`: a place in the order that no other work has. `work` does not raise."""
        self._left.put((number, offset, work))
        self._threads.submit(self._do_first)

    def _do_first(self) -> None:
        *_, work = self._left.get_nowait()
        work()


class FileReading:
    """A blob's file on its way into memory. `data`: its bytes, verified; None where only the store can read it."""

    def __init__(self, path: Path, digest: Digest, memory: BlobMemory, threads: OrderedThreads) -> None:
        self.data: Future[memoryview | None] = Future()
        self.was_cached: bool | None = None  # by the page cache, as it was begun; None: it was not yet
        self._path, self._digest, self._memory, self._threads = path, digest, memory, threads
        self._number = threads.next_number()
        self._gate = Lock()
        self._pieces_left = 0
        self._file: FileIO | None = None
        self._bytes = memoryview(b"")
        self._error: Exception | None = None
        threads.submit(self._number, _OPENING, self._begin)

    def _begin(self) -> None:
        size_bytes = self._digest.size_bytes
        try:
            self._file = _opened(self._path, size_bytes)
            self._bytes = self._memory.take(size_bytes)
            self.was_cached = is_cached(self._file.fileno(), size_bytes)
        except Exception as error:  # noqa: BLE001 - whoever waits for `data` gets it
            self._error = error
        piece_bytes = PIECE_BYTES if self.was_cached is False else CACHED_PIECE_BYTES
        offsets = range(0, max(1, len(self._bytes)), piece_bytes)
        self._pieces_left = len(offsets)
        for offset in offsets:
            self._threads.submit(self._number, offset, partial(self._read, offset, piece_bytes))

    def _read(self, offset: int, size_bytes: int) -> None:
        try:
            if self._file is not None and self._error is None and not self.data.cancelled():
                # Of a file that is cut meanwhile less is read: its digest will differ.
                os.preadv(self._file.fileno(), [self._bytes[offset : offset + size_bytes]], offset)
        except Exception as error:  # noqa: BLE001 - as above
            self._error = error
        with self._gate:
            self._pieces_left -= 1
            is_last = not self._pieces_left
        if is_last:
            self._end()

    def _end(self) -> None:
        if not self.data.set_running_or_notify_cancel():
            self._close()
            return
        try:
            self.data.set_result(self._verified())
        except Exception as error:  # noqa: BLE001 - as above
            self.data.set_exception(error)

    def _verified(self) -> memoryview | None:
        self._close()
        data, self._bytes = self._bytes, memoryview(b"")
        if isinstance(self._error, OSError):
            return None
        if self._error is not None:
            raise self._error
        return data.toreadonly() if Digest.of(data) == self._digest else None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def is_file_cached(path: Path, size_bytes: int) -> bool:
    """As `is_cached`; True also where only the store can read it."""
    try:
        with _opened(path, size_bytes) as file:
            return is_cached(file.fileno(), size_bytes)
    except OSError:
        return True


def _opened(path: Path, size_bytes: int) -> FileIO:
    """Raises OSError for anything but a regular file of this user with so many bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    file = FileIO(descriptor)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (status.st_uid, status.st_size) == (os.geteuid(), size_bytes):
        return file
    file.close()
    raise OSError(f"{path}: expected a file of {size_bytes} bytes")


def is_cached(descriptor: int, size_bytes: int) -> bool:
    """Whether reading will most likely not wait for a disk: by two bytes, others each time: Linux begins to read those
    that it lacks. True where nobody knows.
    """
    if not _NO_WAIT:
        return True
    offsets = (int(next(_LOOKS) * _GOLDEN % 1 * size_bytes) for _ in range(2))
    try:
        return all(os.preadv(descriptor, [bytearray(1)], offset, _NO_WAIT) for offset in offsets)
    except BlockingIOError:
        return False
    except OSError:  # a file system that does not know
        return True
