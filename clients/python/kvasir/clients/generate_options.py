"""How a turn is to be done, as one value: everything of a turn's request but its input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

Sampling = pb.Sampling | Mapping[str, object]
JsonSchema = str | Mapping[str, object]
TemplateSetting = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What a turn does with an agent's memory."""

    # The agent whose memory is read and extended. Empty: nothing is remembered.
    agent_id: str = ""
    # The newest version of the agent as the caller knows it; 0: the agent must be new. None: whatever it is.
    expected_version: int | None = None
    # What the turn does with the memory: READ_WRITE, READ_ONLY or NONE. Unspecified: READ_WRITE with an agent_id.
    memory_mode: pb.MemoryMode = pb.MEMORY_MODE_UNSPECIFIED
    # Go on from this version instead of the newest. None: the newest.
    base_version: int | None = None
    # Refuse an agent that remembers nothing yet.
    expect_existing: bool = False
    # `messages` that begin another conversation take the place of the agent's. Else they are answered as a branch,
    # which is not remembered.
    replace_memory: bool = False
    # Which volatile parts of a prompt stay as the agent's memory has them: `pb.VolatileRules(names=["tools-order"])`.
    # None: that of the agent's label `kvasir.volatile`, else template-date and tools-order.
    volatile: pb.VolatileRules | None = None
    # Report the prompt's tokens, in `started`.
    return_prompt_token_ids: bool = False
    # The last of `messages` is the assistant's, and the reply goes on from its text.
    continue_final_message: bool = False
    # What happens when the conversation no longer fits the context: `pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST)`.
    # None: that of the agent's label `kvasir.on_full`, else the turn is refused.
    on_full: pb.OnFull | None = None


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """What the reply is to be like."""

    # The longest reply: the same as `max_tokens` of `sampling`, which then has none.
    max_tokens: int | None = None
    # The fields of `pb.Sampling`, as a mapping or a message.
    sampling: Sampling | None = None
    # What the reply must match, at most one of them: a JSON schema (an object, or its text), or a regular expression.
    json_schema: JsonSchema | None = None
    regex: str | None = None
    # Tools that the template may offer to the model.
    tools: Sequence[pb.Tool] = ()
    # The reply must be calls of them: `pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_REQUIRED)`. None: the model decides.
    tool_choice: pb.ToolChoice | None = None
    # How much the model reasons: `pb.Thinking(mode=pb.THINKING_MODE_OFF)`, `pb.Thinking(budget_tokens=500)`. None: as
    # its chat template has it.
    thinking: pb.Thinking | None = None
    # Settings that the model's chat template reads: `{"clear_thinking": False}`.
    template_settings: Mapping[str, TemplateSetting] = field(default_factory=dict)
    # What the model cannot apply of both is left out and named in `Started.ignored_settings`. Else it is refused.
    ignore_unread_settings: bool = False

    def to_proto_sampling(self) -> pb.Sampling | None:
        """`sampling` with `max_tokens`. Raises InvalidArgument if both limit the reply's length."""
        given = self.sampling
        sampling = pb.Sampling(**given) if isinstance(given, Mapping) else given  # type: ignore[arg-type]
        if self.max_tokens is None:
            return sampling
        if sampling is not None and sampling.HasField("max_tokens"):
            raise InvalidArgument.of("max_tokens", "expected once, got it in sampling too")
        merged = pb.Sampling(max_tokens=self.max_tokens)
        if sampling is not None:
            merged.MergeFrom(sampling)
        return merged

    @property
    def choices(self) -> int:
        """The number of replies, each with an end of its own."""
        sampling = self.to_proto_sampling()
        return 1 if sampling is None else max(sampling.n, 1)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(MemoryOptions, ReplyOptions):
    """How a turn is to be done.

    Most calls name their options one by one: `engine.reply(prompt="…", agent_id="ada", max_tokens=50)`. Programs that
    use the same options again keep them in a value: with `terse = GenerateOptions(max_tokens=50, tools=tools)`, a call
    is `engine.reply(prompt="…", options=terse, agent_id="ada")`, where the options that the call names go before those
    of `terse`. So simple calls stay short, and all options stand in one place: here. Other names are a TypeError.

    A named option replaces the option of the same name only. A named `regex` beside the value's `json_schema` is
    refused, and so is a named `max_tokens` beside one in its `sampling`."""

    # Remember what was generated before a cancel, a deadline or a disconnect.
    keep_partial: bool = False
    # Who is served first when not all can be. Unspecified: as interactive.
    priority: pb.Priority = pb.PRIORITY_UNSPECIFIED
    # How long the stream may wait for a token beside others' prompts, 20 to 1,000 ms. None: as the engine is set.
    longest_gap_ms: int | None = None
    # Empty: the loaded model.
    model: str = ""
    # Names the turn, so that it can be requested again without being done twice. Empty: a new id for each call.
    request_id: str = ""


def with_named(options: GenerateOptions | None, named: Mapping[str, Any]) -> GenerateOptions:
    """The options with those that a call names in their places. Raises TypeError."""
    for name in named.keys() - {each.name for each in fields(GenerateOptions)}:
        if name in pb.Sampling.DESCRIPTOR.fields_by_name:
            raise TypeError(f"{name} is a field of sampling: sampling={{{name!r}: {named[name]!r}}}")
    return replace(options or GenerateOptions(), **named)


def template_values(given: Mapping[str, TemplateSetting]) -> dict[str, pb.TemplateValue]:
    """Settings of a template as the contract has them. Raises InvalidArgument for what is none."""
    fields: dict[type, str] = {bool: "flag", int: "number", float: "real", str: "text"}
    found = {}
    for name, value in given.items():
        if type(value) not in fields:
            raise InvalidArgument.of(f"template_settings.{name}", "expected a flag, a number or a text")
        found[name] = pb.TemplateValue(**{fields[type(value)]: value})  # type: ignore[arg-type]
    return found


class MemoryArguments(TypedDict, total=False):
    """The fields of MemoryOptions."""

    agent_id: str
    expected_version: int | None
    memory_mode: pb.MemoryMode
    base_version: int | None
    expect_existing: bool
    replace_memory: bool
    volatile: pb.VolatileRules | None
    return_prompt_token_ids: bool
    continue_final_message: bool
    on_full: pb.OnFull | None


class ReplyArguments(TypedDict, total=False):
    """The fields of ReplyOptions."""

    max_tokens: int | None
    sampling: Sampling | None
    json_schema: JsonSchema | None
    regex: str | None
    tools: Sequence[pb.Tool]
    tool_choice: pb.ToolChoice | None
    thinking: pb.Thinking | None
    template_settings: Mapping[str, TemplateSetting]
    ignore_unread_settings: bool


class OptionArguments(MemoryArguments, ReplyArguments, total=False):
    """The fields of GenerateOptions as arguments of a call: type checkers and editors know them only by such a list."""

    keep_partial: bool
    priority: pb.Priority
    longest_gap_ms: int | None
    model: str
    request_id: str
