"""Requests and results of turns: plain data between the service's edge and turn preparation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.on_full import OnFull, OnFullPolicy

from inference_svc.engine.api import AgentKey, MaskPasses, Pace, Prefilled, SamplingParams, Timings, TokenLogprobs
from inference_svc.memory.outcomes import Miss, SnapshotOutcome, Source
from inference_svc.text.conversation import Tool
from inference_svc.text.differences import Difference
from inference_svc.text.given_json import GivenJson
from inference_svc.text.prefix_matching import Outcome
from inference_svc.text.templates.template_settings import AskedThinking, Scalar
from inference_svc.text.token_ids import NO_TOKENS, TokenIds


class Continuation(Enum):
    NEW = "new"  # the agent remembered nothing
    EXTENDED = "extended"
    REWOUND = "rewound"  # an earlier point goes on
    REPLACED = "replaced"
    BRANCHED = "branched"  # answered beside the line, and not remembered
    UNDECIDED = "undecided"  # the memory could not be read: decided when the turn is stored


@dataclass(frozen=True, slots=True)
class PromptInput:
    """The whole text, template and special tokens included."""

    prompt: str

    @property
    def name(self) -> str:
        return "prompt"


@dataclass(frozen=True, slots=True)
class TokensInput:
    """The whole prompt as tokens, which are below the vocabulary's size. They are taken as they are."""

    token_ids: TokenIds

    @property
    def name(self) -> str:
        return "prompt_token_ids"


@dataclass(frozen=True, slots=True)
class MessagesInput:
    """The whole conversation, or (`is_append`) only what follows the messages that the agent remembers."""

    messages: tuple[manifest_pb2.Message, ...]
    is_append: bool = False
    is_cut: bool = False  # the whole conversation without what its agent left out of it

    @property
    def name(self) -> str:
        return "append_messages" if self.is_append else "messages"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    expected_version: int | None = None
    base_version: int | None = None  # goes on from this version instead of the newest
    keep_partial: bool = False
    is_read_only: bool = False  # the agent's memory is read and stays as it is
    expects_memory: bool = False  # an agent that remembers nothing is refused
    replaces: bool = False  # another conversation takes the place of the agent's
    rules: frozenset[str] | None = None  # for volatile text (`prompts/texts`); None: the label's, else the defaults
    has_default_rules: bool = False  # an agent's label goes before `rules`
    on_full: OnFull | None = None  # None: that of the agent's label


@dataclass(frozen=True, slots=True)
class PromptSettings:
    tools: Sequence[Tool] = ()
    objects: GivenJson = field(default_factory=GivenJson)  # the JSON of messages and tools
    begun: manifest_pb2.Message | None = None  # the reply goes on from it; the input has it no more
    returns_ids: bool = False  # the reader wants the prompt's tokens
    thinking: AskedThinking | None = None  # None: as the template has it
    template_settings: Mapping[str, Scalar] = field(default_factory=dict)  # what of it the model's template is given
    most_reasoning_tokens: int | None = None
    ignored_settings: tuple[str, ...] = ()  # what of it the model cannot apply


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    caller: str = ""  # the credential's name
    size_bytes: int = 0  # of the input
    # What the edge made the request of, for another engine that goes on with it. None: no other engine can.
    message: object = None


class Work(Enum):
    REPLY = "reply"
    WARM = "warm"  # the memory becomes hot
    WAKE = "wake"  # the same ahead of a turn: it takes no other engine's lease
    SLEEP = "sleep"  # its KV is let go


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A validated request. `namespace` is the credential's. `agent_id` is empty when the turn leaves no memory."""

    request_id: str
    namespace: str
    agent_id: str
    input: PromptInput | TokensInput | MessagesInput
    input_digest: str
    sampling: SamplingParams
    clamps_max_tokens: bool  # what is left of context and KV memory bounds it, and does not refuse it
    memory: MemoryUse = MemoryUse()
    prompt: PromptSettings = field(default_factory=PromptSettings)
    origin: RequestOrigin = RequestOrigin()
    choices: int = 1  # number of replies; several only without an agent
    choice: int = 0  # index of this reply
    pace: Pace = field(default_factory=Pace)
    work: Work = Work.REPLY

    @property
    def is_warming(self) -> bool:
        """No token is generated; an empty prompt stands for the agent's memory."""
        return self.work is not Work.REPLY

    @property
    def key(self) -> AgentKey | None:
        return AgentKey(self.namespace, self.agent_id) if self.agent_id else None

    @property
    def extends(self) -> bool:
        """Whether the turn extends its agent's line. One that only reads takes no other engine's lease."""
        return bool(self.agent_id) and not self.memory.is_read_only

    @property
    def extended(self) -> AgentKey | None:
        return self.key if self.extends else None

    @property
    def is_kept(self) -> bool:
        """Whether the turn becomes its agent's next version, unless it is a branch."""
        return self.extends and not self.is_warming


@dataclass(frozen=True, slots=True)
class TurnStarted:
    prompt_tokens: int
    cached_tokens: int
    source: Source
    match: Outcome
    parent_version: int
    miss: Miss | None = None
    continuation: Continuation | None = None  # None: no agent's memory was looked at
    base_version: int = 0
    kept: tuple[str, ...] = ()  # rules by which the prompt has what the memory has, which is not the turn's own
    is_time_untold: bool = False  # the template does not take the newest dates and times
    difference: Difference | None = None  # where the prompt parts from the memory; for the memory's owner alone
    prompt_ids: TokenIds = NO_TOKENS  # if they were requested
    ignored_settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """The new part of a reply since the last delta: text of the answer, tokens, and reasoning before the answer."""

    text: str
    token_ids: tuple[int, ...]
    reasoning: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortening:
    policy: OnFullPolicy
    dropped_messages: int
    kept_messages: int
    before_reply: bool  # False: the turns to come go on without them


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """The reply is whole. `finish_reason` is a word of manifest.proto's Turn."""

    finish_reason: str
    matched_stop: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    snapshot: SnapshotOutcome
    tool_calls: tuple[manifest_pb2.ToolCall, ...] = ()
    memory_tokens: int = 0  # of the agent's memory with this reply; 0 where nothing is kept
    context_tokens: int = 0
    shortening: Shortening | None = None
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    mask_passes: MaskPasses = field(default_factory=MaskPasses)


@dataclass(frozen=True, slots=True)
class TurnMoved:
    """The rest of the reply is at another engine; nothing more comes here."""

    peer: str
    resume_token: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class Warmed:
    """A turn that only warms is over: a memory of `tokens` tokens is hot; `cached_tokens` of them were reused."""

    tokens: int
    cached_tokens: int
    version: int  # the agent's newest version; 0 if there is none or it is not known
    restore_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slept:
    """An agent's memory of `tokens` tokens is asleep: its KV is let go, and comes back in about `wake_s`."""

    version: int
    tokens: int
    kept_bytes: int
    freed_bytes: int
    wake_s: float


# What a turn tells its reader. Progress is the engine's own event; the others know what the engine does not: where the
# memory came from, which text is answer and which reasoning, what was stored.
TurnEvent: TypeAlias = TurnStarted | Prefilled | TurnDelta | TurnFinished | TurnMoved | Warmed | Slept
