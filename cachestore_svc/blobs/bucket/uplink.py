"""How many bytes are on their way to a bucket at once: as many as it has taken within a few seconds lately. On a slow
uplink the bytes of all share it: with many beside each other no object would come within the time of its request."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvasir.server.fair_shares import RoundRobin, Shares
from kvasir.waits import HANGS_S, PATIENCE_S, SOON_S

LEAST_AT_ONCE_BYTES = 16 << 20  # on a link of 1 MB/s these come within a third of HANGS_S
_SMALL_BYTES = 64 << 10  # such an object waits for no other: it may be an owner's mark, which must not be late
_SAMPLE_BYTES = 1 << 20  # the time of a smaller object is the server's, not the link's
_MOVES_NOTHING_S = HANGS_S / 2  # an object that hangs keeps others no longer


@dataclass(slots=True, eq=False)
class _Object:
    size_bytes: int
    goes: bool = False
    moved_s: float = 0.0  # when it went, or a part of it was taken


class Uplink:
    """Objects wait for the bytes that go at once; namespaces take turns. From any thread. `steady`: seconds that nobody
    sets."""

    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._changed = threading.Condition()
        self._shares = Shares(LEAST_AT_ONCE_BYTES)
        self._waiting: RoundRobin[_Object] = RoundRobin()
        self._going: dict[_Object, str] = {}  # with the folder of each
        self._taken_bytes = 0  # of all that ended well

    @property
    def at_once_bytes(self) -> int:
        return self._shares.total

    @contextmanager
    def sending(self, folder: str, size_bytes: int, at_once_bytes: int) -> Iterator[Callable[[], None]]:
        """Wait until so many bytes of an object may go at once. The block reports each part that was taken."""
        each = _Object(at_once_bytes)
        if at_once_bytes > _SMALL_BYTES:
            self._wait(folder, each)
        began_s, before = self._steady(), self._taken_bytes

        def moved() -> None:
            each.moved_s = self._steady()

        try:
            yield moved
        except BaseException:
            self._end(each, self.at_once_bytes if self._steady() - began_s < PATIENCE_S else LEAST_AT_ONCE_BYTES)
            raise
        took_s = max(self._steady() - began_s, 1e-6)
        with self._changed:
            self._taken_bytes += size_bytes
            lately = (self._taken_bytes - before) / took_s * PATIENCE_S
        self._end(each, max(int(lately), LEAST_AT_ONCE_BYTES) if size_bytes >= _SAMPLE_BYTES else self.at_once_bytes)

    def _wait(self, folder: str, each: _Object) -> None:
        with self._changed:
            self._waiting.put(folder, each)
            self._let_on()
            while not each.goes:
                self._changed.wait(SOON_S)
                self._let_on()  # beside an object that hangs nothing else changes

    def _end(self, each: _Object, at_once_bytes: int) -> None:
        with self._changed:
            self._shares.total = at_once_bytes
            self._give_back(each)
            self._let_on()

    def _let_on(self) -> None:
        now = self._steady()
        for each in [each for each in self._going if each.moved_s < now - _MOVES_NOTHING_S]:
            self._give_back(each)
        while taken := self._next():
            folder, each = taken
            self._shares.hold(folder, each.size_bytes)
            self._going[each] = folder
            each.goes, each.moved_s = True, now
        self._changed.notify_all()

    def _next(self) -> tuple[str, _Object] | None:
        """Nobody passes a namespace of which nothing goes: small objects of others would keep a large one for ever."""
        for folder, first in self._waiting.firsts():
            if not self._going or self._shares.has_room(folder, first.size_bytes):
                return self._waiting.take(lambda _, each, next_=first: each is next_)  # type: ignore[misc]
            if not self._shares.held(folder):
                return None
        return None

    def _give_back(self, each: _Object) -> None:
        if (folder := self._going.pop(each, None)) is not None:
            self._shares.give_back(folder, each.size_bytes)
