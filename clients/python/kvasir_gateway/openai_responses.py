"""OpenAI's responses: the request as a turn, and the turn's events as a response or as its stream.

The ids of a response and of its items name its agent and its turn. So `previous_response_id` and references to items
need no memory of the gateway's own: the store knows what was said, also after a restart of everything.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from kvasir.clients import Reply
from kvasir.common.v1.message_pb2 import ToolCall
from kvasir.errors import InvalidArgument, NotFound
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field

from kvasir_gateway.openai_chat import StreamOptions, offered, schema_text
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import (
    Asked,
    Body,
    FreeObject,
    Place,
    Said,
    TokenCount,
    ToolUse,
    Turn,
    comment,
    finish_reason,
    format_without_tools,
    function_tool,
    given,
    refuse_unless,
    sse,
    texts_of,
)

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_ID = re.compile(r"(resp_[01]|msg_|rs_|fc_)([0-9A-Za-z_-]{1,600})(?:\.([0-9]{1,3}))?")
_REASONING = ("effort", "summary", "generate_summary", "context")
MAX_REFERENCES = 256  # in one request

Item = dict[str, Any]


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, MinLen(1), MaxLen(128)]
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = Field(None, description="Accepted as a wish: arguments are as the model writes them.")


_FUNCTION_FIELDS = set(FunctionTool.model_fields)


class ResponseTool(Body):
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
    parameters: FreeObject | None = None
    strict: bool | None = Field(None, description="Accepted as a wish: arguments are as the model writes them.")
    tools: Annotated[list[FunctionTool], MaxLen(128)] | None = Field(None, description="The group's.")

    def as_applied(self) -> dict[str, Any]:
        if self.type == "namespace":
            head = {"type": self.type, "name": self.name, "description": self.description}
            return {**head, "tools": [tool.model_dump(include=_FUNCTION_FIELDS) for tool in self.tools or ()]}
        return self.model_dump(include=_FUNCTION_FIELDS)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Body):
    """The body of /v1/responses."""

    model: Annotated[str, MinLen(1)]
    input: str | Annotated[list[FreeObject], MinLen(1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    tools: Annotated[list[ResponseTool], MaxLen(128)] | None = None
    tool_choice: str | FreeObject | None = Field(
        None, description='"auto", "none", "required", or the function to call.'
    )
    parallel_tool_calls: bool | None = Field(None, description="false only where calls are required: then exactly one.")
    text: TextSettings | None = None
    reasoning: dict[str, Any] | None = Field(None, description="Ignored: the model decides.")
    truncation: str | None = Field(None, description='"disabled" alone.')
    background: bool | None = Field(None, description="false alone.")
    conversation: str | dict[str, Any] | None = Field(None, description="Refused; see x-agent-id.")
    prompt: dict[str, Any] | None = Field(None, description="Refused.")
    max_tool_calls: int | None = Field(None, description="Refused.")
    top_logprobs: int | None = Field(None, description="0 alone.")
    include: list[str] | None = None
    store: bool | None = None
    metadata: FreeObject | None = None
    service_tier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    client_metadata: FreeObject | None = Field(None, description="Accepted: it is the client's own.")

    def turn(self, reading: Reading, before: Sequence[Said] = ()) -> Turn:
        """What the engine is asked; `before`: what was said until the previous response. Raises InvalidArgument."""
        for name, value in (self.reasoning or {}).items():
            if value is not None:
                reading.ignore(f"reasoning.{name}" if name in _REASONING else "reasoning")
        refuse_unless(("disabled",), {"truncation": self.truncation})
        refuse_unless((False, 0), {"background": self.background, "top_logprobs": self.top_logprobs})
        refuse_unless(
            (), {"conversation": self.conversation, "prompt": self.prompt, "max_tool_calls": self.max_tool_calls}
        )
        if self.text is not None:
            reading.ignore_unless(("medium",), **{"text.verbosity": self.text.verbosity})
        system = (Said("system", reading.content("system", [self.instructions])),) if self.instructions else ()
        tools, tool_choice = offered(list(self._tools(reading)), self.tool_choice, self.parallel_tool_calls)
        asked = (Said("user", self.input),) if isinstance(self.input, str) else said(self.input, reading)
        return Turn(
            model=self.model,
            messages=(*system, *before, *asked),
            tools=tuple(tools),
            tool_choice=tool_choice,
            sampling={
                **reading.length(self.max_output_tokens),
                **given(temperature=self.temperature, top_p=self.top_p),
            },
            json_schema=format_without_tools(self._schema(), tools, "text.format"),
            is_streamed=bool(self.stream),
            hint=self.prompt_cache_key or "",
        )

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
                raise InvalidArgument(f"{where}.name: expected a string", field=f"{where}.name")
            for name, each in _functions(tool.name, tool):
                if name in names:
                    raise InvalidArgument(f"{where}: two tools would have one name", field=where)
                names.add(name)
                yield function_tool(name, each.description, each.parameters)

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


def place_of(given: str, field: str = "previous_response_id") -> Place:
    """Raises NotFound for an id that this gateway never gave, or that names a turn nobody remembers."""
    match = _ID.fullmatch(given)
    if match is None:
        raise lost(given, field)
    try:
        names = base64.urlsafe_b64decode(match[2] + "=" * (-len(match[2]) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise lost(given, field) from None
    number, digest, request_id, agent_id = (*names.split("\n", 3), "", "", "")[:4]
    if not agent_id or not re.fullmatch("[0-9]{1,6}", number):
        raise lost(given, field)
    return Place(agent_id, request_id, int(number), digest, match[1] == "resp_1", int(match[3] or 0))


def lost(given: str, field: str = "previous_response_id") -> NotFound:
    return NotFound(f"{given[:200]!r} is not remembered", reason="RESPONSE_NOT_FOUND", field=field)


def references(items: str | list[Item]) -> dict[int, Place]:
    """The items that stand for one of an earlier response, by their numbers in the input. Raises InvalidArgument, also
    for more than MAX_REFERENCES: each is looked up in an agent's memory.
    """
    found = [
        (number, item)
        for number, item in enumerate(items if isinstance(items, list) else ())
        if item.get("type") == "item_reference"
    ]
    if len(found) > MAX_REFERENCES:
        raise InvalidArgument(
            f"input: expected at most {MAX_REFERENCES} items of type item_reference, got {len(found)}", field="input"
        )
    ids = {number: _text(item, "id", f"input[{number}]") for number, item in found}
    return {number: place_of(given, f"input[{number}].id") for number, given in ids.items()}


def referenced(given: str, place: Place, reply: Said) -> Item:
    """The item that a reference names: the reply's text, one of its calls, or what was thought, which is not kept."""
    if given.startswith("msg_"):
        return {"type": "message", "role": "assistant", "content": reply.content}
    if given.startswith("rs_"):
        return {"type": "reasoning"}
    if place.call >= len(reply.tool_calls):
        raise lost(given, "input")
    call = reply.tool_calls[place.call]
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments_json}


