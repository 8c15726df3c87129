"""One turn under way: the task that its reader holds, and the state that its steps share."""

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.manifest import tokens_within_chars

from inference_svc.engine.api import AgentKey, Snapshot
from inference_svc.engine.engine import TurnHandle
from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.publishing import BlockStream
from inference_svc.memory.recall import Recollection
from inference_svc.memory.remote_cache import EventCursor
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import Dialogue, tool_fields
from inference_svc.text.reply_parts import ReplyReader
from inference_svc.turns.outbox import Outbox
from inference_svc.turns.turn_data import PromptInput, TurnEvent, TurnRequest


class TurnTask:
    """A turn under way: what it tells its reader, and the means to cancel it."""

    def __init__(self, outbox: Outbox, choice: int = 0) -> None:
        self.outbox = outbox
        self._choice = choice
        self.task: asyncio.Task[None] | None = None
        self.handle: TurnHandle | None = None
        self.is_ending = False
        self.ended_by: errors.KvasirError | None = None  # the reader's error, if the turn was cancelled

    def tell(self, event: TurnEvent) -> None:
        self.outbox.put(event, self._choice)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more is told, but `error` if there is one."""
        self.outbox.close(error)

    @property
    def is_cancelled(self) -> bool:
        return self.ended_by is not None

    def cancel(self, why: errors.KvasirError | None = None) -> None:
        """Stop generating, because the reader is gone or for the reason `why`. The memory that the turn leaves is taken
        care of regardless. Idempotent.
        """
        if self.is_cancelled or self.is_ending:
            return
        self.ended_by = why or errors.Cancelled("the turn was cancelled")
        if self.handle is not None:
            self.handle.cancel()
        elif self.task is not None:
            self.task.cancel()


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
    event_cursor: EventCursor | None = None  # place in the store's history when the turn began
    messages: tuple[manifest_pb2.Message, ...] = ()  # of the prompt; empty for a raw prompt
    dialogue: Dialogue | None = None  # the same, as templates know them
    damage: Miss | None = None
    rewind_point_chars: int | None = None  # prompt characters after which a model with states records a rewind point
    first_token_at: float | None = None
    stream: BlockStream | None = None
    reader: ReplyReader = field(default_factory=ReplyReader)  # of the reply, as it comes
    snapshot: "Future[Snapshot | None] | None" = None  # asked for at the turn's end
    key: AgentKey | None = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.key = AgentKey(request.namespace, request.agent_id) if request.agent_id else None

    def rewind_point_tokens(self, token_chars: Sequence[int]) -> int | None:
        """Prompt tokens that lie wholly inside `rewind_point_chars`."""
        return None if self.rewind_point_chars is None else tokens_within_chars(token_chars, self.rewind_point_chars)


def check_parent(request: TurnRequest, recollection: Recollection) -> None:
    """Raise Conflict when the agent's newest version is not the one that the caller named. If the store could not be
    asked, its compare-and-swap decides at the end.
    """
    head = recollection.head
    if request.expected_version is None or head is None or request.expected_version == head.version:
        return
    raise errors.Conflict(
        f"expected_version: {request.expected_version} was named, the agent's newest version is {head.version}",
        field="expected_version",
        metadata={"head_version": str(head.version)},
    )


def whole_conversation(
    request: TurnRequest, recollection: Recollection, *, is_retry: bool
) -> tuple[manifest_pb2.Message, ...]:
    """All messages of the prompt. Raises FailedPrecondition or Unavailable when there is no memory to append to."""
    if isinstance(request.input, PromptInput):
        return ()
    given, memory = request.input.messages, recollection.memory
    if not request.input.is_append:
        return given
    if memory is not None and memory.messages:
        # A retry of a turn that was cut: its messages are remembered already, and its partial reply is dropped.
        return memory.messages[:-1] if is_retry else (*memory.messages, *given)
    if (memory is None or not memory.transcript.token_ids) and request.expected_version == 0:
        return given
    _refuse_append(recollection)
    return ()


_UNKNOWN: Sequence[MissReason] = (
    MissReason.STORE_UNREACHABLE,
    MissReason.STORE_TIMEOUT,
    MissReason.STORE_REFUSED,
)


def _refuse_append(recollection: Recollection) -> None:
    miss = recollection.miss
    if recollection.memory is None and miss is not None and miss.reason in _UNKNOWN:
        # Without the agent's memory this would be another conversation, not a miss.
        raise errors.Unavailable(
            f"append_messages: the agent's memory cannot be read now ({miss.detail}); send all messages, or retry",
            reason="MEMORY_UNREADABLE",
            retry_after_s=1.0,
        )
    if recollection.memory is None and miss is not None and miss.reason is not MissReason.NEW_AGENT:
        raise errors.FailedPrecondition(
            f"append_messages: the agent's memory cannot be read ({miss.detail}); send all messages, or roll back",
            reason="MEMORY_DAMAGED",
            field="append_messages",
        )
    raise errors.FailedPrecondition(
        "append_messages: the agent remembers no messages; send all of them",
        reason="NO_MESSAGES",
        field="append_messages",
    )


def reply_reader(request: TurnRequest, prompting: Prompting, prompt: str) -> ReplyReader:
    """Reads the reply. A reply to a raw prompt, or in a requested format, is all answer."""
    if isinstance(request.input, PromptInput) or request.sampling.constraint is not None:
        return ReplyReader()
    choice = f"{request.choice}-" if request.choice else ""
    tools = tool_fields(request.tools, request.objects)
    return prompting.reader(prompt, tools, f"{request.request_id}-{choice}")
