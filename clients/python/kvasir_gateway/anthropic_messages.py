"""Anthropic's messages: the request as a turn, and the turn's events as a message or as its stream."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from kvasir.clients import Reply
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from pydantic import Field, StringConstraints

from kvasir_gateway import turn as turns
from kvasir_gateway.chunks import Blocks
from kvasir_gateway.openai.chat import ThinkingSetting
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.reading.thinking import EFFORT, MODE, Thinking, effort_of
from kvasir_gateway.reading.tolerance import Reading

_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "end_turn",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_THOUGHTS = ("thinking", "redacted_thinking")
# Tools that the caller runs and the model must know of itself (bash_…, text_editor_…) are refused.
_TOOL_TYPES = "^(custom|(web_search|web_fetch|code_execution|tool_search_tool_regex|tool_search_tool_bm25)_[0-9]{8})$"
_HINT = Field(None, description="Accepted as a hint: known prefixes are reused anyway.")

Block = turns.FreeObject
ToolType = Annotated[str, StringConstraints(pattern=_TOOL_TYPES)]


class AnthropicMessage(turns.Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(turns.Body):
    type: ToolType | None = Field(None, description="A server's own tool (web_search_…) is ignored.")
    name: Annotated[str, MinLen(1), MaxLen(128)]
    description: str | None = None
    input_schema: turns.FreeObject | None = None
    strict: bool | None = Field(None, description="Arguments fit the schema, where the model's format allows it.")
    eager_input_streaming: bool | None = Field(None, description="Accepted: arguments come in one piece.")
    cache_control: turns.FreeObject | None = _HINT


class AnthropicToolChoice(turns.Body):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class RequestMetadata(turns.Lenient):
    user_id: str | None = None


class OutputFormat(turns.Body):
    type: Literal["json_schema"]
    schema_: turns.FreeObject = Field(alias="schema")


class OutputConfig(turns.Body):
    format: OutputFormat | None = None
    effort: str | None = Field(None, description="Applied where the model's template reads one.")


class CountedMessages(turns.Body):
    """The body of /v1/messages/count_tokens, and most of that of /v1/messages."""

    model: Annotated[str, MinLen(1)]
    messages: Annotated[list[AnthropicMessage], MinLen(1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], MaxLen(128)] | None = None
    tool_choice: AnthropicToolChoice | None = Field(None, description="auto, none, any, or tool with its name.")
    thinking: ThinkingSetting | None = Field(None, description="adaptive: as the model's template has it.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="An older place of output_config.format.")
    cache_control: Block | None = _HINT
    context_management: Block | None = Field(None, description="Ignored.")
    mcp_servers: list[Block] | None = Field(None, description="Refused.")

    def turn(self, reading: Reading) -> turns.Turn:
        """The engine's request. Raises InvalidArgument."""
        turns.refuse_unless(([],), {"mcp_servers": self.mcp_servers})
        reading.ignore_unless(({},), context_management=self.context_management)
        system = reading.content("system", _texts(self.system, "system")) if self.system else ""
        opening = (turns.Said("system", system),) if system else ()
        tools = tuple(self._tools(reading))
        tool_choice = self._calls(tools)
        schema = self._schema()
        messages, begun = (*opening, *said(self.messages, reading)), None
        if self.messages[-1].role == "assistant":
            messages, begun = turns.begun_reply(messages)
        return turns.Turn(
            model=self.model,
            messages=messages,
            begun=begun,
            tools=tools,
            tool_choice=tool_choice,
            thinking=self._thinking(reading),
            json_schema=turns.format_of_text(schema, tool_choice),
        )

    def _schema(self) -> str | None:
        newer = self.output_config.format if self.output_config is not None else None
        if newer is not None:
            turns.refuse_unless((), {"output_format": self.output_format})
        asked = newer or self.output_format
        return json.dumps(asked.schema_) if asked is not None else None

    def _thinking(self, reading: Reading) -> Thinking | None:
        asked, effort = self.thinking or ThinkingSetting(type="adaptive"), ""
        if self.output_config is not None:
            _, effort = effort_of(self.output_config.effort, "output_config.effort", reading)
        if asked.is_on is None and asked.budget_tokens is None and not effort:
            return None
        return Thinking(
            is_on=asked.is_on,
            most_tokens=asked.budget_tokens,
            effort=effort,
            names={MODE: "thinking", EFFORT: "output_config.effort"},
            is_strict=reading.is_strict,
        )

    def _tools(self, reading: Reading) -> Iterator[pb.Tool]:
        for number, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom"):
                reading.ignore_tool(number)
                continue
            yield turns.function_tool(tool.name, tool.description, tool.input_schema, tool.strict)

    def _calls(self, tools: Sequence[pb.Tool]) -> pb.ToolChoice | None:
        choice = self.tool_choice
        if choice is None:
            return None
        if choice.type == "none":
            return turns.NO_CALLS if tools else None
        one_call = bool(choice.disable_parallel_tool_use)
        if choice.type == "auto":
            return turns.free_calls(tools, one_call=one_call)
        if choice.type == "tool" and choice.name is None:
            raise InvalidArgument.of("tool_choice.name", "expected the name of a tool")
        name = choice.name if choice.type == "tool" else None
        return turns.forced_calls(name, one_call=one_call)


