"""What is known of a turn after each of its steps, as frozen values; and where the turn is meanwhile.

    TurnRequest ─recall→ Recalled ─prompt→ Prompted ─plan→ Planned ─run→ Ran ─remember→ Remembered ─report→ TurnFinished

`Progress` is the only object that changes, on the event loop: readers, lists, cancels and hand-overs look at it.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.on_full import OnFull

from inference_svc.engine.api import AgentKey, CarriedTurn, Ended, Event, Resumed, TurnPlan, Wanted
from inference_svc.engine.engine import TurnHandle
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Pinning
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_planning import Once, Prepared
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.memory.store.answers import EventCursor
from inference_svc.model.prompting import Tokenized
from inference_svc.text.conversation import Dialogue
from inference_svc.text.differences import Difference
from inference_svc.text.shortening import Shorter
from inference_svc.text.templates.template_clock import TemplateClock
from inference_svc.turns.outbox import Outbox
from inference_svc.turns.turn_data import Continuation, Shortening, TurnEvent, TurnFinished, TurnRequest


@dataclass(frozen=True, slots=True)
class Recalled:
    """The agent's memory is found, and what the turn makes of it is decided."""

    request: TurnRequest  # as its agent has it: without what was left out, with the memory's dates
    recollection: Recollection
    continuation: Continuation | None = None  # None: the prompt's match decides, or no memory was looked at
    messages: tuple[manifest_pb2.Message, ...] = ()  # of the prompt; empty for a raw prompt
    shortened: manifest_pb2.Shortened | None = None  # what `messages` lack of the whole conversation
    note: manifest_pb2.Message | None = None  # the newest dates and times, for the model
    kept: frozenset[str] = frozenset()  # rules by which the prompt has what the memory has
    event_cursor: EventCursor | None = None  # place in the store's history when the turn began

    @property
    def is_kept(self) -> bool:
        """Whether the turn becomes its agent's next version."""
        return self.request.is_kept and self.continuation is not Continuation.BRANCHED


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompt's text is there."""

    recalled: Recalled
    text: str
    dialogue: Dialogue | None = None  # `messages`, as templates know them
    tokens: Tokenized | None = None  # of a prompt that came as tokens
    clock: TemplateClock = field(default_factory=TemplateClock)
    tools_order: manifest_pb2.ToolsOrder | None = None  # of the request's tools, as the template is given them
    is_time_untold: bool = False  # its template does not take `note`
    difference: Difference | None = None  # where the prompt parts from the memory; None: nowhere
    shortening: Shortening | None = None  # what this turn leaves out
    reply: Tokenized | None = None  # one that was generated before, to be computed behind the prompt

    @property
    def request(self) -> TurnRequest:
        return self.recalled.request


@dataclass(frozen=True, slots=True)
class Planned:
    """The engine's plan is made, and gets the KV that it reuses when it runs."""

    prompted: Prompted
    recollection: Recollection  # whose memory is reused
    prepared: Prepared
    plan: TurnPlan  # without the KV that is reused
    # Gives back the room of bytes that are read or will be read from the store, and are not KV yet.
    restoring: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    is_brought: bool = False  # its KV came by an archive or from another store, besides what the recollection says
    is_text_own: bool = True  # no other engine, which this one need not believe, has generated some of the reply
    handed_over_by: str = ""  # the peer from whose store the agent came with the turn

    @property
    def request(self) -> TurnRequest:
        return self.prompted.request

    @property
    def recalled(self) -> Recalled:
        return self.prompted.recalled

    @property
    def has_brought_kv(self) -> bool:
        """Whether the turn's KV came by an archive or another store, or is computed on such KV. The store marks its
        copies; this mark outlives them.
        """
        found = self.recollection
        own_line = found.own_line.memory if found.own_line is not None else None
        memories = (found.memory, found.continued, own_line)
        is_reused = self.prepared.source in (Source.HOT, Source.WARM)
        return self.is_brought or (is_reused and any(memory and memory.is_brought for memory in memories))


@dataclass(frozen=True, slots=True)
class Ran:
    """The engine is done. A key's hot memory has this turn's KV now."""

    planned: Planned
    prepared: Prepared  # as the engine truly began
    ended: Ended
    calls: tuple[manifest_pb2.ToolCall, ...] = ()
    has_reasoned: bool = False
    stream: BlockStream | None = None  # the blocks that were sent meanwhile
    pinning: Once[Pinning] = field(default_factory=lambda: Once(None))  # asked for at the turn's end

    @property
    def extended(self) -> AgentMemory | None:
        """The hot memory that the turn extended."""
        found = self.planned.recollection
        return found.memory if found.kv_from is Source.HOT else None


@dataclass(frozen=True, slots=True)
class LaterShortening:
    """What the turns to come go on with: the agent's memory becomes that behind its reader's back."""

    found: Shorter
    setting: OnFull
    request: TurnRequest  # with the JSON of all messages


@dataclass(frozen=True, slots=True)
class Remembered:
    """The agent's hot memory has its description, where the turn leaves one."""

    ran: Ran
    memory: AgentMemory | None = None
    shortening: Shortening | None = None
    later: LaterShortening | None = None


