"""Memory for blobs that arrive, used again once nobody refers to its bytes: to write into new memory takes twice as
long, and where bytes are copied under the interpreter's lock, everybody waits for that. Memory that is kept comes from
the system untouched: a `bytearray` is filled with zeros under that lock, a new block of 9 MB in 7 ms.
"""

import sys
import threading
from collections.abc import Callable
from mmap import MAP_ANON, MAP_PRIVATE, mmap
from pathlib import Path

_LEAST_BYTES = 1 << 20  # smaller memory is new each time


def _references(known: list[mmap], place: int) -> int:
    return sys.getrefcount(known[place])


_REFERENCES_OF_FREE = _references([mmap(-1, 1)], 0)


class BlobMemory:
    """From any thread. `kept_bytes`: so much of it is remembered at most, whether it is in use or not. `unkept`: makes
    memory beyond that; by default such as the process may have still, where the system gives new pages.
    """

    def __init__(self, kept_bytes: int, unkept: Callable[[int], bytearray | memoryview] = bytearray) -> None:
        self._kept_bytes = kept_bytes
        self._unkept = unkept
        self._gate = threading.Lock()
        self._known: list[mmap] = []

    def take(self, size_bytes: int) -> memoryview:
        """So many bytes of any value. They are the caller's for as long as this view, or one that was made of it,
        lives."""
        if size_bytes < _LEAST_BYTES:
            return memoryview(bytearray(size_bytes))
        with self._gate:
            places = range(len(self._known))
            fitting = (each for each in places if size_bytes <= len(self._known[each]) <= 2 * size_bytes)
            found = next(filter(self._is_free, fitting), None)
            return memoryview(self._made(size_bytes) if found is None else self._known[found])[:size_bytes]

    def make_ready(self, size_bytes: int, most_bytes: int) -> None:
        """Use memory for blobs of this size a first time, at most so much: then the system gives its pages, which takes
        longer than to read a blob into pages that are there (9.4 MB: 3 ms and 1.6). Blocks, without that lock.
        """
        if size_bytes < _LEAST_BYTES:
            return
        blobs = [self.take(size_bytes) for _ in range(min(most_bytes, self._kept_bytes) // size_bytes)]
        with Path("/dev/zero").open("rb", buffering=0) as zeros:
            for blob in blobs:
                zeros.readinto(blob)

    def _made(self, size_bytes: int) -> mmap | bytearray | memoryview:
        if self._room() < size_bytes:  # those of other sizes go
            self._known = [self._known[each] for each in range(len(self._known)) if not self._is_free(each)]
        if self._room() < size_bytes:
            return self._unkept(size_bytes)
        made = mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANON)
        self._known.append(made)
        return made

    def _room(self) -> int:
        return self._kept_bytes - sum(map(len, self._known))

    def _is_free(self, place: int) -> bool:
        """Whether no view refers to it: a view refers to its memory, and every part of a view to that view's."""
        return _references(self._known, place) == _REFERENCES_OF_FREE
