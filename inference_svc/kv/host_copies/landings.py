"""Rows that are sent ahead to a device, to room that is kept for them, while steps are enqueued and computed.

The room does not count as KV: it belongs to the eighth of the device that `kvasir doctor` leaves free.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import mlx.core as mx

from inference_svc.kv.host_copies.host_copy import (
    Units,
    begin_copies,
    copies_itself,
    device_address,
    to_device,
    wait_for,
)

LANDING_BYTES = 128 << 20  # that are sent at once
_LANDINGS = 3


class Sent(Protocol):
    """Rows that were sent to the device."""

    @property
    def comes_by_itself(self) -> bool:
        """Whether `send` did not wait for it."""

    @property
    def is_there(self) -> bool:
        """Whether `rows` waits for nothing."""

    def rows(self) -> mx.array:
        """The rows, [rows, units]. Waits for them."""

    def release(self, readers: Sequence[mx.array]) -> None:
        """From now on nothing reads the rows but what these arrays are computed from, and that is enqueued. Without
        readers, copies that have not begun are not made. Idempotent.
        """


def send(rows: Sequence[Units]) -> Sent:
    """Send equal rows of uint16 units ahead if this device has room for that, else copy them now."""
    if rows and copies_itself() and (landing := _landings().take(len(rows) * rows[0].size)) is not None:
        return _Coming(_landings(), landing, rows)
    return _Copied(to_device(rows))


def may_send() -> bool:
    """Whether `send` has room for rows that come by themselves; True on a device where none do."""
    return not copies_itself() or _landings().has_room


def make_room() -> None:
    """Give this thread's landings their memory now: a first restore's files would wait for it."""
    if copies_itself():
        for landing in [_landings().take(0) for _ in range(_LANDINGS)]:
            if landing is not None:
                _landings().give_back(landing)


def drop_room() -> None:
    """Free the memory of this thread's landings that are not in use."""
    _landings().drop_free()


@dataclass(frozen=True)
class _Copied:
    """Rows that are there already."""

    array: mx.array
    comes_by_itself: bool = False
    is_there: bool = True

    def rows(self) -> mx.array:
        return self.array

    def release(self, readers: Sequence[mx.array]) -> None:
        """Nothing is kept for them."""


class _Landing:
    """Room on the device for rows, with the copies that are on their way there, and the arrays that read it last."""

    def __init__(self) -> None:
        self.array: mx.array | None = None
        self.address = 0
        self.copies: Sequence[Future[None]] = ()
        self.readers: Sequence[mx.array] = ()

    @property
    def has_all(self) -> bool:
        return all(copy.done() for copy in self.copies)

    def make_ready(self, units: int) -> None:
        """Wait until nobody writes or reads it, and give it memory for so many units. Where a copy had failed, that is
        other memory than before.
        """
        failed = [copy for copy in self.copies if not copy.cancelled() and copy.exception() is not None]
        mx.eval(*self.readers)
        self.copies = self.readers = ()
        if self.array is None or self.array.size < units or failed:
            self.array = None  # before there is another
            self.array = mx.zeros((units,), dtype=mx.uint16)
            self.address = device_address(self.array)
            mx.synchronize()  # other work may still read memory that was free when this array was made


class Landings:
    """A few of them, used in turn: the readers of the one that has been free for longest are done. Each MLX thread has
    its own, because two threads must not evaluate one array.
    """

    def __init__(self) -> None:
        self._free: deque[_Landing] = deque()
        self._all: WeakSet[_Landing] = WeakSet()  # one that is not given back is gone, and may be made again

    @property
    def has_room(self) -> bool:
        return len(self._all) < _LANDINGS or any(landing.has_all for landing in self._free)

    def take(self, units: int) -> _Landing | None:
        """One with room for so many units; None if all are in use, or if the device has no memory for it."""
        landing = self._next()
        if landing is not None:
            with suppress(RuntimeError, MemoryError):
                landing.make_ready(max(units, LANDING_BYTES // 2))
                return landing
        return None

    def give_back(self, landing: _Landing) -> None:
        self._free.append(landing)

    def drop_free(self) -> None:
        self._free.clear()

    def _next(self) -> _Landing | None:
        """One that no copy is on its way to: a free one, else a new one."""
        landing = next((landing for landing in self._free if landing.has_all), None)
        if landing is not None:
            self._free.remove(landing)
        elif len(self._all) < _LANDINGS:
            self._all.add(landing := _Landing())
        return landing


class _Coming:
    """Rows on their way to a landing, which is free again once their readers are known."""

    comes_by_itself = True

    def __init__(self, landings: Landings, landing: _Landing, rows: Sequence[Units]) -> None:
        assert landing.array is not None
        self._landings = landings
        self._landing: _Landing | None = landing
        self._shape = (len(rows), rows[0].size)
        landing.copies = begin_copies(rows, landing.array, landing.address)

    @property
    def is_there(self) -> bool:
        return self._landing is None or self._landing.has_all

    def rows(self) -> mx.array:
        assert self._landing is not None
        assert self._landing.array is not None
        wait_for(self._landing.copies)
        count, units = self._shape
        return self._landing.array[: count * units].reshape(count, units)

    def release(self, readers: Sequence[mx.array]) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            for copy in landing.copies:
                copy.cancel()  # which those that have begun do not do
            landing.readers = readers
            self._landings.give_back(landing)


class _Here(threading.local):
    def __init__(self) -> None:
        self.landings = Landings()


_here = _Here()


def _landings() -> Landings:
    return _here.landings
