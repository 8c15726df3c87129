"""The messages of a call as they arrive: the first within a time, each one readable, none without room for it.

A call whose message does not come holds a place. That of a known caller is its own, and ends after a while; that of a
stranger, who may only ask for health, is one of a few, and the one that has waited longest makes room for the next.
What has come of a message is held from its first byte, before anybody sees it: so no message is asked for without room
for the largest. Knows nothing of gRPC.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from kvasir.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from kvasir.server.shared_room import Place

# Stands for what is no message of the RPC.
UNREADABLE = object()
# Strangers' calls that wait for their message. A load balancer's comes with the call, within a millisecond or two.
# Few, because each may send most of a message that is as large as the service takes.
MAX_WAITING_CHECKS = 32
CHECK_MESSAGE_S = 5.0

# Entered while a message arrives, again for each: waits for room for it.
Room = AbstractAsyncContextManager[None]


class Arriving:
    """The same messages. Raises DeadlineExceeded when the first is late, InvalidArgument for one that is unreadable."""

    def __init__(
        self,
        requests: AsyncIterator[Any],
        first_within_s: float,
        room: Room | None = None,
        *,
        bounds_each: bool = False,
    ) -> None:
        """`bounds_each`: the time is also that of every message after the first."""
        self._requests = requests
        self._first_within_s = first_within_s
        self._bounds_each = bounds_each
        self._room = room or nullcontext()
        self._is_first = True

    def __aiter__(self) -> "Arriving":
        return self

    async def __anext__(self) -> Any:
        request = await self._first() if self._is_first else await self._next()
        if request is UNREADABLE:
            raise _unreadable()
        return request

    async def _first(self) -> Any:
        self._is_first = self._bounds_each
        async with _within(self._first_within_s):
            return await self._next()

    async def _next(self) -> Any:
        async with self._room:
            return await anext(self._requests)


async def the_only(requests: AsyncIterator[Any]) -> Any:
    """The one request of an RPC without a stream. Raises as Arriving does, and InvalidArgument when there is none."""
    request = await anext(requests, UNREADABLE)
    if request is UNREADABLE:
        raise _unreadable()
    return request


@asynccontextmanager
async def begun(
    requests: AsyncIterator[Any], first_within_s: float, arriving: Place, answering: Place, at_most_s: float
) -> AsyncIterator[Any]:
    """The one request of a call, and a place among those that are answered until the block ends, at most for
    `at_most_s` seconds. While it waits for that, it keeps the room of a message on its way. Raises as `the_only` does,
    and DeadlineExceeded.
    """
    async with AsyncExitStack() as way:
        async with _within(first_within_s):
            await way.enter_async_context(arriving)
            request = await the_only(requests)
        await answering.enter()
    leaving = asyncio.get_running_loop().call_later(at_most_s, answering.leave)
    try:
        yield request
    finally:
        leaving.cancel()
        answering.leave()


class Doorstep:
    """Where calls of strangers wait for their message. On one event loop."""

    def __init__(self) -> None:
        # In the order in which they came.
        self._waiting: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def begun(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The one request, for a block that ends at once. Raises as `the_only` of this."""
        yield await self.the_only(requests)

    async def the_only(self, requests: AsyncIterator[Any]) -> Any:
        """The one request. Raises as `the_only` does, and ResourceExhausted when too many others came since."""
        reading = asyncio.ensure_future(the_only(Arriving(requests, CHECK_MESSAGE_S)))
        self._waiting[reading] = None
        if len(self._waiting) > MAX_WAITING_CHECKS:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.cancel()
        try:
            await asyncio.wait((reading,))
            if reading.cancelled():
                raise ResourceExhausted("others came while this call sent nothing", reason="FIRST_MESSAGE_LATE")
            return reading.result()
        finally:
            self._waiting.pop(reading, None)
            reading.cancel()


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"no message came within {seconds:g} s", reason="FIRST_MESSAGE_LATE") from None


def _unreadable() -> InvalidArgument:
    return InvalidArgument(
        "request: not a message of this RPC; every text must be UTF-8", reason="UNREADABLE", field="request"
    )
