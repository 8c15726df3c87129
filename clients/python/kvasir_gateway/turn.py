"""One turn as every API of the gateway requests it, and the two shapes an answer has: whole, or a stream of chunks."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge, Le
from kvasir.clients import Reply
from kvasir.clients.generate_options import JsonSchema
from kvasir.errors import Cancelled, InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import AfterValidator, BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call of a tool, as an assistant's message repeats it."""

    id: str
    name: str
    arguments_json: str
    place: str = field(default="", compare=False)  # of its arguments in the request


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation. Roles are the engine's: system, user, assistant, tool."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolUse, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""  # what an assistant thought before it
    reply_id: str = ""  # of a reply whose calls still stand in its text: gives them their ids


class ThinkingWish(Protocol):
    """How much the model is to reason (reading/thinking.py)."""

    @property
    def options(self) -> dict[str, Any]:
        """Fields of GenerateOptions."""

    def name(self, engines: str) -> str: ...

    def refused(self, error: InvalidArgument) -> InvalidArgument: ...


# The tools stay in the prompt, which a memory has from the turns before.
NO_CALLS = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWish:
    # Fields of pb.Sampling; what is absent takes the engine's default.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # None: as the model's chat template has it.
    thinking: ThinkingWish | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    # The answer has the prompt's tokens, and those of the reply.
    returns_token_ids: bool = False
    is_streamed: bool = False
    # The caller may go on from the reply by its id alone.
    is_stored: bool = False
    # Takes the name of what the engine cannot apply and the caller can do without. None: such a turn is refused.
    ignore: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(AnswerWish):
    """What an API gives the engine: messages, or a prompt."""

    model: str
    messages: tuple[Said, ...] = ()
    prompt: str | Sequence[int] = ""
    # The reply as far as the caller has written it, behind the messages.
    begun: Said | None = None
    # The messages follow those that the agent remembers.
    is_append: bool = False
    # Fields of GenerateOptions about the use of an agent's memory.
    memory: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[pb.Tool, ...] = ()
    # None: the model decides whether it calls any.
    tool_choice: pb.ToolChoice | None = None
    # The loaded model answers where there is none of the name.
    any_model: bool = False
    # The name that the caller knows the model by, where that stands for another.
    alias: str = ""
    # Keeps conversations with the same opening apart. Never an identity.
    hint: str = ""

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != NO_CALLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is known of a turn when its answer begins."""

    request_id: str
    created: int  # Unix seconds
    model: str
    # The agent that remembers the turn; empty: nobody.
    agent_id: str = ""
    # Messages before the reply, and their digest.
    messages: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A reply that an id names: its agent, its turn, and where it stands among the messages."""

    agent_id: str
    request_id: str
    number: int
    digest: str  # of the messages before it
    had_instructions: bool = False  # of a response: they began its messages, and are not carried over
    call: int = 0  # of an item: which of the reply's calls


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses numbers that JSON cannot repeat: 1e999 is read as infinity."""
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError("expected finite numbers")
    return value


def _small(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > _MOST_REPEATED:
        raise ValueError(f"expected at most {_MOST_REPEATED} characters of JSON")
    return value


_MOST_REPEATED = 16 << 10
MAX_INT32 = (1 << 31) - 1
# Beyond these bounds the contract has no number, and its refusal no field's name.
TokenCount = Annotated[int, Ge(1), Le(MAX_INT32)]
TokenBudget = Annotated[int, Ge(0), Le(MAX_INT32)]
TopK = Annotated[int, Ge(0), Le(MAX_INT32)]
# How many tokens a step may try ahead. No reply changes by it on a CPU, but of a WeDLM model.
Speculation = Literal["off", "auto"] | Annotated[int, Ge(0), Le(64)]
# An object of the caller's own: a schema, arguments, metadata.
FreeObject = Annotated[dict[str, Any], AfterValidator(_finite)]
# One that the answer repeats, in each event of a stream.
RepeatedObject = Annotated[FreeObject, AfterValidator(_small)]


class Body(BaseModel):
    """A request's JSON. Types are strict. Fields that are not listed are kept apart, and ignored or refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class Lenient(BaseModel):
    """A part of a request that clients copy from answers, with fields that mean nothing here."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    def model_post_init(self, _context: object) -> None:
        """Between two of many parts, another thread may take the interpreter."""


Whole = Callable[[Asked, Reply], dict[str, Any]]

_LINE_ENDS = "\x85\u2028\u2029"  # that JSON does not escape

# Reasons that APIs distinguish; several of the engine's may become one.
REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def finish_reason(finished: pb.Finished, reasons: Mapping[int, str] = REASONS) -> str:
    """Why a reply ended, in an API's words. Raises Cancelled: none has a word for a turn that another call ended, and
    what there is of the reply must not pass for all of it."""
    if finished.reason == pb.FINISH_REASON_CANCELLED:
        raise Cancelled("the turn was cancelled by another call")
    return reasons.get(finished.reason, reasons[pb.FINISH_REASON_STOP])


def sse(data: object, event: str = "") -> str:
    """One server-sent event."""
    text = _in_one_line(data)
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"


def json_line(data: object) -> str:
    """One object of a stream whose lines are JSON."""
    return _in_one_line(data) + "\n"


def _in_one_line(data: object) -> str:
    """As JSON, also for clients that end a line where Unicode does, as httpx."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for end in _LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text


