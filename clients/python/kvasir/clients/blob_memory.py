"""Memory for blobs that arrive, used again once nobody refers to its bytes: to write into new memory takes twice as
long, and where bytes are copied under the interpreter's lock, everybody waits for that."""

import threading

_LEAST_BYTES = 1 << 20  # smaller memory is new each time


class BlobMemory:
    """From any thread. `kept_bytes`: so much of it is remembered at most, whether it is in use or not."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._gate = threading.Lock()
        self._known: list[bytearray] = []

    def take(self, size_bytes: int) -> memoryview:
        """So many bytes of any value. They are the caller's for as long as this view, or one that was made of it,
        lives."""
        if size_bytes < _LEAST_BYTES:
            return memoryview(bytearray(size_bytes))
        with self._gate:
            fitting = (each for each in self._known if size_bytes <= len(each) <= 2 * size_bytes and _is_free(each))
            found = next(fitting, None)
            if found is None:
                found = self._made(size_bytes)
            return memoryview(found)[:size_bytes]

    def _made(self, size_bytes: int) -> bytearray:
        made = bytearray(size_bytes)
        if self._room() < size_bytes:
            self._known = [each for each in self._known if not _is_free(each)]  # of other sizes
        if self._room() >= size_bytes:
            self._known.append(made)
        return made

    def _room(self) -> int:
        return self._kept_bytes - sum(map(len, self._known))


def _is_free(buffer: bytearray) -> bool:
    """Whether no view refers to it: only then may its size change."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