def said(items: Sequence[Item], reading: Reading) -> tuple[Said, ...]:
    """The items as messages: an answer and its calls, which are items of their own here, become one message."""
    messages: list[Said] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message_said(item, where, reading))
        elif kind == "function_call":
            name = _text(item, "name", where)
            if item.get("namespace") is not None:
                name = flat_name(_text(item, "namespace", where), name)
            call = ToolUse(_text(item, "call_id", where), name, _text(item, "arguments", where))
            if not messages or messages[-1].role != "assistant":
                messages.append(Said("assistant", ""))
            messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
        elif kind == "function_call_output":
            output = item.get("output")
            text = reading.content("tool", _texts(output, f"{where}.output"))
            messages.append(Said("tool", text, tool_call_id=_text(item, "call_id", where)))
        elif kind != "reasoning":  # the model's template leaves out what it thought
            shown = repr(kind[:40]) if isinstance(kind, str) else "another value"
            raise InvalidArgument(
                f"{where}.type: expected message, function_call or function_call_output, got {shown}",
                field=f"{where}.type",
            )
    if not messages:
        raise InvalidArgument("input: expected a message", field="input")
    return tuple(messages)


def whole(asked: Asked, reply: Reply, request: ResponsesRequest) -> dict[str, Any]:
    """A response."""
    output: list[Item] = []
    if reply.reasoning_text:
        output.append(_reasoning(asked, reply.reasoning_text))
    if reply.text or not (output or reply.finished.tool_calls):
        output.append(_message(asked, reply.text, "completed"))
    output += [_call(asked, request, number, call) for number, call in enumerate(reply.finished.tool_calls)]
    return _response(asked, request, reply.started, output, reply.finished)


