"""Reads blobs from the files of this user's store on this machine, eight times as fast as through its socket, and hands
new ones over as files. No path from the wire is used, and bytes only if they have the digest. Files are read, not
mapped: one that is cut under a map ends the process.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from kvasir.clients.blob_memory import BlobMemory
from kvasir.clients.handed_files import HandedFiles
from kvasir.formats.blob_place import blob_place
from kvasir.formats.digest import Digest
from kvasir.server.machine import machine_bytes
from kvasir.server.shared_room import SharedRoom
from kvasir.waits import SOON_S

from inference_svc.memory.store.file_reading import FileReading, OrderedThreads, is_file_cached

# BLAKE3 is a thread's work at 4 GB/s. More threads than these are faster than memory is.
_THREADS = min(8, os.cpu_count() or 1)
# Files that a turn has read ahead of the one that is wanted next. So many turns share the threads as the room for bytes
# that become KV allows.
_AHEAD = 2 * _THREADS
# A large restore has 512 MiB under way where a device takes them by copies, else 280. Memory that is not kept is filled
# with zeros each time, under the interpreter's lock: 1.8 ms a block of 9 MB.
_KEPT_BYTES, _MOST_KEPT_BYTES, _KEPT_PART = 256 << 20, 512 << 20, 256
_READY_PART = 512  # of a machine's memory: so much kept memory is prepared for the first restore
_EXPECTED_PART = 8  # of the room for bytes that become KV: so much is read before a plan wants it


def kept_bytes(machine_bytes: int) -> int:
    """Memory for files that an engine keeps for the next ones, of a machine with so much."""
    return min(max(_KEPT_BYTES, machine_bytes // _KEPT_PART), _MOST_KEPT_BYTES)


class _Expected(NamedTuple):
    reading: FileReading
    data: asyncio.Future[memoryview | None]
    give_back: Callable[[], None]  # the room that it has


class StoreFiles:
    def __init__(self, data_dir: Path, namespace: str) -> None:
        self._data_dir = data_dir
        self._namespace = namespace
        self.handed = HandedFiles(data_dir, namespace)
        self._memory = _memory()
        self._threads = _threads()
        self._expected: dict[Digest, _Expected] = {}

    def make_ready(self, file_bytes: int) -> None:
        """Prepare memory for the first files of such a size that are read. Blocks for up to a fifth of a second."""
        self._memory.make_ready(file_bytes, machine_bytes() // _READY_PART)

    def expect(self, digests: Sequence[Digest], room: SharedRoom) -> None:
        """Begin to read the first of these blobs, which a turn will probably want in a moment, if there is much `room`.
        One memory's at a time; files that nobody wants are forgotten.
        """
        left_bytes = room.max_units // _EXPECTED_PART - room.held_units
        for digest in digests[:_AHEAD] if not self._expected else ():
            left_bytes -= digest.size_bytes
            if left_bytes < 0 or not room.take_if_fits(self._namespace, digest.size_bytes):
                break
            reading, give_back = self.begin(digest), partial(room.give_back, self._namespace, digest.size_bytes)
            self._expected[digest] = _Expected(reading, asyncio.wrap_future(reading.data), give_back)
        if self._expected:
            asyncio.get_running_loop().call_later(SOON_S, self._forget, list(self._expected))

    def _taken(self, digest: Digest) -> "asyncio.Future[memoryview | None] | None":
        if (expected := self._expected.pop(digest, None)) is None:
            return None
        expected.give_back()
        return expected.data

    def _forget(self, digests: Sequence[Digest]) -> None:
        for reading in filter(None, map(self._taken, digests)):
            reading.cancel()

    async def read_in_order(self, digests: Sequence[Digest]) -> AsyncGenerator[deque[memoryview | None], None]:
        """The blobs in their order, all at once that are there: each wake of the event loop waits for the interpreter's
        lock. Whoever takes one takes it out, so that nobody else keeps its bytes.
        """
        left, coming = deque(digests), deque[asyncio.Future[memoryview | None]]()
        try:
            while left or coming:
                while left and len(coming) < _AHEAD:
                    digest = left.popleft()
                    coming.append(self._taken(digest) or asyncio.wrap_future(self.begin(digest).data))
                found = deque([await coming.popleft()])
                while coming and coming[0].done():
                    found.append(coming.popleft().result())
                yield found
        finally:
            for each in coming:
                each.cancel()

    def begin(self, digest: Digest) -> FileReading:
        return FileReading(self._path(digest), digest, self._memory, self._threads)

    def are_cached(self, digests: Sequence[Digest]) -> bool:
        """Whether the page cache has these blobs, or had those that are read ahead; by three of them. True where the
        system does not know. Opens files, which a disk may delay: from any thread but the event loop's.
        """
        return all(map(self._is_cached, {*digests[:1], *digests[len(digests) // 2 :][:1], *digests[-1:]}))

    def _is_cached(self, digest: Digest) -> bool:
        expected = self._expected.get(digest)
        if expected is not None and expected.reading.was_cached is not None:
            return expected.reading.was_cached
        return is_file_cached(self._path(digest), digest.size_bytes)

    def _path(self, digest: Digest) -> Path:
        return blob_place(self._data_dir, self._namespace, digest.hash)


@cache
def _memory() -> BlobMemory:
    return BlobMemory(kept_bytes(machine_bytes()))


@cache
def _threads() -> OrderedThreads:
    return OrderedThreads(_THREADS)
