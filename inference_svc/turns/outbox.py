"""The bounded buffer between a turn and its reader.

A slow reader never stops a turn and never piles up messages: unread deltas become one, and only the newest progress
event is kept. A reader that leaves too much unread, or takes no event for too long, is overrun: its turn is ended, and
the turn's room is free for others.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from inference_svc.turns.turn_data import TurnDelta, TurnEvent, TurnProgress

# Cost of a token besides its text: its id, and its place in a message.
_TOKEN_BYTES = 8
# A log probability: a pair of a number and a float, and its place. Twenty of them for each token are most of a reply.
_LOGPROB_BYTES = 116


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """How many bytes of a turn its reader may leave unread, and for how long it may take nothing."""

    max_unread_bytes: int
    stall_s: float


class Outbox:
    """Events in order, for one reader, on one event loop."""

    def __init__(self, limits: ReaderLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._events: deque[TurnEvent] = deque()
        self._deltas: list[TurnDelta] = []  # the newest events; they become one message when the reader takes them
        self._unread_bytes = 0
        self._busy_since: float | None = None  # since then the reader holds an event
        self._arrived = asyncio.Event()
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, event: TurnEvent) -> None:
        if isinstance(event, TurnDelta):
            self._deltas.append(event)
            self._unread_bytes += _size(event)
        else:
            self._close_delta()
            if isinstance(event, TurnProgress) and self._events and isinstance(self._events[-1], TurnProgress):
                self._events.pop()
            self._events.append(event)
        self._arrived.set()

    @property
    def overrun(self) -> str:
        """Why the reader has fallen too far behind; empty while it has not."""
        limits, idle_s = self._limits, 0.0 if self._busy_since is None else self._clock() - self._busy_since
        if self._unread_bytes > limits.max_unread_bytes:
            return f"{self._unread_bytes} bytes of the reply are unread, at most {limits.max_unread_bytes} may be"
        if idle_s > limits.stall_s:
            return f"nothing was taken for {idle_s:.0f} s, at most {limits.stall_s:.0f} s may pass"
        return ""

    def close(self, error: BaseException | None = None) -> None:
        """No more events. After the events that were put before, the reader ends, with `error` if there is one."""
        self._is_closed, self._error = True, error
        self._arrived.set()

    async def events(self) -> AsyncIterator[TurnEvent]:
        """The events in order, until `close`."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while (event := self._take()) is not None:
                self._busy_since = self._clock()
                yield event
                self._busy_since = None
                self._unread_bytes -= _size(event)
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return

    def _take(self) -> TurnEvent | None:
        if not self._events:
            self._close_delta()
        return self._events.popleft() if self._events else None

    def _close_delta(self) -> None:
        if self._deltas:
            self._events.append(_merged(self._deltas))
            self._deltas = []


def _merged(deltas: Sequence[TurnDelta]) -> TurnDelta:
    """One delta with the content of all."""
    return TurnDelta(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        "".join(delta.reasoning for delta in deltas),
        tuple(each for delta in deltas for each in delta.logprobs),
    )


def _size(event: TurnEvent) -> int:
    """Bytes of the reply in an event. Other events are few and small, and count as 0."""
    if not isinstance(event, TurnDelta):
        return 0
    text_bytes = len((event.text + event.reasoning).encode("utf-8", "surrogatepass"))
    logprobs = sum(1 + len(each.top) for each in event.logprobs)
    return text_bytes + _TOKEN_BYTES * len(event.token_ids) + _LOGPROB_BYTES * logprobs