class ResponseEvents:
    """A response as its stream of events: items open and close one after the other."""

    def __init__(self, asked: Asked, request: ResponsesRequest) -> None:
        self._asked = asked
        self._request = request
        self._reply = Reply()
        self._number = -1
        self._output: list[Item] = []
        self._kind = ""
        self._text = ""

    def frames(self, event: pb.GenerateResponse) -> str:
        self._reply.add(event)
        match event.WhichOneof("event"):
            case "started":
                response = _response(self._asked, self._request, event.started, [], None)
                return self._event("response.created", response=response) + self._event(
                    "response.in_progress", response=response
                )
            case "prefill_progress":
                return comment("prefill")
            case "delta":
                return self._delta(event.delta)
            case _:
                return self._finished(event.finished)

    def end(self) -> str:
        return ""

    def _delta(self, delta: pb.Delta) -> str:
        frames = ""
        for kind, text in (("reasoning", delta.reasoning_text), ("message", delta.text)):
            if text:
                frames += self._opened(kind)
                self._text += text
                name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
                logprobs: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
                frames += self._event(name, **self._place(kind), delta=text, **logprobs)
        return frames

    def _finished(self, finished: pb.Finished) -> str:
        frames = self._opened("message") if not (self._output or self._kind or finished.tool_calls) else ""
        frames += self._closed()
        for number, call in enumerate(finished.tool_calls):
            index = len(self._output)
            done = _call(self._asked, self._request, number, call)
            begun = {**done, "arguments": "", "status": "in_progress"}
            place = {"item_id": done["id"], "output_index": index}
            frames += self._event("response.output_item.added", output_index=index, item=begun)
            frames += self._event("response.function_call_arguments.delta", **place, delta=call.arguments_json)
            frames += self._event(
                "response.function_call_arguments.done", **place, name=done["name"], arguments=call.arguments_json
            )
            frames += self._event("response.output_item.done", output_index=index, item=done)
            self._output.append(done)
        response = _response(self._asked, self._request, self._reply.started, self._output, finished)
        return frames + self._event(f"response.{response['status']}", response=response)

    def _opened(self, kind: str) -> str:
        if kind == self._kind:
            return ""
        frames = self._closed()
        self._kind, self._text = kind, ""
        item = _reasoning(self._asked, None) if kind == "reasoning" else _message(self._asked, None, "in_progress")
        frames += self._event("response.output_item.added", output_index=len(self._output), item=item)
        if kind == "message":
            frames += self._event("response.content_part.added", **self._place(kind), part=_part(""))
        return frames

    def _closed(self) -> str:
        kind, text = self._kind, self._text
        if not kind:
            return ""
        place = self._place(kind)
        if kind == "reasoning":
            item = _reasoning(self._asked, text)
            frames = self._event("response.reasoning_text.done", **place, text=text)
        else:
            item = _message(self._asked, text, "completed")
            frames = self._event("response.output_text.done", **place, text=text, logprobs=[])
            frames += self._event("response.content_part.done", **place, part=_part(text))
        frames += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._kind = ""
        return frames

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": _item_id(self._asked, kind), "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)


def _response(
    asked: Asked, request: ResponsesRequest, started: pb.Started, output: list[Item], finished: pb.Finished | None
) -> dict[str, Any]:
    is_cut = finished is not None and finish_reason(finished) == "length"
    usage = None
    if finished is not None:
        usage = {
            "input_tokens": started.prompt_tokens,
            "input_tokens_details": {"cached_tokens": started.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finished.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": started.prompt_tokens + finished.usage.completion_tokens,
        }
    tools = [tool.as_applied() for tool in request.tools or () if tool.type in ("function", "namespace")]
    text_format = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        text_format = request.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": f"resp_{int(bool(request.instructions))}{_names(asked)}",
        "object": "response",
        "created_at": asked.created,
        "status": "in_progress" if finished is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": started.model or asked.model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "temperature": request.temperature,
        "text": {"format": text_format},
        "tool_choice": request.tool_choice or "auto",
        "tools": tools,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": usage,
    }


def _names(asked: Asked) -> str:
    names = f"{asked.messages}\n{asked.digest}\n{asked.request_id}\n{asked.agent_id}"
    return base64.urlsafe_b64encode(names.encode()).decode().rstrip("=")


def _item_id(asked: Asked, kind: str) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{_names(asked)}"


def _message(asked: Asked, text: str | None, status: str) -> Item:
    content = [] if text is None else [_part(text)]
    head = {"id": _item_id(asked, "message"), "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(asked: Asked, text: str | None) -> Item:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": _item_id(asked, "reasoning"), "type": "reasoning", "summary": [], "content": content}


def _call(asked: Asked, request: ResponsesRequest, number: int, call: ToolCall) -> Item:
    head = {"id": f"fc_{_names(asked)}.{number}", "type": "function_call", "call_id": call.id}
    group, name = request.grouped.get(call.name, ("", call.name))
    names = {"namespace": group, "name": name} if group else {"name": name}
    return {**head, **names, "arguments": call.arguments_json, "status": "completed"}


def _message_said(item: Item, where: str, reading: Reading) -> Said:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(f"{where}.role: expected one of {', '.join(_ROLES)}", field=f"{where}.role")
    texts = _texts(item.get("content"), f"{where}.content")
    return Said(_ROLES[role], reading.content(_ROLES[role], texts))


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidArgument(f"{where}: expected a string or a list of parts", field=where)
    return texts_of(content, where)


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{name}: expected a string", field=f"{where}.{name}")
    return value
