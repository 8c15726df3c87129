"""The messages of a call as they arrive: the first within a time, each one readable, none without room for it.

A call whose message does not come holds a place. That of a known caller is its own, and ends after a while; that of a
stranger, who may only ask for health, is one of a few, and the one that has waited longest makes room for the next.
What has come of a message is held from its first byte, before anybody sees it: so no message is asked for without room
for the largest. Knows nothing of gRPC.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from kvasir.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted

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
        try:
            async with asyncio.timeout(self._first_within_s):
                return await self._next()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message came within {self._first_within_s:g} s", reason="FIRST_MESSAGE_LATE"
            ) from None

    async def _next(self) -> Any:
        async with self._room:
            return await anext(self._requests)


async def the_only(requests: AsyncIterator[Any]) -> Any:
    """The one request of an RPC without a stream. Raises as Arriving does, and InvalidArgument when there is none."""
    request = await anext(requests, UNREADABLE)
    if request is UNREADABLE:
        raise _unreadable()
    return request


class Doorstep:
    """Where calls of strangers wait for their message. On one event loop."""

    def __init__(self) -> None:
        # In the order in which they came.
        self._waiting: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

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


def _unreadable() -> InvalidArgument:
    return InvalidArgument(
        "request: not a message of this RPC; every text must be UTF-8", reason="UNREADABLE", field="request"
    )