@dataclass(frozen=True, slots=True)
class BegunPrompt:
    """The prompt of a turn that another engine began."""

    tokens: Tokenized
    rewind_point_tokens: int | None = None
    messages: tuple[manifest_pb2.Message, ...] = ()  # before the reply; empty for a prompt
    template_time_ms: int = 0  # what its template was told; 0: it did not ask
    tools_order: manifest_pb2.ToolsOrder | None = None  # as the template was given them


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """What another engine knew of a turn that it began, besides where it stands: equal for all choices of a request."""

    seed: int  # of the first choice
    max_tokens: int
    prompt: BegunPrompt
    parent_manifest: Digest | None  # of the version that the turn extends; None: the agent remembers nothing
    is_brought: bool
    continuation: Continuation | None
    shortened: manifest_pb2.Shortened | None
    shortening: Shortening | None
    age_s: float  # since the request arrived
    first_token_s: float | None  # from then until the reply's first token; None: there is none yet
    move_id: str = ""  # by which the agent comes to this engine's store before the turn is this engine's
    peer: str = ""  # that gives the turn: the name of another store; empty: an engine of this store gives it
    is_text_own: bool = False  # its reply counts as the model's own
    handed_over_by: str = ""  # the peer that gave it before to an engine of this store

    @property
    def has_other_store(self) -> bool:
        """Whether the engine that began it has another store than this one."""
        return bool(self.move_id or self.peer)


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
        """The turn is over."""
        self._files = ()


class TurnPhase(Enum):
    """Where a turn is."""

    WAITING = "waiting"  # for its agent's turn before it
    PLANNING = "planning"  # and for the engine, until that has its KV
    HELD = "held"  # its KV came from another engine, which has not given it away yet
    RUNNING = "running"
    MOVING = "moving"  # it runs, and is being given to another engine; one gives it at a time
    ENDING = "ending"  # the engine is done
    MOVED = "moved"  # another engine goes on with it
    ENDED = "ended"  # its reader has its end; its task may still have work


_NOT_BEGUN = (TurnPhase.WAITING, TurnPhase.PLANNING)
_OVER = (TurnPhase.MOVED, TurnPhase.ENDED)


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a turn was cancelled. None: by another call than its reader's, so that its reader learns how it ended."""

    error: errors.KvasirError | None


@dataclass(slots=True)
class TokenCounts:
    """Tokens of a turn so far."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    computed: int = 0  # of the prompt: those whose KV is there


@dataclass(slots=True)
class TurnTiming:
    """When a turn was where. Seconds of the service's clock, and of waiting."""

    arrived: float
    queue_s: float = 0.0
    restore_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def first_token_s(self) -> float | None:
        """From the request's arrival on."""
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

    @property
    def key(self) -> AgentKey | None:
        return self.request.key

    @property
    def has_begun(self) -> bool:
        """Whether the engine has its KV, or had it."""
        return self.phase not in _NOT_BEGUN

    @property
    def has_ended(self) -> bool:
        """Whether its reader has its end."""
        return self.phase in _OVER

    @property
    def is_ending(self) -> bool:
        return self.phase is TurnPhase.ENDING or self.has_ended

    @property
    def is_kept(self) -> bool:
        """Whether it becomes its agent's next version, as far as it is planned."""
        return self.planned is not None and self.planned.recalled.is_kept

    @property
    def is_guest(self) -> bool:
        """Whether another store's engine began it and its agent does not remember it. It needs nothing of the agent
        here: it waits for none of its turns, and none waits for it.
        """
        if self.taken is None or not self.taken.begun.peer:
            return False
        return not self.request.is_kept or self.taken.begun.continuation is Continuation.BRANCHED

    @property
    def can_move(self) -> bool:
        """Whether it computes a reply that another engine could go on with."""
        is_running = self.phase in (TurnPhase.RUNNING, TurnPhase.MOVING) and self.handle is not None
        return is_running and self.request.origin.message is not None

    @property
    def is_cancelled(self) -> bool:
        return self.stopped is not None

    @property
    def error(self) -> errors.KvasirError | None:
        """The reader's error, if the turn was cancelled."""
        return self.stopped.error if self.stopped is not None else None

    def emit(self, event: TurnEvent) -> None:
        if isinstance(event, TurnFinished):
            self.finished = event
        self.outbox.put(event, self.request.choice)

    def end(self, error: BaseException | None = None, *, phase: TurnPhase = TurnPhase.ENDED) -> None:
        """The reader gets no more, but `error` if there is one. Idempotent."""
        if not self.has_ended:
            self.outbox.close(error)
        if self.phase is not TurnPhase.MOVED:
            self.phase = phase

    def cancel(self, why: errors.KvasirError | None = None) -> None:
        """Stop generating, because the reader is gone or for the reason `why`. The memory that the turn leaves is taken
        care of regardless. Idempotent.
        """
        self._stop(Stop(why or errors.Cancelled("the turn was cancelled")))

    def stop(self) -> None:
        """The same for another call than the reader's: the reader gets the turn's last message. Idempotent."""
        self._stop(Stop(None))

    def end_work_behind(self) -> None:
        """End what the turn's task does once the reader has its end. Idempotent."""
        if self.has_ended and self.task is not None:
            self.task.cancel()

    def _stop(self, why: Stop) -> None:
        if self.is_cancelled or self.is_ending:
            return
        self.stopped = why
        if self.handle is not None:
            self.handle.cancel()
        elif self.task is not None:
            self.task.cancel()
