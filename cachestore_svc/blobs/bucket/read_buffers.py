"""Memory for objects that are read, used again once nobody refers to its bytes: to write into new memory takes twice
as long, and under the interpreter's lock, which all reads share."""

import threading
from collections import deque

_LEAST_BYTES = 1 << 20  # smaller ones are new each time
_KEPT_BYTES = 64 << 20  # of all that are remembered, taken or free


class ReadBuffers:
    """From any thread. The memory that was taken longest ago is forgotten where there is more than
    `kept_bytes`."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._left_bytes = kept_bytes
        self._gate = threading.Lock()
        self._known = deque[bytearray]()

    def take(self, size_bytes: int) -> memoryview:
        """So many bytes of any value. They are the caller's for as long as this view, or one that was made of it,
        lives."""
        if size_bytes < _LEAST_BYTES:
            return memoryview(bytearray(size_bytes))
        with self._gate:
            return memoryview(self._found(size_bytes) or self._made(size_bytes))[:size_bytes]

    def _found(self, size_bytes: int) -> bytearray | None:
        for place, each in enumerate(self._known):
            if size_bytes <= len(each) <= 2 * size_bytes and _is_free(each):
                del self._known[place]
                self._known.append(each)
                return each
        return None

    def _made(self, size_bytes: int) -> bytearray:
        made = bytearray(size_bytes)
        self._known.append(made)
        self._left_bytes -= size_bytes
        while self._left_bytes < 0:
            self._left_bytes += len(self._known.popleft())
        return made


def _is_free(buffer: bytearray) -> bool:
    """Whether no view refers to it: then alone its size may change."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
