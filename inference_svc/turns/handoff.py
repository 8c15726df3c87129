"""Hands events from the MLX thread to the event loop: one wake-up for all events of a step.

A wake-up costs more than a token. With many turns in a batch, one wake-up for each would be most of the work.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from threading import Lock

from inference_svc.engine.api import Event

Deliver = Callable[[list[Event]], None]


class HandOff:
    """Carries lists of events to their turns. `send` may be called from any thread; delivery is on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Deliver, list[Event]]] = deque()
        self._lock = Lock()
        self._is_scheduled = False

    def send(self, deliver: Deliver, events: list[Event]) -> None:
        with self._lock:
            self._waiting.append((deliver, events))
            if self._is_scheduled or self._loop.is_closed():
                return
            self._is_scheduled = True
        self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            batch = list(self._waiting)
            self._waiting.clear()
            self._is_scheduled = False
        for deliver, events in batch:
            deliver(events)