def comment(text: str) -> str:
    """A line that clients skip and proxies forward: the connection lives."""
    return f": {text}\n\n"


def texts_of(content: "str | Sequence[dict[str, Any]] | None", field_name: str) -> list[str]:
    """The texts of a message's content. Raises InvalidArgument that names a part that is none."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [_text_of_part(part, f"{field_name}[{number}]") for number, part in enumerate(content)]


def _text_of_part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    for name in ("text", "refusal"):
        if kind in (name, f"input_{name}", f"output_{name}"):
            if not isinstance(part.get(name), str):
                raise InvalidArgument.of(f"{where}.{name}", "expected a string")
            return str(part[name])
    shown = kind[:40] if isinstance(kind, str) else type(kind).__name__
    raise InvalidArgument(f"{where}.type: expected text, got {shown!r}: this model reads text alone", field=where)


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None = None
) -> pb.Tool:
    """A tool for the model's chat template."""
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    text = json.dumps(schema)
    return pb.Tool(name=name, description=description or "", parameters_json=text, strict=bool(strict))


class AsWritten(InvalidArgument):
    """`field` is a name that the caller wrote: here it may mean another field, to the engine too."""


def renamed(error: InvalidArgument, name: str) -> InvalidArgument:
    """The same refusal, of a field by another name."""
    known, text = error.field, error.message
    if known and text.startswith(known):
        text = name + text.removeprefix(known)
    return type(error)(text, reason=error.reason, field=name, metadata=error.metadata)


def refuse_unless(neutral: Iterable[object], given: Mapping[str, object]) -> None:
    """Refuse settings that this engine cannot apply, unless they request what it does anyway."""
    allowed = list(neutral)
    for name, value in given.items():
        if value is not None and value not in allowed:
            raise AsWritten.of(name, "this engine cannot apply it; leave it out")


def forced_calls(name: str | None, *, one_call: bool, names: Sequence[str] = ()) -> pb.ToolChoice:
    """Calls that the reply must be: of one tool, or without a name of any, or of some."""
    if name is not None:
        return pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name=name)
    return pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_REQUIRED, one_call=one_call, names=names)


def begun_reply(messages: tuple[Said, ...], field_name: str = "messages") -> tuple[tuple[Said, ...], Said]:
    """The messages before a reply that the caller has begun, and that. Raises InvalidArgument for one without text."""
    *before, last = messages or (Said("", ""),)
    if last.role != "assistant" or not last.content.strip() or last.tool_calls or not before:
        raise InvalidArgument.of(field_name, "expected other messages, then a text of the assistant to continue")
    return tuple(before), last


def free_calls(tools: Sequence[pb.Tool], *, one_call: bool, names: Sequence[str] = ()) -> pb.ToolChoice | None:
    """Calls that the reply may have; None where any are free to come."""
    if not tools or not (one_call or names):
        return None
    return pb.ToolChoice(one_call=one_call, names=names)


def format_of_text(schema: str | None, choice: pb.ToolChoice | None) -> str | None:
    """The schema of the reply's text: a reply that must be calls has none."""
    return None if choice is not None and choice.kind and choice != NO_CALLS else schema


def speculated(wish: Speculation | None) -> dict[str, int]:
    """The field of a Sampling; none for "auto": as the engine is set."""
    if wish is None or wish == "auto":
        return {}
    return {"most_drafts": 0 if wish == "off" else wish}


def not_stored(finished: pb.Finished, name: str = "kvasir_not_stored") -> dict[str, Any]:
    """In ASCII why the store did not take a turn, which is in the engine's RAM alone. A stream's last event has it."""
    if finished.snapshot.state != pb.SNAPSHOT_STATE_FAILED:
        return {}
    why = " ".join(finished.snapshot.reason.split())
    return {name: why.encode("ascii", "backslashreplace").decode()}


def given(**settings: Any) -> dict[str, Any]:
    """Sampling settings without those that were left out."""
    return {name: value for name, value in settings.items() if value is not None}


def arguments_object(text: str) -> dict[str, Any]:
    """Arguments as the model wrote them, or nothing where they are no object. Of what JSON cannot repeat there are
    halves of characters, which are replaced, and numbers that are none, which become null."""
    try:
        value = json.loads(text, parse_float=_finite_number, parse_constant=lambda _: None)
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite_number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
