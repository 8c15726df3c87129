"""OpenAI's responses: the request as a turn. Ids of responses and items name agent and turn in the store."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from kvasir.errors import InvalidArgument, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.names import check_agent_id
from pydantic import Field, PrivateAttr

from kvasir_gateway import turn as turns
from kvasir_gateway.openai.chat import OfferedFunction, StreamOptions, offered, schema_text
from kvasir_gateway.reading.thinking import EFFORT, MODE, Thinking, effort_of
from kvasir_gateway.reading.tolerance import Reading

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_ID = re.compile(r"(resp_[01]|msg_|rs_|fc_)([0-9A-Za-z_-]{1,600})(?:\.([0-9]{1,3}))?")
_SUMMARY = ("summary", "generate_summary")
_REASONING = ("effort", "summary", "generate_summary", "context")
# Of `include`: what is there without a request, or of tools that this server does not run.
_INCLUDED = re.compile(r"(file_search|web_search|computer|code_interpreter)_call.*|message\.input_image\..*")
_SEALED = "reasoning.encrypted_content"
# What another server's tools did.
_SERVED = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "mcp_call", "tool_search_call", "tool_search_output"),
)
MAX_REFERENCES = 256  # in one request

Item = dict[str, Any]


class FunctionTool(OfferedFunction):
    type: Literal["function"]


_FUNCTION_FIELDS = set(FunctionTool.model_fields)


class ResponseTool(turns.Body):
    """A function, a group of functions, or a tool that the server would run: this one runs none."""

    type: Literal[
        "function",
        "namespace",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "tool_search",
    ]
    name: Annotated[str, MinLen(1), MaxLen(128)] | None = None
    description: str | None = None
    parameters: turns.FreeObject | None = None
    strict: bool | None = Field(None, description="Arguments fit the schema, where the model's format allows it.")
    tools: Annotated[list[FunctionTool], MaxLen(128)] | None = Field(None, description="The group's.")

    def as_applied(self) -> dict[str, Any]:
        if self.type == "namespace":
            head = {"type": self.type, "name": self.name, "description": self.description}
            return {**head, "tools": [tool.model_dump(include=_FUNCTION_FIELDS) for tool in self.tools or ()]}
        return self.model_dump(include=_FUNCTION_FIELDS)


class TextFormat(turns.Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: turns.FreeObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(turns.Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(turns.Body):
    """The body of /v1/responses."""

    model: Annotated[str, MinLen(1)]
    input: str | Annotated[list[turns.FreeObject], MinLen(1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: turns.TokenCount | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    tools: Annotated[list[ResponseTool], MaxLen(128)] | None = None
    tool_choice: str | turns.RepeatedObject | None = Field(
        None, description='"auto", "none", "required", the function to call, or allowed_tools.'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call, which ends the reply.")
    text: TextSettings | None = None
    reasoning: dict[str, Any] | None = Field(
        None, description="effort none is off; the summary is the thoughts themselves."
    )
    truncation: str | None = Field(None, description='"disabled" alone.')
    background: bool | None = Field(None, description="false alone.")
    conversation: str | dict[str, Any] | None = Field(None, description="Refused; see x-agent-id.")
    prompt: dict[str, Any] | None = Field(None, description="Refused.")
    max_tool_calls: int | None = Field(None, description="Refused.")
    top_logprobs: int | None = Field(None, description="0 alone.")
    include: list[str] | None = None
    store: bool | None = None
    metadata: turns.RepeatedObject | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    speculation: turns.Speculation | None = None
    client_metadata: turns.FreeObject | None = Field(None, description="Accepted: it is the client's own.")
    _appends_to_instructions: bool = PrivateAttr(False)

    def follows(self, previous: turns.Place, *, is_append: bool) -> None:
        """An append leaves the instructions where they are that the previous response's messages begin with."""
        self._appends_to_instructions = is_append and previous.had_instructions

    @property
    def has_instructions(self) -> bool:
        """Whether instructions begin its messages."""
        return bool(self.instructions) or self._appends_to_instructions

    def turn(self, reading: Reading, before: Sequence[turns.Said] = ()) -> turns.Turn:
        """The engine's request; `before`: the messages until the previous response. Raises InvalidArgument."""
        for name, value in (self.reasoning or {}).items():
            if value is not None and name != "effort" and not (name in _SUMMARY and self.wants_summary):
                reading.ignore(f"reasoning.{name}" if name in _REASONING else "reasoning")
        turns.refuse_unless(("disabled",), {"truncation": self.truncation})
        turns.refuse_unless((False, 0), {"background": self.background, "top_logprobs": self.top_logprobs})
        turns.refuse_unless(
            (), {"conversation": self.conversation, "prompt": self.prompt, "max_tool_calls": self.max_tool_calls}
        )
        if any(name != _SEALED and not _INCLUDED.fullmatch(name) for name in self.include or ()):
            reading.ignore("include")
        if self.text is not None:
            reading.ignore_unless(("medium",), **{"text.verbosity": self.text.verbosity})
        system = (turns.Said("system", reading.content("system", [self.instructions])),) if self.instructions else ()
        tools, tool_choice = offered(list(self._tools(reading)), self.tool_choice, self.parallel_tool_calls)
        asked = (turns.Said("user", self.input),) if isinstance(self.input, str) else said(self.input, reading)
        return turns.Turn(
            model=self.model,
            messages=(*system, *before, *asked),
            tools=tuple(tools),
            tool_choice=tool_choice,
            sampling={
                **reading.length(self.max_output_tokens),
                **turns.given(temperature=self.temperature, top_p=self.top_p),
                **turns.speculated(self.speculation),
            },
            thinking=self._thinking(reading),
            json_schema=turns.format_of_text(self._schema(), tool_choice),
            is_streamed=bool(self.stream),
            hint=self.prompt_cache_key or "",
            is_stored=self.store is not False,
        )

    def _thinking(self, reading: Reading) -> Thinking | None:
        given, name = (self.reasoning or {}).get("effort"), "reasoning.effort"
        is_on, effort = effort_of(given if given is None else str(given)[:64], name, reading)
        if is_on is None:
            return None
        return Thinking(is_on=is_on, effort=effort, names={MODE: name, EFFORT: name}, is_strict=reading.is_strict)

    @property
    def wants_summary(self) -> bool:
        """Whether thoughts are sent as a summary, which clients show."""
        asked = self.reasoning or {}
        return any(asked.get(name) in ("auto", "concise", "detailed") for name in ("summary", "generate_summary"))

    @property
    def wants_sealed(self) -> bool:
        return _SEALED in (self.include or ())

    @property
    def grouped(self) -> dict[str, tuple[str, str]]:
        """The groups' functions by the names that the model knows: each one's group and own name."""
        groups = [tool for tool in self.tools or () if tool.type == "namespace"]
        return {
            flat_name(group.name or "", each.name): (group.name or "", each.name)
            for group in groups
            for each in group.tools or ()
        }

    def _tools(self, reading: Reading) -> Iterator[pb.Tool]:
        names: set[str] = set()
        for number, tool in enumerate(self.tools or ()):
            where = f"tools[{number}]"
            if tool.type not in ("function", "namespace") or (tool.type == "namespace" and reading.is_strict):
                reading.ignore_tool(number)
                continue
            if tool.name is None:
                raise InvalidArgument.of(f"{where}.name", "expected a string")
            for name, each in _functions(tool.name, tool):
                if name in names:
                    raise InvalidArgument.of(where, "two tools would have one name")
                names.add(name)
                yield turns.function_tool(name, each.description, each.parameters, each.strict)

    def _schema(self) -> str | None:
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return None
        return schema_text(asked.schema_ if asked.type == "json_schema" else None)


