"""The bounded buffer between a turn and its reader.

A slow reader never stops a turn and never makes it pile up messages: deltas that were not taken yet become one, and of
progress only the newest is kept. So what waits is at most one message of each kind, and no longer than the reply.
"""

import asyncio
from collections.abc import AsyncIterator

from inference_svc.service_data import TurnDelta, TurnEvent, TurnProgress


class Outbox:
    """Events in order, for one reader, on one event loop."""

    def __init__(self) -> None:
        self._events: list[TurnEvent] = []
        self._arrived = asyncio.Event()
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, event: TurnEvent) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, TurnDelta) and isinstance(last, TurnDelta):
            self._events[-1] = TurnDelta(last.text + event.text, last.token_ids + event.token_ids)
        elif isinstance(event, TurnProgress) and isinstance(last, TurnProgress):
            self._events[-1] = event
        else:
            self._events.append(event)
        self._arrived.set()

    def close(self, error: BaseException | None = None) -> None:
        """No more events; the reader ends with `error` if there is one, after what was put before."""
        self._is_closed, self._error = True, error
        self._arrived.set()

    async def events(self) -> AsyncIterator[TurnEvent]:
        """What was put, until close."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._events:
                yield self._events.pop(0)
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return
