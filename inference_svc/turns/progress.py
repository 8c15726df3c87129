"""A turn under way, on one event loop. `Progress` is the only object of a turn that changes; its events go into the
outbox, the one bounded buffer of a request. A slow reader never stops a turn: unread deltas of a choice become one. A
reader that leaves too much unread, or takes nothing for too long, is overrun, and its turns are ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvasir import errors

from inference_svc.engine.api import CarriedTurn, Event, Prefilled, Resumed, Wanted
from inference_svc.engine.engine import TurnHandle
from inference_svc.memory.outcomes import Source
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.turns.phases import BegunTurn, Planned
from inference_svc.turns.turn_data import Continuation, TurnDelta, TurnEvent, TurnFinished, TurnRequest, TurnStarted

_TOKEN_BYTES = 8  # cost of a token besides its text: its id, and its place in a message
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
        """A choice has no more events. The reader ends behind them: with the first `error`, or after all choices."""
        self._open -= 1
        self._error = self._error or error
        self._arrived.set()

    async def events(self) -> AsyncGenerator[tuple[int, TurnEvent], None]:
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
        if len(message.events) == 1:
            return message.choice, message.events[0]
        return message.choice, _merged([event for event in message.events if isinstance(event, TurnDelta)])

    def _is_reported(self, event: TurnEvent, choice: int) -> bool:
        if isinstance(event, TurnStarted) and self._begun_first is None:
            self._begun_first = choice
        return self._begun_first in (None, choice) or not isinstance(event, TurnStarted | Prefilled)


def _merged(deltas: Sequence[TurnDelta]) -> TurnDelta:
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


class TakenTurn:
    """A turn on its way in from another engine: first its KV comes, then the word that it is this engine's."""

    def __init__(self, begun: BegunTurn, carried: CarriedTurn, told_chars: int, files: Sequence[bytes]) -> None:
        self.begun = begun
        self.carried = carried
        self.told_chars = told_chars  # characters of the reply that the other engine has sent
        self.handle: TurnHandle | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its KV is here, and it waits for the word. Has the error of a turn that failed before."""
        self._files = files

    def event(self, event: Event) -> None:
        match event:
            case Wanted() if self.handle is not None:
                self.handle.resume(self._files)
                self._files = ()
            case Resumed() if not self.ready.done():
                self.ready.set_result(None)
            case _:
                pass

    def failed(self, error: BaseException) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # perhaps nobody waits for it any more

    def close(self) -> None:
        self._files = ()


class TurnPhase(Enum):
    WAITING = "waiting"  # for its agent's turn before it
    PLANNING = "planning"  # and for the engine, until that has its KV
    HELD = "held"  # its KV came from another engine, which has not given it away yet
    RUNNING = "running"
    MOVING = "moving"  # it runs, and is being given to another engine; one gives it at a time
    ENDING = "ending"  # the engine is done
    MOVED = "moved"  # another engine goes on with it
    ENDED = "ended"  # its reader has its end; its task may still have work

    @property
    def has_begun(self) -> bool:
        return self not in (TurnPhase.WAITING, TurnPhase.PLANNING)

    @property
    def has_ended(self) -> bool:
        return self in (TurnPhase.MOVED, TurnPhase.ENDED)

    @property
    def is_ending(self) -> bool:
        return self is TurnPhase.ENDING or self.has_ended


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a turn was cancelled. None: by another call than its reader's, so that its reader learns how it ended."""

    error: errors.KvasirError | None


@dataclass(slots=True)
class TokenCounts:
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    computed: int = 0  # of the prompt: those whose KV is there


@dataclass(slots=True)
class TurnTiming:
    arrived: float
    queue_s: float = 0.0
    restore_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived


@dataclass(slots=True, eq=False)
class Progress:
    """A turn under way. Only the event loop changes it."""

    request: TurnRequest  # as it came
    outbox: Outbox
    times: TurnTiming
    counters: NamespaceCounters  # of its namespace
    taken: TakenTurn | None = None  # from another engine, which began the turn
    phase: TurnPhase = TurnPhase.WAITING
    task: asyncio.Task[None] | None = None
    handle: TurnHandle | None = None  # while the engine has the turn
    stopped: Stop | None = None
    planned: Planned | None = None  # once the engine has had the turn
    parent_version: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    finished: TurnFinished | None = None
    source: Source | None = None  # of its KV, as reported; WOKEN before that, if its agent was asleep

    @property
    def is_kept(self) -> bool:
        """Whether it becomes its agent's next version, as far as it is planned."""
        return self.planned is not None and self.planned.recalled.is_kept

    @property
    def is_running(self) -> bool:
        return self.phase in (TurnPhase.RUNNING, TurnPhase.MOVING) and self.handle is not None

    @property
    def can_move(self) -> bool:
        can_be_held = self.is_running and self.handle is not None and self.handle.can_be_held
        return can_be_held and self.request.origin.message is not None

    @property
    def is_cancelled(self) -> bool:
        return self.stopped is not None

    @property
    def error(self) -> errors.KvasirError | None:
        return self.stopped.error if self.stopped is not None else None

    def begin(self, phase: TurnPhase) -> None:
        """Enter a phase of a turn that has begun. It counts as running from the first one on."""
        if not self.phase.has_begun:
            self.counters.waiting_turns -= 1
            self.counters.running_turns += 1
        self.phase = phase

    def emit(self, event: TurnEvent) -> None:
        if isinstance(event, TurnFinished):
            self.finished = event
        self.outbox.put(event, self.request.choice)

    def end(self, error: BaseException | None = None, *, phase: TurnPhase = TurnPhase.ENDED) -> None:
        """The reader gets no more, but `error` if there is one. Idempotent."""
        if not self.phase.has_ended:
            self.outbox.close(error)
        if self.phase is not TurnPhase.MOVED:
            self.phase = phase

    def cancel(self, why: errors.KvasirError | None = None) -> None:
        """Stop generating. The memory that the turn leaves is taken care of regardless. Idempotent."""
        self._stop(Stop(why or errors.Cancelled("the turn was cancelled")))

    def stop(self) -> None:
        """The same for another call than the reader's: the reader of a reply gets its last message. Idempotent."""
        if self.request.is_warming:  # it has no such message
            self.cancel()
        else:
            self._stop(Stop(None))

    def _stop(self, why: Stop) -> None:
        if self.is_cancelled or self.phase.is_ending:
            return
        self.stopped = why
        if self.handle is not None:
            self.handle.cancel()
        elif self.task is not None:
            self.task.cancel()


def is_guest(turn: Progress) -> bool:
    """Whether another store's engine began it and its agent does not remember it: neither waits for the other."""
    if turn.taken is None or not turn.taken.begun.peer:
        return False
    return not turn.request.is_kept or turn.taken.begun.continuation is Continuation.BRANCHED