class MessagesRequest(CountedMessages):
    """The body of /v1/messages."""

    max_tokens: turns.TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[str], MaxLen(16)] | None = None
    temperature: Annotated[float, Ge(0), Le(1)] | None = None
    top_p: Annotated[float, Ge(0), Le(1)] | None = None
    top_k: turns.TopK | None = None
    metadata: RequestMetadata | None = None
    speculation: turns.Speculation | None = None
    service_tier: str | None = None
    inference_geo: str | None = None

    def turn(self, reading: Reading) -> turns.Turn:
        counted = super().turn(reading)
        return replace(
            counted,
            sampling=reading.length(self.max_tokens)
            | turns.speculated(self.speculation)
            | turns.given(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences),
            is_streamed=bool(self.stream),
            hint=(self.metadata.user_id or "") if self.metadata is not None else "",
        )

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.type != "disabled"


def said(messages: Sequence[AnthropicMessage], reading: Reading) -> Iterator[turns.Said]:
    """The messages as the engine knows them: results of tools are messages of their own."""
    for number, message in enumerate(messages):
        where = f"messages[{number}].content"
        if message.role == "system":
            yield turns.Said("system", reading.content("system", _texts(message.content, where)))
        elif isinstance(message.content, str):
            yield turns.Said(message.role, message.content)
        elif message.role == "assistant":
            uses = [block for block in message.content if block.get("type") == "tool_use"]
            texts = list(_own_blocks(message.content, where, reading))
            calls = tuple(_use(use, where) for use in uses)
            thoughts = "".join(_thoughts(message.content, where, reading))
            yield turns.Said(message.role, _text(texts, where), tool_calls=calls, reasoning=thoughts)
        else:
            yield from _user_said(message.content, where)


def _own_blocks(blocks: Sequence[Block], where: str, reading: Reading) -> Iterator[Block]:
    """Blocks of text. What another server's tools did is none of this conversation's."""
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind in ("server_tool_use", "mcp_tool_use") or (isinstance(kind, str) and kind.endswith("_tool_result")):
            reading.skip(f"{where}[{number}]")
        elif kind not in ("tool_use", *_THOUGHTS):
            yield block


def _thoughts(blocks: Sequence[Block], where: str, reading: Reading) -> Iterator[str]:
    """What this gateway's models thought. Others' thoughts, and those that somebody changed, mean nothing to them."""
    for number, block in enumerate(blocks):
        if block.get("type") not in _THOUGHTS:
            continue
        text = block.get("thinking")
        seals = reading.seals
        if isinstance(text, str) and seals is not None and seals.is_ours(text, block.get("signature")):
            yield text
        else:
            reading.skip(f"{where}[{number}]")


def whole(asked: turns.Asked, reply: Reply, *, seals: ThoughtSeals | None, shows_thinking: bool) -> dict[str, Any]:
    content: list[Block] = []
    if (text := reply.reasoning_text) and shows_thinking:
        content.append({"type": "thinking", "thinking": text, "signature": _signature(text, seals)})
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": turns.arguments_object(call.arguments_json)}
        for call in reply.finished.tool_calls
    ]
    used = {**_usage(reply.started), "output_tokens": reply.finished.usage.completion_tokens}
    return {**_message(asked, reply.started), "content": content, **_ending(reply.finished), "usage": used}


def _signature(text: str, seals: ThoughtSeals | None) -> str:
    return "" if seals is None else seals.signature(text)


