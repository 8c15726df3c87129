"""Bytes, or other units, that may be held at once, and for which namespaces wait in turn. On one event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from kvasir.server.fair_shares import GENEROSITY, RoundRobin, Shares

# So many others may go first while somebody waits for much; then all others wait for it.
_MAX_OVERTAKEN = 16


@dataclass(eq=False)
class _Waiter:
    """Somebody who waits."""

    units: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    overtaken: int = 0


class SharedRoom:
    """Room for `max_units`, divided by `Shares`, given to those who wait by `RoundRobin`.

    One holder may take more than all if it is alone: what is larger than the limit goes through by itself, not never.
    Who waits for much is overtaken by others who want little, but not for ever.
    """

    def __init__(self, max_units: int, generosity: float = GENEROSITY) -> None:
        self._shares = Shares(max_units, generosity)
        self._waiting: RoundRobin[_Waiter] = RoundRobin()
        # Holders that give up what they hold when another may use it: see wanted_from().
        self._watching: list[tuple[str, asyncio.Future[None]]] = []

    @property
    def max_units(self) -> int:
        return self._shares.total

    @property
    def held_units(self) -> int:
        return self._shares.held_by_all

    def held(self, namespace: str) -> int:
        return self._shares.held(namespace)

    @property
    def is_wanted(self) -> bool:
        """Somebody waits."""
        return len(self._waiting) > 0

    def fits(self, namespace: str, units: int) -> bool:
        """Whether the namespace would not have to wait for it: there is room, and none of its own waits before it."""
        return not self._waiting.waiting(namespace) and self._has_room(namespace, units)

    def take(self, namespace: str, units: int) -> None:
        """Without asking: for who found that it fits, or has the units already."""
        self._shares.hold(namespace, units)

    def take_if_fits(self, namespace: str, units: int) -> bool:
        """Take the units if nothing keeps the namespace waiting for them."""
        if not self.fits(namespace, units):
            return False
        self.take(namespace, units)
        self._count_overtaken()
        return True

    def give_back(self, namespace: str, units: int) -> None:
        self._shares.give_back(namespace, units)
        self._grant()

    async def wait_for(self, namespace: str, units: int) -> None:
        """Take the units as soon as they fit. A cancel takes nothing."""
        if self.take_if_fits(namespace, units):
            return
        place = _Waiter(units)
        self._waiting.put(namespace, place)
        self._tell_watchers()
        try:
            await place.granted
        except asyncio.CancelledError:
            if self._waiting.remove(namespace, place):
                self._grant()  # a smaller one behind it may fit
            else:
                self.give_back(namespace, units)
            raise

    async def wanted_from(self, namespace: str) -> None:
        """Return when a namespace waits that holds no more than this one: what is given up may then be of use to it.

        One that waits only because it has taken most of the room takes nothing from those that have less.
        """
        watch: tuple[str, asyncio.Future[None]] = (namespace, asyncio.get_running_loop().create_future())
        self._watching.append(watch)
        try:
            self._tell_watchers()
            await watch[1]
        finally:
            self._watching.remove(watch)

    @asynccontextmanager
    async def held_for(self, namespace: str, units: int) -> AsyncIterator[None]:
        """Wait for the units, and hold them for the block."""
        await self.wait_for(namespace, units)
        try:
            yield
        finally:
            self.give_back(namespace, units)

    def _has_room(self, namespace: str, units: int) -> bool:
        overdue = next((name for name, place in self._waiting.firsts() if self._is_overdue(name, place)), namespace)
        if overdue != namespace:
            return False
        return not self._shares.held_by_all or self._shares.has_room(namespace, units)

    def _is_overdue(self, namespace: str, place: _Waiter) -> bool:
        # Who holds units waits for its own to come back: for that nobody else stands still.
        return place.overtaken >= _MAX_OVERTAKEN and not self.held(namespace)

    def _count_overtaken(self) -> None:
        for _, place in self._waiting.firsts():
            place.overtaken += 1

    def _tell_watchers(self) -> None:
        least = min((self.held(each) for each, _ in self._waiting.firsts()), default=None)
        for namespace, future in self._watching:
            if least is not None and least <= self.held(namespace) and not future.done():
                future.set_result(None)

    def _grant(self) -> None:
        while granted := self._waiting.take(lambda namespace, place: self._has_room(namespace, place.units)):
            namespace, place = granted
            self.take(namespace, place.units)
            self._count_overtaken()
            if not place.granted.done():
                place.granted.set_result(None)


class Place(AbstractAsyncContextManager[None]):
    """One unit of each of several rooms, waited for in their order and held while it is entered; entered as often as
    one likes, but not twice at once.
    """

    def __init__(self, *rooms: tuple[SharedRoom, str]) -> None:
        """Rooms, and who holds the unit there."""
        self._rooms = rooms
        self._entered = 0

    async def __aenter__(self) -> None:
        await self.enter()

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    async def enter(self) -> None:
        try:
            for room, holder in self._rooms:
                await room.wait_for(holder, 1)
                self._entered += 1
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Whoever is not in it leaves nothing."""
        for room, holder in self._rooms[: self._entered]:
            room.give_back(holder, 1)
        self._entered = 0
