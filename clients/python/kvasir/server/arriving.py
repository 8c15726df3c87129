"""The messages of a call as they arrive: the first in time, each readable, and none without room for it.

A call holds a place while its message does not come. A known caller has places of its own, with a time limit. Strangers
may only call for health and share a few places: a new call ends the call that has waited longest, but only so many a
second, for each end takes time of the event loop. gRPC holds a message from its first byte, before a handler sees it.
So no message is requested without room for the largest one. This module knows nothing of gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from kvasir.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from kvasir.server.shared_room import Place
from kvasir.waits import ANSWER_S, SILENCE_S

# Stands for bytes that are no message of the RPC.
UNREADABLE = object()
# Strangers' calls that wait for their message. A load balancer sends it with the call, within two milliseconds.
# The number is small because each call may hold most of a message of the largest size.
MAX_WAITING_CHECKS = 32
# Strangers' calls that wait to be served or refused, and known callers' that wait to be refused as too many. Of what a
# call sends that nobody has read gRPC holds at most 256 KiB.
MAX_HELD = 1024
# Of these few go on at once and then so many a second. Each takes a millisecond of the event loop, and so do so many
# bytes of a request.
_AT_ONCE, _A_SECOND = 32, 50
_BYTES_OF_ONE = 256 << 10
# A busy event loop makes up for the calls that it let on too late in so much time.
_CATCHES_UP_S = 0.1
# The same of strangers' checks that are the first of their connections. A caller that comes again as soon as its call
# has ended is held up by a slow pace; one that makes new connections comes as often at any pace.
_FIRST_CHECKS, _FIRST_CHECKS_A_SECOND = "\0", 250
_STRANGERS = ("", _FIRST_CHECKS)
# Connections that are remembered because their last check has sent nothing.
_MAX_UNPROVEN = 4096
# Of the time that a caller gives a call: the refusal must still reach it.
_WAITED_PART = 0.8

# Entered while a message arrives, once for each message: waits for its room.
Room = AbstractAsyncContextManager[None]


class Arriving:
    """Passes on a call's messages. Raises DeadlineExceeded (the first is late), InvalidArgument (unreadable)."""

    def __init__(
        self,
        requests: AsyncIterator[Any],
        first_within_s: float,
        room: Room | None = None,
        *,
        bounds_each: bool = False,
        see_first: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`bounds_each`: the time limit holds for every message, not only for the first. `see_first` gets the first."""
        self._requests = requests
        self._first_within_s = first_within_s
        self._bounds_each = bounds_each
        self._room = room or nullcontext()
        self._is_first = True
        self._see_first: Callable[[Any], None] | None = see_first

    def __aiter__(self) -> "Arriving":
        return self

    async def __anext__(self) -> Any:
        request = await self._first() if self._is_first else await self._next()
        if request is UNREADABLE:
            raise _unreadable()
        if self._see_first is not None:
            self._see_first(request)
            self._see_first = None
        return request

    async def _first(self) -> Any:
        self._is_first = self._bounds_each
        async with _within(self._first_within_s):
            return await self._next()

    async def _next(self) -> Any:
        async with self._room:
            return await anext(self._requests)


async def the_only(requests: AsyncIterator[Any]) -> Any:
    """The one request of an RPC without a stream. Raises as Arriving does, and InvalidArgument if there is none."""
    request = await anext(requests, UNREADABLE)
    if request is UNREADABLE:
        raise _unreadable()
    return request


@asynccontextmanager
async def for_a_while(
    place: Place, at_most_s: float, at_least_s: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[None]:
    """Holds a place until the block ends, `at_most_s` seconds at most, and `at_least_s`, which is called at the block's
    end; that does not wait."""
    await place.enter()
    loop = asyncio.get_running_loop()
    began_s, leaving = loop.time(), loop.call_later(at_most_s, place.leave)
    try:
        yield
    finally:
        leaving.cancel()
        if (left_s := began_s + at_least_s() - loop.time()) > 0:
            loop.call_later(left_s, place.leave)
        else:
            place.leave()


@asynccontextmanager
async def begun(
    requests: AsyncIterator[Any], first_within_s: float, arriving: Place, answering: AbstractAsyncContextManager[None]
) -> AsyncIterator[Any]:
    """The one request of a call, which is inside of `answering` when this is entered.

    While it waits for that, it keeps its place of `arriving`. Raises as `the_only` does, and DeadlineExceeded."""
    async with AsyncExitStack() as call:
        async with AsyncExitStack() as way:
            async with _within(first_within_s):
                await way.enter_async_context(arriving)
                request = await the_only(requests)
            await call.enter_async_context(answering)
        yield request


class Turnstile:
    """Lets few calls go on in a second. Belongs to one event loop."""

    def __init__(
        self, a_second: int, *, newest_first: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._a_second = a_second
        self._newest_first = newest_first
        self._clock = clock
        self._next_s = 0.0  # when another may go on
        self._held: dict[asyncio.Future[None], float] = {}  # in the order of arrival; the seconds of each
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    async def passed(self, request_bytes: int = 0, at_most_s: float | None = None) -> None:
        """Return when the call may go on whose request had so many bytes, or after so many seconds."""
        now, takes_s = self._clock(), (1 + request_bytes // _BYTES_OF_ONE) / self._a_second
        self._next_s = max(self._next_s, now - _AT_ONCE / self._a_second)
        if self._next_s <= now and not self._held:
            self._next_s += takes_s
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[place] = takes_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._next_s - now, self._let_next_on)
        try:
            await asyncio.wait((place,), timeout=at_most_s)
        finally:
            self._held.pop(place, None)

    def let_oldest_on(self) -> None:
        self._let_on(next(iter(self._held)))

    def let_all_on(self) -> None:
        for place in list(self._held):
            self._let_on(place)

    def _let_next_on(self) -> None:
        self._timer = None
        if self._held:
            takes_s = self._let_on(next(reversed(self._held) if self._newest_first else iter(self._held)))
            now = self._clock()
            self._next_s = max(self._next_s, now - _CATCHES_UP_S) + takes_s
            self._timer = asyncio.get_running_loop().call_later(max(self._next_s - now, 0), self._let_next_on)

    def _let_on(self, place: asyncio.Future[None]) -> float:
        place.set_result(None)
        return self._held.pop(place)


class Turnstiles(dict[str, Turnstile]):
    """By namespace, in the order of arrival; strangers have two, the newest call first: it may be a load balancer's,
    which soon gives up. Of more than `MAX_HELD` the oldest one of the largest crowd goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False

    def __missing__(self, namespace: str) -> Turnstile:
        a_second = _FIRST_CHECKS_A_SECOND if namespace == _FIRST_CHECKS else _A_SECOND
        return self.setdefault(namespace, Turnstile(a_second, newest_first=namespace in _STRANGERS))

    async def passed(self, namespace: str, request_bytes: int = 0, left_s: float | None = None) -> None:
        """Return when the call may go on whose caller has `left_s` seconds of patience; None: more than is used."""
        if self._is_open:
            return
        while sum(map(len, self.values())) >= MAX_HELD:
            max(self.values(), key=len).let_oldest_on()
        at_most_s = SILENCE_S if left_s is None else min(_WAITED_PART * left_s, SILENCE_S)
        await self[namespace].passed(request_bytes, at_most_s)

    def open(self) -> None:
        """From now on nobody waits here: the service ends."""
        self._is_open = True
        for turnstile in self.values():
            turnstile.let_all_on()


class Doorstep:
    """Where strangers' calls wait for their message. Belongs to one event loop.

    A call that was begun to be read cannot be set aside, only ended. So a crowd of silent calls is read as fast as its
    calls are ended. The crowd of a connection that has sent nothing so far waits apart from other connections."""

    def __init__(self, turnstiles: Turnstiles) -> None:
        self._turnstiles = turnstiles
        # In the order of arrival.
        self._waiting: dict[asyncio.Task[Any], None] = {}
        self._unproven: dict[str, None] = {}  # connections, the one that came last at the end

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def entered(self, connection: str) -> AsyncIterator[None]:
        """A call may be read, in a block that has no error if it sent its message. `connection`: its peer, as gRPC
        names it. The peers of a Unix socket have one name, and are one to this class."""
        is_first = connection not in self._unproven
        self._unproven[connection] = None
        if len(self._unproven) > _MAX_UNPROVEN:
            del self._unproven[next(iter(self._unproven))]
        if len(self._waiting) >= MAX_WAITING_CHECKS:
            await self._turnstiles.passed(_FIRST_CHECKS if is_first else "")
        yield
        self._unproven.pop(connection, None)

    @asynccontextmanager
    async def begun(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The one request, for a block that ends at once. Raises as this class's `the_only` does."""
        yield await self.the_only(requests)

    async def the_only(self, requests: AsyncIterator[Any]) -> Any:
        """The one request. Raises as `the_only` does, and ResourceExhausted if too many other calls came meanwhile."""
        reading = asyncio.ensure_future(the_only(Arriving(requests, ANSWER_S)))
        self._waiting[reading] = None
        if len(self._waiting) > MAX_WAITING_CHECKS:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.cancel()
        try:
            await asyncio.wait((reading,))
            if reading.cancelled():
                raise ResourceExhausted("other calls came while this one sent nothing", reason="FIRST_MESSAGE_LATE")
            return reading.result()
        finally:
            self._waiting.pop(reading, None)
            reading.cancel()


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"no message came within {seconds:g} s", reason="FIRST_MESSAGE_LATE") from None


def _unreadable() -> InvalidArgument:
    return InvalidArgument.of("request", "not a message of this RPC; every text must be UTF-8", reason="UNREADABLE")