class MessageEvents(Blocks):
    def __init__(self, asked: turns.Asked, *, seals: ThoughtSeals | None, shows_thinking: bool) -> None:
        super().__init__(asked, shows_thinking=shows_thinking)
        self._seals = seals
        self._block = -1

    def end(self) -> str:
        return turns.sse({"type": "message_stop"}, "message_stop")

    def _begin(self) -> str:
        started = self._reply.started
        usage = {**_usage(started), "output_tokens": 0}
        message = {**_message(self._asked, started), "content": [], **_ending(None), "usage": usage}
        return turns.sse({"type": "message_start", "message": message}, "message_start")

    def _wait(self) -> str:
        return turns.sse({"type": "ping"}, "ping")

    def _finish(self, finished: pb.Finished) -> str:
        frames = self._close()
        for call in finished.tool_calls:
            arguments = json.dumps(turns.arguments_object(call.arguments_json), ensure_ascii=False)
            frames += self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            frames += self._add({"type": "input_json_delta", "partial_json": arguments}) + self._stop()
        usage = {**_usage(self._reply.started), "output_tokens": finished.usage.completion_tokens}
        end = {"type": "message_delta", "delta": _ending(finished), "usage": usage, **turns.not_stored(finished)}
        return frames + turns.sse(end, "message_delta")

    def _opened(self, kind: str) -> str:
        return self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})

    def _more(self, kind: str, text: str) -> str:
        return self._add({"type": f"{kind}_delta", kind: text})

    def _closed(self, kind: str, text: str) -> str:
        signed = {"type": "signature_delta", "signature": _signature(text, self._seals)} if kind == "thinking" else None
        return (self._add(signed) if signed else "") + self._stop()

    def _start(self, block: Block) -> str:
        self._block += 1
        start = {"type": "content_block_start", "index": self._block, "content_block": block}
        return turns.sse(start, "content_block_start")

    def _add(self, delta: Block) -> str:
        return turns.sse({"type": "content_block_delta", "index": self._block, "delta": delta}, "content_block_delta")

    def _stop(self) -> str:
        return turns.sse({"type": "content_block_stop", "index": self._block}, "content_block_stop")


def _message(asked: turns.Asked, started: pb.Started) -> Block:
    model = started.model or asked.model
    return {"id": f"msg_{asked.request_id}", "type": "message", "role": "assistant", "model": model}


def _ending(finished: pb.Finished | None) -> Block:
    if finished is None:
        return {"stop_reason": None, "stop_sequence": None}
    return {"stop_reason": turns.finish_reason(finished, _REASONS), "stop_sequence": finished.matched_stop or None}


def _usage(started: pb.Started) -> dict[str, int]:
    """Anthropic counts what was read from a cache apart from the input."""
    return {
        "input_tokens": started.prompt_tokens - started.cached_tokens,
        "cache_read_input_tokens": started.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _user_said(blocks: Sequence[Block], where: str) -> Iterator[turns.Said]:
    texts: list[Block] = []
    for number, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield turns.Said("user", _text(texts, where))
            texts = []
        content = block.get("content") or ""
        if not isinstance(content, str | list) or not isinstance(block.get("tool_use_id"), str):
            raise InvalidArgument.of(f"{where}[{number}]", "expected tool_use_id and content")
        failed = "Error: " if block.get("is_error") is True else ""
        text = failed + _text(content, f"{where}[{number}].content")
        yield turns.Said("tool", text, tool_call_id=block["tool_use_id"])
    if texts or not blocks:
        yield turns.Said("user", _text(texts, where))


def _text(content: str | Sequence[object], where: str) -> str:
    return "".join(_texts(content, where))


def _texts(content: str | Sequence[object], where: str) -> list[str]:
    """The texts of blocks. Raises InvalidArgument that names a block that is none."""
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind != "text" or not isinstance(block.get("text"), str):
            shown = repr(kind[:40]) if isinstance(kind, str) and kind != "text" else "another value"
            raise InvalidArgument.of(
                f"{where}[{number}]", f"expected a text block, got {shown}: this model reads text alone"
            )
        texts.append(block["text"])
    return texts


def _use(block: Block, where: str) -> turns.ToolUse:
    name, use_id, arguments = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(use_id, str) or not isinstance(arguments, dict):
        raise InvalidArgument.of(where, "tool_use: expected id, name and an object as input")
    return turns.ToolUse(use_id, name, json.dumps(arguments, ensure_ascii=False))
