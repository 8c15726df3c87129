"""What a caller asks of a turn and what it is told: plain data between the service's edge and turn preparation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.engine.api import Priority, SamplingParams, Timings, TokenLogprobs
from inference_svc.memory.outcomes import Miss, SnapshotOutcome, Source
from inference_svc.text.conversation import Tool
from inference_svc.text.given_json import GivenJson
from inference_svc.text.prefix_matching import Outcome


@dataclass(frozen=True, slots=True)
class PromptInput:
    """The whole text, template and special tokens included."""

    prompt: str


@dataclass(frozen=True, slots=True)
class MessagesInput:
    """The whole conversation, or (`is_append`) only what follows the messages that the agent remembers."""

    messages: tuple[manifest_pb2.Message, ...]
    is_append: bool = False

    @property
    def field(self) -> str:
        """The request's field that they came in."""
        return "append_messages.messages" if self.is_append else "messages.messages"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A validated request. `namespace` is the credential's; `agent_id` is empty when nothing is to be remembered."""

    request_id: str
    namespace: str
    agent_id: str
    parent_version: int | None
    input: PromptInput | MessagesInput
    input_digest: str
    sampling: SamplingParams
    max_tokens_is_default: bool  # then what is left of the context bounds it, instead of refusing
    tools: Sequence[Tool] = ()
    objects: GivenJson = field(default_factory=GivenJson)  # the JSON of its messages and tools
    keep_partial: bool = False
    choices: int = 1  # replies that are asked for; several only without an agent
    choice: int = 0  # which of them this is
    priority: Priority = Priority.INTERACTIVE
    caller: str = ""  # the credential's name
    is_warming: bool = False  # nothing is generated; an empty prompt then stands for what the agent remembers
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """What was reused."""

    prompt_tokens: int
    cached_tokens: int
    source: Source
    match: Outcome
    parent_version: int
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """Tokens of the prompt whose KV is there, reused ones included."""

    tokens_done: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What is new of a reply since the last delta: its answer, its tokens, what it thought before it answered."""

    text: str
    token_ids: tuple[int, ...]
    reasoning: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Warmed:
    """A memory is hot. Of its tokens, `cached_tokens` were reused."""

    tokens: int
    cached_tokens: int
    version: int  # the agent's newest; 0 if none or not known
    restore_s: float = 0.0
    prefill_s: float = 0.0


TurnEvent: TypeAlias = TurnStarted | TurnProgress | TurnDelta | TurnFinished
