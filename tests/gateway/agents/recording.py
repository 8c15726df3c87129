"""Recordings of what clients send: shapes, lengths and what varies, without a text, a tool's name or a property of
their makers'. `recordings/README.md` says how they are written.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir_gateway.reading.side_calls import SIDE_RULES, SUMMARY

from tests.gateway.agents.clients import EDIT, LOOK, MORE, OURS, Client
from tests.gateway.agents.recorder import Exchange
from tests.gateway.agents.replies import Reply, reply_of
from tests.gateway.agents.scripted_engine import DONE, OTHERWISE

_OWN = re.compile("(" + "|".join(re.escape(text) for text in (EDIT, LOOK, MORE, DONE, OTHERWISE, *OURS)) + ")")
_WORD = re.compile(r"[\w.-]{1,32}")
_PROSE = {"content", "text", "description", "title", "output", "instructions", "system"}
_BILLING = "x-anthropic-billing-header:"
_LEAST_COMMON = 40


def recorded(client: Client, exchanges: Sequence[Exchange], file: Path) -> None:
    """Write a client's exchanges: first what its model replies, then a request a line."""
    names = _Names()
    lines: list[Any] = []
    agents = {"": 0}
    replies: list[Reply] = []
    for each in exchanges:
        side_call, memory = each.headers.get("x-kvasir-side-call", ""), each.headers.get("x-agent-memory", "")
        agent = agents.setdefault(each.headers.get("x-agent-id", ""), len(agents))
        names.see(each.body.get("tools") or [])
        body = names.shape(each.body, replies, side_call)
        lines.append({"path": each.path, "side_call": side_call, "memory": memory, "agent": agent, "body": body})
        replies.append(reply_of(each))
    script = {EDIT: [names.call(each) for each in client.edits], LOOK: [names.call(each) for each in client.looks]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in [{"script": script}, *_without_repeats(lines)]))


def _without_repeats(lines: Sequence[Any]) -> Sequence[Any]:
    """Tools that are those of an earlier line become its number."""
    seen: list[str] = []
    for line in lines:
        tools = json.dumps(line["body"].get("tools"))
        if tools in seen and line["body"].get("tools"):
            line["body"]["tools"] = seen.index(tools)
        seen.append(tools)
    return lines


