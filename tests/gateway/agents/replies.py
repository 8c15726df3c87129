"""A model's reply, in whatever API's words it came, and as clients repeat it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gateway.agents.recorder import Exchange

Call = tuple[str, str, str]  # id, name, arguments


@dataclass(frozen=True)
class Reply:
    text: str
    calls: Sequence[Call] = ()
    items: Sequence[Any] = ()  # of the Responses API, as they came

    @property
    def call_ids(self) -> set[str]:
        return {call[0] for call in self.calls}

    @property
    def arguments(self) -> str:
        """Of its first call, as JavaScript writes them."""
        [(_, _, given), *_] = self.calls
        return json.dumps(json.loads(given), ensure_ascii=False, separators=(",", ":"))

    def has(self, said: "Reply") -> bool:
        """Whether a client's message repeats this reply, or an item of it."""
        if said.calls:
            return said.call_ids <= self.call_ids
        return not self.calls and said.text.strip() == self.text.strip()

    @classmethod
    def of_message(cls, message: Any) -> "Reply | None":
        if not isinstance(message, dict):
            return None
        if message.get("type") == "function_call":
            return cls("", [(message["call_id"], message["name"], message["arguments"])])
        if message.get("role") != "assistant":
            return None
        content, calls = message.get("content"), list(message.get("tool_calls") or ())
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        text = "".join(part.get("text", "") for part in parts)
        blocks = [part for part in parts if part.get("type") == "tool_use"]
        return cls(
            text,
            [(block["id"], block["name"], json.dumps(block["input"])) for block in blocks]
            + [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in calls],
        )

    def messages(self, path: str) -> list[Any]:
        """As a client of the API at this path repeats it."""
        if "responses" in path:
            return list(self.items)
        if "/v1/messages" in path:
            text = [{"type": "text", "text": self.text}] if self.text else []
            uses = [
                {"type": "tool_use", "id": key, "name": name, "input": json.loads(given)}
                for key, name, given in self.calls
            ]
            return [{"role": "assistant", "content": [*text, *uses]}]
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": name, "arguments": given}}
                for key, name, given in self.calls
            ]
        return [message]


def reply_of(exchange: Exchange) -> Reply:
    """The whole reply of a stream, or of one object."""
    if "responses" in exchange.path:
        items = next((event["response"]["output"] for event in reversed(exchange.events) if "response" in event), [])
        said = [Reply.of_message(item) for item in items]
        there = [each for each in said if each is not None]
        return Reply("".join(each.text for each in there), [call for each in there for call in each.calls], items)
    if "/v1/messages" in exchange.path:
        return _of_anthropic(exchange.events)
    return _of_chat(exchange.events)


def _of_anthropic(events: Sequence[Mapping[str, Any]]) -> Reply:
    blocks: dict[int, Any] = {}
    for event in events:
        if event.get("type") == "message":
            return Reply.of_message(event) or Reply("")
        if event.get("type") == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "partial": ""}
        if event.get("type") == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["text"] = blocks[event["index"]].get("text", "") + delta.get("text", "")
            blocks[event["index"]]["partial"] += delta.get("partial_json", "")
    uses = [block for block in blocks.values() if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks.values() if block["type"] == "text")
    return Reply(text, [(use["id"], use["name"], use["partial"] or "{}") for use in uses])


def _of_chat(events: Sequence[Mapping[str, Any]]) -> Reply:
    text, calls = "", {}
    for event in events:
        for choice in event.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            text += said.get("content") or ""
            for number, each in enumerate(said.get("tool_calls") or ()):
                known = calls.setdefault(each.get("index", number), ["", "", ""])
                known[0] += each.get("id") or ""
                known[1] += each["function"].get("name") or ""
                known[2] += each["function"].get("arguments") or ""
    return Reply(text, [(key, name, given) for key, name, given in calls.values()])
