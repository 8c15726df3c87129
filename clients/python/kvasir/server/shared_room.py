"""A limited number of units (bytes, places) for which namespaces wait in turn. Belongs to one event loop."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from kvasir.server.fair_shares import GENEROSITY, RoundRobin, Shares
from kvasir.waits import PATIENCE_S

# A waiter for many units may be overtaken this often; after that, all others wait for it.
_MAX_OVERTAKEN = 16


_is_upkeep: ContextVar[bool] = ContextVar("kvasir_is_upkeep", default=False)


def is_only_upkeep() -> None:
    """The call under way is made by a program for itself, as an idle engine renews its leases: nobody waits for it, so
    it does not show that its namespace is here."""
    _is_upkeep.set(True)


@dataclass(eq=False)
class _Waiter:
    units: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    overtaken: int = 0


class SharedRoom:
    """Room for `max_units`, divided by `Shares`, in the order of `RoundRobin`. A holder alone may take more than all.
    Small requests overtake a waiting large one, at most `_MAX_OVERTAKEN` times."""

    def __init__(self, max_units: int, generosity: float = GENEROSITY) -> None:
        self._shares = Shares(max_units, generosity)
        self._waiting: RoundRobin[_Waiter] = RoundRobin()
        # Holders that give up their units when another namespace may use them: see wanted_from().
        self._watching: list[tuple[str, asyncio.Future[None]]] = []

    @property
    def max_units(self) -> int:
        return self._shares.total

    @property
    def held_units(self) -> int:
        return self._shares.held_by_all

    def held(self, namespace: str) -> int:
        return self._shares.held(namespace)

    def take(self, namespace: str, units: int) -> None:
        """Take units without asking: the caller found that they fit, or has them already."""
        self._shares.hold(namespace, units)

    def take_if_fits(self, namespace: str, units: int) -> bool:
        """Take the units, and return True, if there is room and none of the namespace's own requests waits."""
        if self._waiting.waiting(namespace) or not self._has_room(namespace, units):
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
        self._notify_watchers()
        try:
            await place.granted
        except asyncio.CancelledError:
            if self._waiting.remove(namespace, place):
                self._grant()  # a smaller request behind it may fit
            else:
                self.give_back(namespace, units)
            raise

    async def wanted_from(self, namespace: str) -> None:
        """Return when a namespace waits that holds no more than this one, which may use the units that this one gives
        up."""
        watch: tuple[str, asyncio.Future[None]] = (namespace, asyncio.get_running_loop().create_future())
        self._watching.append(watch)
        try:
            self._notify_watchers()
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
        # A namespace that holds units waits for its own units to come back: others need not wait for that.
        return place.overtaken >= _MAX_OVERTAKEN and not self.held(namespace)

    def _count_overtaken(self) -> None:
        for _, place in self._waiting.firsts():
            place.overtaken += 1

    def _notify_watchers(self) -> None:
        least = min((self.held(each) for each, _ in self._waiting.firsts()), default=None)
        for namespace, future in self._watching:
            if least is not None and least <= self.held(namespace) and not future.done():
                future.set_result(None)

    def _grant(self) -> None:
        while granted := self._waiting.take(lambda namespace, place: self._has_room(namespace, place.units)):
            namespace, place = granted
            self._shares.hold(namespace, place.units)
            self._count_overtaken()
            if not place.granted.done():
                place.granted.set_result(None)


class ModestRoom(SharedRoom):
    """Room of which a namespace gets `beside` units at most while a caller of another was here in the last seconds: the
    work of more units, here or in a service behind this one, would come before that caller's. Units that are excused do
    not count among these."""

    def __init__(
        self,
        max_units: int,
        beside: int,
        generosity: float = GENEROSITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_units, generosity)
        self._beside = beside
        self._clock = clock
        # When namespaces were here, the newest last; no strangers, whose health checks limit nobody.
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._excused: Counter[str] = Counter()

    def take(self, namespace: str, units: int) -> None:
        super().take(namespace, units)
        self._note(namespace)

    async def wait_for(self, namespace: str, units: int) -> None:
        self._note(namespace)  # here, as units are granted while another's call is under way
        await super().wait_for(namespace, units)

    def give_back(self, namespace: str, units: int) -> None:
        self._note(namespace)
        super().give_back(namespace, units)

    def is_alone(self, namespace: str) -> bool:
        """Whether no caller of another namespace was here in the last seconds."""
        newest = next((seen for name, seen in reversed(self._seen.items()) if name != namespace), None)
        return newest is None or self._is_old(newest)

    def excuse(self, namespace: str, units: int) -> None:
        """Of units that are held: their holder waits for something else than others' work."""
        self._excused[namespace] += units
        self._grant()

    def give_back_excused(self, namespace: str, units: int) -> None:
        self._excused[namespace] -= units
        if not self._excused[namespace]:
            del self._excused[namespace]
        self.give_back(namespace, units)

    def _note(self, namespace: str) -> None:
        if not namespace or _is_upkeep.get():
            return
        self._seen[namespace] = self._clock()
        self._seen.move_to_end(namespace)
        while self._is_old(next(iter(self._seen.values()))):
            self._seen.popitem(last=False)

    def _is_old(self, seen: float) -> bool:
        return seen <= self._clock() - PATIENCE_S

    def _has_room(self, namespace: str, units: int) -> bool:
        counted = self.held(namespace) - self._excused[namespace]
        is_modest = self.is_alone(namespace) or not counted or counted + units <= self._beside
        return is_modest and super()._has_room(namespace, units)


class Place(AbstractAsyncContextManager[None]):
    """One unit of each of several rooms, from enter() to leave(); it may be entered again, not twice at once."""

    def __init__(self, *rooms: tuple[SharedRoom, str]) -> None:
        """The rooms, each with the name of the unit's holder there."""
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
        """Give the units back. Does nothing if none are held."""
        for room, holder in self._rooms[: self._entered]:
            room.give_back(holder, 1)
        self._entered = 0
