"""The answer of OpenAI's responses: a turn's events as a response, or as its stream."""

import base64
from typing import Any

from kvasir.clients import Reply
from kvasir.common.v1.message_pb2 import ToolCall
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_gateway.chunks import Blocks
from kvasir_gateway.openai.responses import Item, ResponsesRequest
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.turn import Asked, finish_reason, not_stored, sse


def whole(asked: Asked, reply: Reply, request: ResponsesRequest, seals: ThoughtSeals | None = None) -> dict[str, Any]:
    """A response. Without `seals` it has no thoughts that only this gateway can read."""
    output: list[Item] = []
    if reply.reasoning_text:
        output.append(_reasoning(asked, request, reply.reasoning_text, seals))
    if reply.text or not (output or reply.finished.tool_calls):
        output.append(_message(asked, reply.text, "completed"))
    output += [_call(asked, request, number, call) for number, call in enumerate(reply.finished.tool_calls)]
    return _response(asked, request, reply, output, reply.finished)


class ResponseEvents(Blocks):
    """A response as its stream of events: its items are blocks."""

    def __init__(self, asked: Asked, request: ResponsesRequest, seals: ThoughtSeals | None = None) -> None:
        super().__init__(asked)
        self._seals = seals
        # Thoughts are sent as a summary or as a text: the name of their events, and of their place.
        self._thought = (
            ("reasoning_summary", "summary_index") if request.wants_summary else ("reasoning", "content_index")
        )
        self._request = request
        self._number = -1
        self._output: list[Item] = []

    @property
    def sent(self) -> int:
        return self._number + 1

    def _begin(self) -> str:
        return self._report("response.created") + self._wait()

    def _wait(self) -> str:
        return self._report("response.in_progress")  # Codex counts no comments, and gives up after 300 s

    def _report(self, name: str) -> str:
        return self._event(name, response=_response(self._asked, self._request, self._reply, [], None))

    def _finish(self, finished: pb.Finished) -> str:
        frames = self._open("text") if not (self._output or self._kind or finished.tool_calls) else ""
        frames += self._close()
        for number, call in enumerate(finished.tool_calls):
            done = _call(self._asked, self._request, number, call)
            place = {"item_id": done["id"], "output_index": len(self._output)}
            frames += self._added({**done, "arguments": "", "status": "in_progress"})
            frames += self._event("response.function_call_arguments.delta", **place, delta=call.arguments_json)
            frames += self._event(
                "response.function_call_arguments.done", **place, name=done["name"], arguments=call.arguments_json
            )
            frames += self._done(done)
        response = _response(self._asked, self._request, self._reply, self._output, finished)
        return frames + self._event(f"response.{response['status']}", response=response | not_stored(finished))

    def _opened(self, kind: str) -> str:
        if kind == "text":
            frames = self._added(_message(self._asked, None, "in_progress"))
            return frames + self._event("response.content_part.added", **self._place(kind), part=_part(""))
        frames = self._added(_reasoning(self._asked, self._request, None))
        if self._request.wants_summary:
            frames += self._event("response.reasoning_summary_part.added", **self._place(kind), part=_summary(""))
        return frames

    def _more(self, kind: str, text: str) -> str:
        if kind == "text":
            return self._event("response.output_text.delta", **self._place(kind), delta=text, logprobs=[])
        return self._event(f"response.{self._thought[0]}_text.delta", **self._place(kind), delta=text)

    def _closed(self, kind: str, text: str) -> str:
        place = self._place(kind)
        if kind == "text":
            frames = self._event("response.output_text.done", **place, text=text, logprobs=[])
            frames += self._event("response.content_part.done", **place, part=_part(text))
            return frames + self._done(_message(self._asked, text, "completed"))
        frames = self._event(f"response.{self._thought[0]}_text.done", **place, text=text)
        if self._request.wants_summary:
            frames += self._event("response.reasoning_summary_part.done", **place, part=_summary(text))
        return frames + self._done(_reasoning(self._asked, self._request, text, self._seals))

    def _added(self, item: Item) -> str:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: Item) -> str:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, kind: str) -> dict[str, Any]:
        index = self._thought[1] if kind == "thinking" else "content_index"
        return {"item_id": _item_id(self._asked, kind), "output_index": len(self._output), index: 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)


def _response(
    asked: Asked, request: ResponsesRequest, reply: Reply, output: list[Item], finished: pb.Finished | None
) -> dict[str, Any]:
    started = reply.started
    is_cut = finished is not None and finish_reason(finished) == "length"
    usage = None
    if finished is not None:
        usage = {
            "input_tokens": started.prompt_tokens,
            "input_tokens_details": {"cached_tokens": started.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finished.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.choices[0].reasoning_tokens},
            "total_tokens": started.prompt_tokens + finished.usage.completion_tokens,
        }
    tools = [tool.as_applied() for tool in request.tools or () if tool.type in ("function", "namespace")]
    text_format = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        text_format = request.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": f"resp_{int(request.has_instructions)}{_names(asked)}",
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
    return f"{'rs' if kind == 'thinking' else 'msg'}_{_names(asked)}"


def _message(asked: Asked, text: str | None, status: str) -> Item:
    content = [] if text is None else [_part(text)]
    head = {"id": _item_id(asked, "text"), "type": "message", "role": "assistant"}
    return {**head, "status": status, "content": content}


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(asked: Asked, request: ResponsesRequest, text: str | None, seals: ThoughtSeals | None = None) -> Item:
    item: Item = {"id": _item_id(asked, "thinking"), "type": "reasoning", "summary": []}
    if request.wants_summary:
        item["summary"] = [] if text is None else [_summary(text)]
    else:
        item["content"] = [] if text is None else [{"type": "reasoning_text", "text": text}]
    if request.wants_sealed and seals is not None and text is not None:
        item["encrypted_content"] = seals.sealed(text)
    return item


def _summary(text: str) -> Item:
    return {"type": "summary_text", "text": text}


def _call(asked: Asked, request: ResponsesRequest, number: int, call: ToolCall) -> Item:
    head = {"id": f"fc_{_names(asked)}.{number}", "type": "function_call", "call_id": call.id}
    group, name = request.grouped.get(call.name, ("", call.name))
    names = {"namespace": group, "name": name} if group else {"name": name}
    return {**head, **names, "arguments": call.arguments_json, "status": "completed"}
