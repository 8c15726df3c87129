"""Holds conversations back before a phase until all are there and no turn is in flight; then something happens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager


class PhaseGate:
    """A gate before each of the phases `stops`, for conversations 0 to `count` - 1. `act` runs at each, once."""

    def __init__(self, count: int, stops: Sequence[int], act: Callable[[], Awaitable[None]]) -> None:
        self._under_way = set(range(count))
        self._stops, self._act = list(stops), act
        self._held: set[int] = set()
        self._in_flight = 0
        self._acting: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def turn(self, conversation: int, phase: int) -> AsyncIterator[None]:
        """Around a turn: it waits for its phase. Raises what `act` raised."""
        while self._acting or (self._stops and phase >= self._stops[0]):
            if self._stops and phase >= self._stops[0]:
                self._held.add(conversation)
                self._act_if_quiet()
            await self._opened.wait()
            if self._failure:
                raise self._failure
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._act_if_quiet()

    def end(self, conversation: int) -> None:
        """A conversation has ended: nobody waits for it."""
        self._under_way.discard(conversation)
        self._act_if_quiet()

    def _act_if_quiet(self) -> None:
        is_due = self._held and self._held >= self._under_way
        if self._stops and is_due and not self._in_flight and not self._acting:
            self._acting = asyncio.create_task(self._act_and_open())

    async def _act_and_open(self) -> None:
        try:
            await self._act()
        except Exception as failure:  # noqa: BLE001  whoever waits raises it
            self._failure = failure
            self._opened.set()
            return
        self._stops.pop(0)
        self._held.clear()
        self._acting = None
        self._opened.set()
        self._opened = asyncio.Event()