class _Names:
    """What stands for the makers' words, in one recording."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}
        self._properties: dict[str, str] = {}
        self._texts: list[str] = []
        self._written: dict[tuple[str, str], str] = {}
        self._ids: dict[str, str] = {}

    def see(self, tools: Sequence[Any]) -> None:
        for tool in tools:
            inner = tool.get("function", tool)
            if "name" in inner:
                self._tools.setdefault(inner["name"], f"tool_{len(self._tools)}")
            self.see(tool.get("tools", ()))
            self._see_properties(inner.get("parameters") or inner.get("input_schema"))

    def _see_properties(self, schema: Any) -> None:
        if isinstance(schema, dict):
            for name in schema.get("properties", {}):
                self._properties.setdefault(name, f"p{len(self._properties)}")
            for value in schema.values():
                self._see_properties(value)
        elif isinstance(schema, list):
            for value in schema:
                self._see_properties(value)

    def call(self, reply: Mapping[str, Any]) -> Any:
        if "call" not in reply:
            return reply
        return {"call": self._tools.get(reply["call"], reply["call"]), "arguments": self._renamed(reply["arguments"])}

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._properties.get(name, name): self._renamed(each) for name, each in value.items()}
        return [self._renamed(each) for each in value] if isinstance(value, list) else value

    def shape(self, value: Any, replies: Sequence[Reply], side_call: str, key: str = "") -> Any:
        if isinstance(value, list):
            return self._list(value, replies, side_call, key)
        if isinstance(value, dict):
            if key == "properties":
                return {self._properties[name]: self.shape(each, replies, side_call) for name, each in value.items()}
            return {name: self.shape(each, replies, side_call, name) for name, each in value.items()}
        return self._string(value, replies, side_call, key) if isinstance(value, str) else value

    def _list(self, values: Sequence[Any], replies: Sequence[Reply], side_call: str, key: str) -> list[Any]:
        if key == "required":
            return [self._properties.get(each, each) for each in values]
        if key == "enum":
            return [f"e{number}" if isinstance(each, str) else each for number, each in enumerate(values)]
        shaped: list[Any] = []
        for each in values:
            number = _repeated(each, replies) if key in ("messages", "input") else None
            if number is None:
                shaped.append(self.shape(each, replies, side_call, key))
            elif (repeated := self._as_repeated(each, number, replies)) not in shaped[-1:]:
                shaped.append(repeated)
        return shaped

    def _as_repeated(self, message: Any, number: int, replies: Sequence[Reply]) -> Any:
        """With the arguments that the client added to the call."""
        said = Reply.of_message(message)
        added: dict[str, Any] = {}
        if said is not None and len(said.calls) == 1:
            given = [json.loads(call[2]) for call in replies[number].calls if call[0] == said.calls[0][0]]
            added = {
                name: each for name, each in json.loads(said.calls[0][2]).items() if given and name not in given[0]
            }
        return {"reply": number, **({"added": self._renamed(added)} if added else {})}

    def _string(self, text: str, replies: Sequence[Reply], side_call: str, key: str) -> str:
        for number, reply in enumerate(replies):
            if text in reply.call_ids:
                return f"<<call {number}>>"
        if key in ("id", "call_id", "tool_call_id"):
            return self._ids.setdefault(text, f"id_{len(self._ids)}")
        if key == "name":
            return self._tools.get(text, text)
        if text.startswith(_BILLING) or (key not in _PROSE and _WORD.fullmatch(text)):
            return text
        given = {reply.arguments: number for number, reply in enumerate(replies) if reply.calls}
        if side_call == SUMMARY and any(arguments in text for arguments in given):
            return "\n".join(self._quoting(line, given) for line in text.split("\n"))
        return self._words(text, side_call)

    def _quoting(self, line: str, given: Mapping[str, int]) -> str:
        """A line of a conversation that is quoted as a text: who said it, what, and a call's arguments, apart."""
        for arguments, number in given.items():
            before, found, after = line.partition(arguments)
            if found:
                return f"{self._quoting(before, {})}<<arguments {number}>>{self._words(after, SUMMARY)}"
        return ": ".join(self._words(part, SUMMARY) for part in line.split(": ", 1))

    def _words(self, text: str, side_call: str) -> str:
        return "".join(part if _OWN.fullmatch(part) else self._foreign(part, side_call) for part in _OWN.split(text))

    def _foreign(self, text: str, side_call: str) -> str:
        """Numbers and lengths; what an earlier text begins with is its beginning here, too."""
        body = text.strip("\n")
        before, after = text[: len(text) - len(text.lstrip("\n"))], text[len(text.rstrip("\n")) :]
        if not body:
            return before
        kind = side_call if side_call and _asks(side_call, body) else ""
        if (body, kind) not in self._written:
            self._written[body, kind] = self._new(body, kind)
        return f"{before}{self._written[body, kind]}{after}"

    def _new(self, body: str, kind: str) -> str:
        best = max(range(len(self._texts)), key=lambda number: _common(self._texts[number], body), default=0)
        common = _common(self._texts[best], body) if self._texts else 0
        if common == len(body):
            return f"<<{best} {common} {kind}>>"
        begun = f"<<{best} {common} {kind}>>" if common >= _LEAST_COMMON else ""
        self._texts.append(body[common:] if begun else body)
        return f"{begun}<<{len(self._texts) - 1} {len(self._texts[-1])} {'' if begun else kind}>>"


def _asks(rule: str, text: str) -> bool:
    from kvasir_gateway.turn import Said, Turn

    return SIDE_RULES[rule].is_it(Turn(model="", messages=(Said("user", text),)))


def _common(one: str, other: str) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _repeated(message: Any, replies: Sequence[Reply]) -> int | None:
    """Which reply a client's message repeats."""
    found = Reply.of_message(message)
    if found is None:
        return None
    return next((number for number in reversed(range(len(replies))) if replies[number].has(found)), None)
