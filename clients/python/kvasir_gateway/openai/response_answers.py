"""The answer of OpenAI's responses: a turn's events as a response, or as its stream."""

import base64
from typing import Any

from kvasir.clients import Reply
from kvasir.common.v1.message_pb2 import ToolCall
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_gateway.openai.responses import Item, ResponsesRequest
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.turn import Asked, finish_reason, sse


def whole(asked: Asked, reply: Reply, request: ResponsesRequest, seals: ThoughtSeals | None = None) -> dict[str, Any]:
    """A response. Without `seals` it has no thoughts that only this gateway can read."""
    output: list[Item] = []
    if reply.reasoning_text:
        output.append(_reasoning(asked, request, reply.reasoning_text, seals))
    if reply.text or not (output or reply.finished.tool_calls):
        output.append(_message(asked, reply.text, "completed"))
    output += [_call(asked, request, number, call) for number, call in enumerate(reply.finished.tool_calls)]
    return _response(asked, request, reply.started, output, reply.finished)


class ResponseEvents:
    """A response as its stream of events: items open and close one after the other."""

    def __init__(self, asked: Asked, request: ResponsesRequest, seals: ThoughtSeals | None = None) -> None:
        self._asked = asked
        self._seals = seals
        # Thoughts are sent as a summary or as a text: the name of their events, and of their place.
        self._thought = (
            ("reasoning_summary", "summary_index") if request.wants_summary else ("reasoning", "content_index")
        )
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
                return self._begun("response.created") + self._begun("response.in_progress")
            case "prefill_progress":
                return self._begun("response.in_progress")  # Codex counts no comments, and gives up after 300 s
            case "delta":
                return self._delta(event.delta)
            case _:
                return self._finished(event.finished)

    def end(self) -> str:
        return ""

    def _begun(self, name: str) -> str:
        return self._event(name, response=_response(self._asked, self._request, self._reply.started, [], None))

    def _delta(self, delta: pb.Delta) -> str:
        frames = ""
        for kind, text in (("reasoning", delta.reasoning_text), ("message", delta.text)):
            if text:
                frames += self._opened(kind)
                self._text += text
                name = (
                    f"response.{self._thought[0]}_text.delta" if kind == "reasoning" else "response.output_text.delta"
                )
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
        item = _message(self._asked, None, "in_progress")
        if kind == "reasoning":
            item = _reasoning(self._asked, self._request, None)
        frames += self._event("response.output_item.added", output_index=len(self._output), item=item)
        if kind == "reasoning" and self._request.wants_summary:
            frames += self._event("response.reasoning_summary_part.added", **self._place(kind), part=_summary(""))
        if kind == "message":
            frames += self._event("response.content_part.added", **self._place(kind), part=_part(""))
        return frames

    def _closed(self) -> str:
        kind, text = self._kind, self._text
        if not kind:
            return ""
        place = self._place(kind)
        if kind == "reasoning":
            item = _reasoning(self._asked, self._request, text, self._seals)
            frames = self._event(f"response.{self._thought[0]}_text.done", **place, text=text)
            if self._request.wants_summary:
                frames += self._event("response.reasoning_summary_part.done", **place, part=_summary(text))
        else:
            item = _message(self._asked, text, "completed")
            frames = self._event("response.output_text.done", **place, text=text, logprobs=[])
            frames += self._event("response.content_part.done", **place, part=_part(text))
        frames += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._kind = ""
        return frames

    def _place(self, kind: str) -> dict[str, Any]:
        index = self._thought[1] if kind == "reasoning" else "content_index"
        return {"item_id": _item_id(self._asked, kind), "output_index": len(self._output), index: 0}

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


def _reasoning(asked: Asked, request: ResponsesRequest, text: str | None, seals: ThoughtSeals | None = None) -> Item:
    item: Item = {"id": _item_id(asked, "reasoning"), "type": "reasoning", "summary": []}
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
