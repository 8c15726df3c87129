"""What is known of a turn after each of its steps, as frozen values; `progress` knows where the turn is meanwhile.

TurnRequest ─recall→ Recalled ─prompt→ Prompted ─plan→ Planned ─run→ Ran ─remember→ Remembered ─report→ TurnFinished
"""

import contextlib
from dataclasses import dataclass, field

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest
from kvasir.on_full import OnFull

from inference_svc.engine.api import Ended, TurnPlan
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Pinning
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_plan import Once, Prepared
from inference_svc.memory.store.answers import EventCursor
from inference_svc.model.prompting import Tokenized
from inference_svc.text.conversation import Dialogue
from inference_svc.text.differences import Difference
from inference_svc.text.kept_messages import Shorter
from inference_svc.text.templates.template_clock import TemplateClock
from inference_svc.turns.turn_data import Continuation, Shortening, TurnRequest


@dataclass(frozen=True, slots=True)
class Recalled:
    """The agent's memory is found, and its use in the turn is decided."""

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
        return self.request.is_kept and self.continuation is not Continuation.BRANCHED


@dataclass(frozen=True, slots=True)
class Prompted:
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
    is_brought: bool = False  # its KV came by an archive or from another store, besides the recollection's
    is_text_own: bool = True  # no other engine, which this one need not believe, has generated some of the reply
    handed_over_by: str = ""  # the peer from whose store the agent came with the turn
    begun_reply: str = ""  # the part that another engine has sent to the reader

    @property
    def request(self) -> TurnRequest:
        return self.prompted.request

    @property
    def recalled(self) -> Recalled:
        return self.prompted.recalled

    @property
    def has_brought_kv(self) -> bool:
        """Whether the turn's KV came by an archive or another store. This mark outlives the store's marks."""
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
    pinning: Once[Pinning] = field(default_factory=lambda: Once(None))  # requested at the turn's end

    @property
    def extended(self) -> AgentMemory | None:
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
    tokens: Tokenized
    rewind_point_tokens: int | None = None
    messages: tuple[manifest_pb2.Message, ...] = ()  # before the reply; empty for a prompt
    template_time_ms: int = 0  # the time that its template read; 0: none
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
