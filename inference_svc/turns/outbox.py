"""The one bounded buffer of a request: its turns put their events in, each under its choice, and one reader takes them.

A slow reader never stops a turn and never piles up messages: unread deltas of a choice become one, and only its newest
progress event is kept. A reader that leaves too much unread, or takes no event for too long, is overrun: its turns are
ended, and their room is free for others. The first failure is the end of the stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from inference_svc.engine.api import Prefilled
from inference_svc.turns.turn_data import TurnDelta, TurnEvent, TurnStarted

# Cost of a token besides its text: its id, and its place in a message.
_TOKEN_BYTES = 8
# A log probability: a pair of a number and a float, and its place. Twenty of them for each token are most of a reply.
_LOGPROB_BYTES = 116


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """How many bytes of its replies a reader may leave unread, and for how long it may take nothing."""

    max_unread_bytes: int
    stall_s: float


@dataclass(eq=False, slots=True)
class _Message:
    """What the reader takes at once: deltas of one choice that become one, or a single event of another kind."""

    choice: int
    events: list[TurnEvent]


class Outbox:
    """Events of each choice in order, for one reader, on one event loop."""

    def __init__(self, limits: ReaderLimits, clock: Callable[[], float], choices: int = 1) -> None:
        self._limits = limits
        self._clock = clock
        self._open = choices
        self._unread: deque[_Message] = deque()
        self._newest: dict[int, _Message] = {}  # by choice: the last message, while it is unread
        self._begun_first: int | None = None  # only this choice's beginning and progress are reported
        self._unread_bytes = 0
        self._busy_since: float | None = None  # since then the reader holds an event
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None

    def put(self, event: TurnEvent, choice: int = 0) -> None:
        if self._error is not None or not self._is_reported(event, choice):
            return
        newest = self._newest.get(choice)
        if newest is not None and isinstance(event, Prefilled) and isinstance(newest.events[0], Prefilled):
            newest.events = [event]
        elif newest is not None and isinstance(event, TurnDelta) and isinstance(newest.events[0], TurnDelta):
            newest.events.append(event)
        else:
            self._newest[choice] = message = _Message(choice, [event])
            self._unread.append(message)
        self._unread_bytes += _size(event)
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
        """A choice has no more events. After those that were put before, the reader ends: with the first `error`, or
        when all choices are closed.
        """
        self._open -= 1
        self._error = self._error or error
        self._arrived.set()

    async def events(self) -> AsyncIterator[tuple[int, TurnEvent]]:
        """Each event with its choice."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._unread:
                choice, event = self._take()
                self._busy_since = self._clock()
                yield choice, event
                self._busy_since = None
                self._unread_bytes -= _size(event)
            if self._error is not None:
                raise self._error
            if not self._open:
                return

    def _take(self) -> tuple[int, TurnEvent]:
        message = self._unread.popleft()
        if self._newest[message.choice] is message:
            del self._newest[message.choice]
        deltas = [event for event in message.events if isinstance(event, TurnDelta)]
        return message.choice, _merged(deltas) if deltas else message.events[0]

    def _is_reported(self, event: TurnEvent, choice: int) -> bool:
        if isinstance(event, TurnStarted) and self._begun_first is None:
            self._begun_first = choice
        return self._begun_first in (None, choice) or not isinstance(event, TurnStarted | Prefilled)


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