def flat_name(group: str, name: str) -> str:
    """The one name that the model knows a group's function by. Groups' names may end with the separator."""
    return f"{group.removesuffix('__')}__{name}"


def _functions(name: str, tool: ResponseTool) -> Iterator[tuple[str, FunctionTool | ResponseTool]]:
    """What the model may call, by the names that it knows."""
    if tool.type == "function":
        yield name, tool
    for each in tool.tools or () if tool.type == "namespace" else ():
        yield flat_name(name, each.name), each


def place_of(given: str, field: str = "previous_response_id") -> turns.Place:
    """Raises NotFound for an id that this gateway never gave, or that names a turn nobody remembers."""
    match = _ID.fullmatch(given)
    if match is None:
        raise lost(given, field)
    try:
        names = base64.urlsafe_b64decode(match[2] + "=" * (-len(match[2]) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise lost(given, field) from None
    number, digest, request_id, agent_id = (*names.split("\n", 3), "", "", "")[:4]
    try:
        check_agent_id(agent_id)
    except InvalidArgument:
        raise lost(given, field) from None
    if not re.fullmatch("[0-9]{1,6}", number):
        raise lost(given, field)
    return turns.Place(agent_id, request_id, int(number), digest, match[1] == "resp_1", int(match[3] or 0))


def lost(given: str, field: str = "previous_response_id") -> NotFound:
    return NotFound(f"{given[:200]!r} is not remembered", reason="RESPONSE_NOT_FOUND", field=field)


def references(items: str | list[Item]) -> dict[int, turns.Place]:
    """The items that stand for one of an earlier response. Raises InvalidArgument, also above MAX_REFERENCES."""
    found = [
        (number, item)
        for number, item in enumerate(items if isinstance(items, list) else ())
        if item.get("type") == "item_reference"
    ]
    if len(found) > MAX_REFERENCES:
        raise InvalidArgument.of(
            "input", f"expected at most {MAX_REFERENCES} items of type item_reference, got {len(found)}"
        )
    ids = {number: _text(item, "id", f"input[{number}]") for number, item in found}
    return {number: place_of(given, f"input[{number}].id") for number, given in ids.items()}


def referenced(given: str, place: turns.Place, reply: turns.Said) -> Item:
    """The item that a reference names: the reply's text, one of its calls, or what was thought."""
    if given.startswith("msg_"):
        return {"type": "message", "role": "assistant", "content": reply.content}
    if given.startswith("rs_"):
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": reply.reasoning}]}
    if place.call >= len(reply.tool_calls):
        raise lost(given, "input")
    call = reply.tool_calls[place.call]
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments_json}


def said(items: Sequence[Item], reading: Reading) -> tuple[turns.Said, ...]:
    """The items as messages: thoughts, an answer and its calls, which are items of their own here, become one."""
    messages: list[turns.Said] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            message = _message_said(item, where, reading)
            thoughts = messages[-1].reasoning if messages else ""
            if (
                message.role == "assistant"
                and messages
                and messages[-1] == turns.Said("assistant", "", reasoning=thoughts)
            ):
                message = replace(message, reasoning=messages.pop().reasoning)
            messages.append(message)
        elif kind == "function_call":
            name = _text(item, "name", where)
            if item.get("namespace") is not None:
                name = flat_name(_text(item, "namespace", where), name)
            call = turns.ToolUse(
                _text(item, "call_id", where), name, _text(item, "arguments", where), f"{where}.arguments"
            )
            if not messages or messages[-1].role != "assistant":
                messages.append(turns.Said("assistant", ""))
            messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
        elif kind == "function_call_output":
            output = item.get("output")
            text = reading.content("tool", _texts(output, f"{where}.output"))
            messages.append(turns.Said("tool", text, tool_call_id=_text(item, "call_id", where)))
        elif kind == "reasoning":
            if thoughts := _thoughts(item, where, reading):
                messages.append(turns.Said("assistant", "", reasoning=thoughts))
        elif kind in _SERVED:
            reading.skip(where)
        else:
            shown = repr(kind[:40]) if isinstance(kind, str) else "another value"
            raise InvalidArgument.of(
                f"{where}.type", f"expected message, function_call or function_call_output, got {shown}"
            )
    if not messages:
        raise InvalidArgument.of("input", "expected a message")
    return tuple(messages)


def _thoughts(item: Item, where: str, reading: Reading) -> str:
    """What a model thought: sealed by this gateway, or as a text. A summary of another's is none."""
    sealed = item.get("encrypted_content")
    opened = reading.seals.opened(sealed) if reading.seals is not None else None
    if sealed and opened is not None:
        return opened
    if sealed:
        reading.skip(f"{where}.encrypted_content")
    content = item.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if part.get("type") == "reasoning_text"]
    return "".join(text for text in texts if isinstance(text, str))


def _message_said(item: Item, where: str, reading: Reading) -> turns.Said:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument.of(f"{where}.role", f"expected one of {', '.join(_ROLES)}")
    texts = _texts(item.get("content"), f"{where}.content")
    return turns.Said(_ROLES[role], reading.content(_ROLES[role], texts))


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidArgument.of(where, "expected a string or a list of parts")
    return turns.texts_of(content, where)


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidArgument.of(f"{where}.{name}", "expected a string")
    return value
