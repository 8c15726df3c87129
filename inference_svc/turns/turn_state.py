"""One turn under way: the task that its reader holds, and the state that its steps share."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvasir import errors, volatile
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.formats.manifest import tokens_within_chars
from kvasir.on_full import OnFull

from inference_svc.engine.api import AgentKey, CarriedTurn, Event, FinishReason, Resumed, TurnPlan, Wanted
from inference_svc.engine.engine import TurnHandle
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Pinning
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.store.answers import EventCursor
from inference_svc.model.prompting import Prompting, Tokenized
from inference_svc.text.conversation import Dialogue, tool_fields
from inference_svc.text.differences import Difference
from inference_svc.text.replies.reply_parts import ReplyReader
from inference_svc.text.shortening import Shorter, as_remembered
from inference_svc.text.template_clock import TemplateClock
from inference_svc.turns.continuing import Continuation, goes_on, in_common, is_same_conversation
from inference_svc.turns.outbox import Outbox
from inference_svc.turns.turn_data import MessagesInput, Shortening, TurnEvent, TurnFinished, TurnRequest


class TurnTask:
    """A turn under way: what it tells its reader, and the means to cancel it."""

    def __init__(self, outbox: Outbox, choice: int = 0) -> None:
        self.outbox = outbox
        self._choice = choice
        self.task: asyncio.Task[None] | None = None  # once it runs
        self.handle: TurnHandle | None = None
        self.is_ending = False
        self.ended_by: errors.KvasirError | None = None  # the reader's error, if the turn was cancelled
        self.is_stopped = False  # cancelled by another call: the reader learns how it ended
        self.finished: TurnFinished | None = None
        self.has_ended = False  # its reader has its end; its task may still have work

    def tell(self, event: TurnEvent) -> None:
        if isinstance(event, TurnFinished):
            self.finished = event
        self.outbox.put(event, self._choice)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more is told, but `error` if there is one. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self.outbox.close(error)

    @property
    def is_cancelled(self) -> bool:
        return self.is_stopped or self.ended_by is not None

    def cancel(self, why: errors.KvasirError | None = None) -> None:
        """Stop generating, because the reader is gone or for the reason `why`. The memory that the turn leaves is taken
        care of regardless. Idempotent.
        """
        if self.is_cancelled or self.is_ending:
            return
        self.ended_by = why or errors.Cancelled("the turn was cancelled")
        self._stop()

    def stop(self) -> None:
        """The same for another call than the reader's: the reader gets the turn's last message. Idempotent."""
        if not (self.is_cancelled or self.is_ending):
            self.is_stopped = True
            self._stop()

    def end_work_behind(self) -> None:
        """End what the turn's task does once the reader has its end. Idempotent."""
        if self.has_ended and self.task is not None:
            self.task.cancel()

    def _stop(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
        elif self.task is not None:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """What another engine knew of a turn that it began, besides where it stands: equal for all choices of a request."""

    seed: int  # of the first choice
    max_tokens: int
    prompt: Tokenized
    rewind_point_tokens: int | None
    messages: tuple[manifest_pb2.Message, ...]  # before the reply; empty for a prompt
    parent_manifest: Digest | None  # of the version that the turn extends; None: the agent remembers nothing
    is_brought: bool
    continuation: Continuation | None
    shortened: manifest_pb2.Shortened | None
    shortening: Shortening | None
    age_s: float  # since the request arrived
    first_token_s: float | None  # from then until the reply's first token; None: there is none yet
    template_time_ms: int = 0  # what its template was told; 0: it did not ask
    tools_order: manifest_pb2.ToolsOrder | None = None  # as the template was given them
    agent_moves: bool = False  # to this engine's store, before the turn is this engine's
    is_text_own: bool = False  # its reply counts as the model's own


class TakenTurn:
    """A turn on its way in from another engine: first its KV comes, then the word that it is this engine's."""

    def __init__(self, begun: BegunTurn, carried: CarriedTurn, told_chars: int, files: Sequence[bytes]) -> None:
        self.begun = begun
        self.carried = carried
        self.told_chars = told_chars  # characters of the reply that the other engine has sent
        self.is_owned = False  # the word has come, and the agent's line is this engine's
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


@dataclass(slots=True)
class TurnState:
    """The values that the steps of one turn learn, in their order."""

    request: TurnRequest
    running: TurnTask
    arrived: float
    queue_s: float = 0.0
    restore_s: float = 0.0
    # Gives back the room of bytes that are read or will be read from the store, and are not KV yet.
    restoring: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    has_begun: bool = False  # the engine has its memory and computes
    computed: int = 0  # prompt tokens whose KV is there
    parent_version: int = 0
    clock: TemplateClock = field(default_factory=TemplateClock)
    tools_order: manifest_pb2.ToolsOrder | None = None  # of the request's tools, as the template is given them
    kept: set[str] = field(default_factory=set)  # rules by which the prompt has what the memory has
    note: manifest_pb2.Message | None = None  # the newest dates and times, which the model is to be told
    is_time_untold: bool = False  # its template does not take them
    difference: Difference | None = None  # where the prompt parts from the memory; None: nowhere
    continuation: Continuation | None = None  # None: the prompt's match decides, or no memory was looked at
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    event_cursor: EventCursor | None = None  # place in the store's history when the turn began
    messages: tuple[manifest_pb2.Message, ...] = ()  # of the prompt; empty for a raw prompt
    dialogue: Dialogue | None = None  # the same, as templates know them
    tokens: Tokenized | None = None  # of the prompt, where it came as tokens
    shortened: manifest_pb2.Shortened | None = None  # what `messages` lack of the whole conversation
    shortening: Shortening | None = None  # what this turn leaves out
    shorter: Shorter | None = None  # what the turns to come go on with
    whole: AgentMemory | None = None  # the memory that becomes that
    on_full: OnFull = field(default_factory=OnFull)  # the setting by which they do
    spoken: Tokenized | None = None  # a reply that was generated before and is computed behind the prompt
    damage: Miss | None = None
    rewind_point_chars: int | None = None  # prompt characters after which a model with states records a rewind point
    first_token_at: float | None = None
    last_token_at: float | None = None
    stream: BlockStream | None = None
    reader: ReplyReader = field(default_factory=ReplyReader)  # of the reply, as it comes
    pinning: Pinning | None = None  # asked for at the turn's end
    # Once the engine has the turn; without the KV that is reused.
    plan: TurnPlan | None = None
    recollection: Recollection | None = None
    prepared: Prepared | None = None
    is_brought: bool = False  # its KV came by an archive or from another store, besides what the recollection says
    is_text_own: bool = True  # no other engine, which this one need not believe, has said some of the reply
    taken: TakenTurn | None = None  # from another engine, which began the turn
    is_moving: bool = False  # being given to another engine; one gives it at a time
    is_given: bool = False  # to another engine, which goes on with it
    key: AgentKey | None = field(init=False)
    asked: TurnRequest = field(init=False)  # the request before its agent's memory changed it

    def __post_init__(self) -> None:
        request = self.asked = self.request
        self.key = AgentKey(request.namespace, request.agent_id) if request.agent_id else None

    def as_asked(self) -> TurnRequest:
        """The request as it came: from its beginning the turn is served once more."""
        self.request, self.kept, self.note = self.asked, set(), None
        return self.request

    @property
    def speaks(self) -> bool:
        """Whether it computes a reply that another engine could go on with."""
        is_running = self.plan is not None and self.prepared is not None and self.running.handle is not None
        is_running = is_running and (self.taken is None or self.taken.is_owned)
        return is_running and self.has_begun and not self.running.is_ending and self.request.origin is not None

    @property
    def is_kept(self) -> bool:
        """Whether the turn becomes its agent's next version."""
        is_beside = self.request.is_read_only or self.continuation is Continuation.BRANCHED
        return self.key is not None and not is_beside and not self.request.is_warming

    def rewind_point_tokens(self, token_chars: Sequence[int]) -> int | None:
        """Prompt tokens that lie wholly inside `rewind_point_chars`."""
        return None if self.rewind_point_chars is None else tokens_within_chars(token_chars, self.rewind_point_chars)


def is_retry(request: TurnRequest, memory: AgentMemory) -> bool:
    """Whether the request asks for the turn that made this memory: a retry has the request id and the input of the
    agent's last turn, and the same parent version. The same id with another input is another turn: ids name requests
    for people, the input says what was asked.
    """
    turn, head = memory.turn, memory.publication.head
    if turn.request_id != request.request_id or turn.input_digest != request.input_digest:
        return False
    if request.expected_version is None or head is None:
        return True
    # A request with the same input that extends this memory is a new turn, not a retry.
    extended = head.parent_version if memory.publication.is_head else head.version
    if memory.shortened is None:
        return request.expected_version == extended
    # Its caller knows no version that only became shorter.
    return request.expected_version <= extended - memory.shortened.is_after_turn


def is_whole(memory: AgentMemory) -> bool:
    """Whether the memory's last turn came to its end. A retry of a cut turn (keep_partial) does it again."""
    return memory.turn.finish_reason != FinishReason.CANCELLED.value


def check_parent(request: TurnRequest, recollection: Recollection) -> None:
    """Raise Conflict when the agent's newest version is not the one that the caller named. If the store could not be
    asked, its compare-and-swap decides at the end.
    """
    head, memory = recollection.head, recollection.memory
    if request.expected_version is None or head is None or request.expected_version == head.version:
        return
    is_shortened = memory is not None and memory.shortened is not None and memory.shortened.is_after_turn
    if is_shortened and head.is_of_turn and request.expected_version == head.parent_version:
        return  # the version that its caller was told became shorter since
    raise errors.Conflict(
        f"expected_version: {request.expected_version} was named, the agent's newest version is {head.version}",
        field="expected_version",
        metadata={"head_version": str(head.version)},
    )


def whole_conversation(
    request: TurnRequest, recollection: Recollection, *, is_retry: bool
) -> tuple[manifest_pb2.Message, ...]:
    """All messages of the prompt. Raises FailedPrecondition or Unavailable when there is no memory to append to."""
    if not isinstance(request.input, MessagesInput):
        return ()
    given, memory = request.input.messages, recollection.continued
    if not request.input.is_append:
        return given
    if memory is not None and memory.messages:
        # A retry of a turn that was cut: its messages are remembered already, and its partial reply is dropped. Not by
        # an older version, which goes on as before.
        return memory.messages[:-1] if is_retry and recollection.base is None else (*memory.messages, *given)
    if not _is_remembered(recollection) or (memory is None and request.expected_version == 0):
        return given
    _refuse_append(request.agent_id, recollection)
    return ()


def as_its_agent_has_it(request: TurnRequest, recollection: Recollection) -> TurnRequest:
    """A whole conversation without what its agent left out of it, where it goes on from the rest."""
    memory, given = recollection.continued, request.input
    if memory is None or memory.shortened is None or not isinstance(given, MessagesInput) or given.is_append:
        return request
    known, shorter = memory.messages, as_remembered(given.messages, memory.messages, memory.shortened)
    if shorter is None:
        return request
    # A caller may send just what is remembered, and the same words may come again: more in common decides.
    as_sent, as_cut = ((in_common(messages, known), goes_on(messages, known)) for messages in (given.messages, shorter))
    if as_cut < as_sent or not is_same_conversation(shorter, known):
        return request
    return replace(request, input=MessagesInput(shorter, is_cut=True))


def what_is_left_out(turn: TurnState, recollection: Recollection) -> manifest_pb2.Shortened | None:
    """What the turn's messages lack of the whole conversation, because its agent's memory lacks it: nothing where the
    caller's own messages are the prompt.
    """
    memory, given = recollection.continued, turn.request.input
    if memory is None or memory.shortened is None or not isinstance(given, MessagesInput):
        return None
    goes_on_from_it = turn.continuation in (Continuation.EXTENDED, Continuation.REWOUND)
    if not goes_on_from_it or not (given.is_append or given.is_cut):
        return None
    shortened = manifest_pb2.Shortened()
    shortened.CopyFrom(memory.shortened)
    shortened.is_after_turn = False
    return shortened


def check_existing(request: TurnRequest, recollection: Recollection) -> None:
    """Raise NotFound for an agent that remembers nothing, if the caller minds."""
    if request.expects_memory and not _is_remembered(recollection):
        raise errors.NotFound(
            f"agent_id: agent {request.agent_id!r} remembers nothing yet",
            reason="AGENT_NOT_FOUND",
            field="agent_id",
            metadata={"agent_id": request.agent_id},
        )


def continuation(request: TurnRequest, recollection: Recollection) -> Continuation | None:
    """What the turn does to its agent's line; None if the match of its prompt decides."""
    memory, given = recollection.continued, request.input
    if not _is_remembered(recollection):
        return Continuation.NEW
    if memory is None:
        return _beside_unread(request, recollection)
    if not isinstance(given, MessagesInput) or not memory.messages:
        return None
    if given.is_append or goes_on(given.messages, memory.messages):
        return Continuation.EXTENDED if recollection.base is None else Continuation.REWOUND
    at_any_time = bool(rules_in_force(request, recollection))
    if is_same_conversation(given.messages, memory.messages, at_any_time=at_any_time):
        return Continuation.REWOUND
    return Continuation.REPLACED if request.replaces else Continuation.BRANCHED


def rules_in_force(request: TurnRequest, recollection: Recollection) -> frozenset[str]:
    """The caller's own rules, else the agent's label, else the caller's defaults. Raises InvalidArgument for a label
    that names none.
    """
    label = recollection.settings.volatile
    if request.rules is not None and not (label and request.has_default_rules):
        return request.rules
    return volatile.from_label(label) if label else volatile.DEFAULT


def _beside_unread(request: TurnRequest, recollection: Recollection) -> Continuation:
    """The same for a memory that cannot be read: no other conversation takes its place without the caller's word."""
    given, hot, miss = request.input, recollection.unproven, recollection.miss
    if request.replaces:
        return Continuation.REPLACED
    if miss is None or not miss.is_store_away:  # it will not be readable later either
        return Continuation.BRANCHED if isinstance(given, MessagesInput) else Continuation.REPLACED
    # What the agent remembered last is known well enough to protect it.
    return Continuation.UNDECIDED if hot is None or may_follow(request, hot) else Continuation.BRANCHED


def may_follow(request: TurnRequest, found: AgentMemory) -> bool:
    """Whether a turn that could not read its agent's memory, `found`, leaves one that goes on from it."""
    recollection = Recollection(found, Source.COLD, found.publication.head)
    request = as_its_agent_has_it(request, recollection)
    return continuation(request, recollection) is not Continuation.BRANCHED


def _is_remembered(recollection: Recollection) -> bool:
    """Whether the agent remembers something, as far as is known: a memory that cannot be read is there."""
    memory = recollection.continued
    return recollection.is_unread if memory is None else bool(memory.transcript.token_ids)


def _refuse_append(agent_id: str, recollection: Recollection) -> None:
    miss = recollection.miss
    if recollection.memory is None and miss is not None and miss.is_sealed:
        # No retry brings the key back.
        raise errors.FailedPrecondition(
            f"append_messages: {miss.detail}", reason="NAMESPACE_SEALED", field="append_messages"
        )
    if recollection.memory is None and miss is not None and miss.is_store_away:
        # Without the agent's memory this would be another conversation, not a miss.
        raise errors.Unavailable(
            f"append_messages: the agent's memory cannot be read now ({miss.detail}); send all messages, or retry",
            reason="MEMORY_UNREADABLE",
            metadata={"agent_id": agent_id},
            retry_after_s=1.0,
        )
    if recollection.memory is None and miss is not None and miss.reason is not MissReason.NEW_AGENT:
        raise errors.FailedPrecondition(
            f"append_messages: the agent's memory cannot be read ({miss.detail}); send all messages, or roll back",
            reason="MEMORY_DAMAGED",
            field="append_messages",
            metadata={"agent_id": agent_id},
        )
    raise errors.FailedPrecondition(
        "append_messages: the agent remembers no messages; send all of them",
        reason="NO_MESSAGES",
        field="append_messages",
        metadata={"agent_id": agent_id},
    )


def reply_reader(request: TurnRequest, prompting: Prompting, prompt: str) -> ReplyReader:
    """Reads the reply. A reply to a raw prompt, or in a requested format, is all answer."""
    constraint = request.sampling.constraint
    is_formatted = constraint is not None and not constraint.has_calls
    if not isinstance(request.input, MessagesInput) or is_formatted:
        return ReplyReader()
    tools = tool_fields(request.tools, request.objects)
    reply_id, is_bound = f"{request.request_id}-{request.choice}", constraint is not None and constraint.begins_reply
    return prompting.reader(prompt, tools, reply_id, begins_with=prompting.tool_start if is_bound else "")
