"""Bytes that may be held at once, given out in the order of asking.

One holder may take more than all if it is alone: what is larger than the limit goes through by itself, not never.
"""

import asyncio
from collections import deque


class HeldBytes:
    """On one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def fits(self, size_bytes: int) -> bool:
        """Whether nobody would have to wait for it."""
        return not self._waiting and self._has_room(size_bytes)

    def take(self, size_bytes: int) -> None:
        """Without asking: for who found that it fits, or has the bytes already."""
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._grant()

    async def wait_for(self, size_bytes: int) -> None:
        """Take the bytes as soon as they fit. A cancel takes nothing."""
        if self.fits(size_bytes):
            self.take(size_bytes)
            return
        place = (size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
                self._grant()  # a smaller one behind it may fit
            else:
                self.give_back(size_bytes)
            raise

    def _has_room(self, size_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + size_bytes <= self.max_bytes

    def _grant(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size_bytes, granted = self._waiting.popleft()
            self.take(size_bytes)
            if not granted.done():
                granted.set_result(None)
