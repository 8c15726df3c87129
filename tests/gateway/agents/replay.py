"""A recording, sent again: texts of ours in the makers' place, and this conversation's own replies and calls."""

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.gateway.agents.clients import MORE
from tests.gateway.agents.recorder import Exchange, events_of
from tests.gateway.agents.replies import Reply, reply_of
from tests.gateway.agents.scripted_engine import SCRIPT
from tests.gateway.conftest import Front

_STANDS_FOR = re.compile(r"<<(\d+) (\d+) (\w*)>>")
_CALL = re.compile(r"<<call (\d+)>>")
_ARGUMENTS = re.compile(r"<<arguments (\d+)>>")
_WORDS = ["the", "agent", "reads", "a", "file", "and", "says", "what", "it", "found", "before", "changes", "line", "of"]
_ASKS = {"title": "Write a title for this conversation. ", "summary": "Write a summary of this conversation. "}
# In short forms texts are this much shorter than the clients' own, which take minutes.
SHORTER = 5


# As clients do, while an engine that was killed comes back.
_TRIES, _PAUSE_S = 6, 0.5
# One for all: each loads the authorities of the machine. No connection is kept, because gateways are killed.
_CLIENT = httpx.Client(timeout=300, headers={"connection": "close"})


@cache
def own_text(number: int, chars: int, kind: str, session: str) -> str:
    """Equal for equal numbers; a shorter one is the beginning of a longer one."""
    words = random.Random(f"{session} {number}")
    return (_ASKS.get(kind, "") + " ".join(words.choices(_WORDS, k=chars // 2 + 1)))[:chars]


class Replay:
    """One conversation of a client before a gateway. Sessions differ in what stands for their texts. `volatile`: the
    rules that its requests name; `clock`: what its system text says of the time in a request.
    """

    volatile = ""
    clock: Callable[[int], str] | None = None

    def __init__(self, front: Front, recording: Path, session: str = "", shorter: int = SHORTER) -> None:
        first, *self.lines = [json.loads(line) for line in recording.read_text().splitlines()]
        self.script: Mapping[str, Any] = first["script"]
        self.exchanges: list[Exchange] = []
        self.agents = {"": 0}
        self._front, self._session, self._shorter = front, session, shorter
        self._replies: list[Reply] = []

    def decide(self) -> None:
        """Give the engine this recording's decisions."""
        (self._front.house.root / SCRIPT).write_text(json.dumps(self.script))

    def play(self, number: int) -> Exchange:
        """Send a recorded request."""
        line = self.lines[number]
        body = self._own(line["body"], number)
        while isinstance(tools := line["body"].get("tools"), int):
            line = self.lines[tools]
            body["tools"] = self._own(line["body"]["tools"], number)
        return self._send(self.lines[number]["path"], body)

    def more(self, number: int, varied: Any = None) -> Exchange:
        """Another question after the conversation's newest request: nobody recorded it, and it has the same shape."""
        path, body = self._newest
        key = "input" if "input" in body else "messages"
        asked = [*body[key], *self._replies[-1].messages(path), {"role": "user", "content": f"{MORE} ({number})"}]
        body = {**body, key: asked}
        return self._send(path, varied(body) if varied is not None else body)

    def aside(self, number: int) -> Exchange:
        """A recorded side call again: the conversation does not hear of it."""
        newest, replies = self._newest, list(self._replies)
        exchange = self.play(number)
        self._newest, self._replies = newest, replies
        return exchange

    def _send(self, path: str, body: dict[str, Any]) -> Exchange:
        self._newest = path, body
        if self.clock is not None:
            body = with_time(body, self.clock(len(self.exchanges)))
        headers = {**self._front.bearer(), **({"x-kvasir-volatile": self.volatile} if self.volatile else {})}
        for _ in range(_TRIES):
            answer = _CLIENT.post(self._front.gateway.url + path, json=body, headers=headers)
            if answer.status_code not in (503, 529):
                break
            time.sleep(_PAUSE_S)
        exchange = Exchange(path, body, answer.status_code, answer.headers, events_of(answer.content))
        self.exchanges.append(exchange)
        self._replies.append(reply_of(exchange) if answer.status_code == 200 else Reply(""))
        assert answer.status_code == 200, f"{answer.text}\n{self._front.failures()}"
        return exchange

    def _own(self, value: Any, number: int) -> Any:
        if isinstance(value, dict):
            return {name: self._own(each, number) for name, each in value.items()}
        if isinstance(value, list):
            return [own for each in value for own in self._item(each, number)]
        if isinstance(value, str):
            if call := _CALL.fullmatch(value):
                [(key, *_), *_] = self._replies[int(call[1])].calls
                return key
            if value.startswith("x-anthropic-billing-header:"):  # versions send another value with each request
                return f"{value} cch={random.Random(number).getrandbits(20):05x};"
            return _ARGUMENTS.sub(self._arguments, _STANDS_FOR.sub(self._text, value))
        return value

    def _item(self, value: Any, number: int) -> Sequence[Any]:
        if isinstance(value, dict) and "reply" in value:
            reply = self._replies[value["reply"]]
            calls = [
                (key, name, json.dumps({**value.get("added", {}), **json.loads(g)})) for key, name, g in reply.calls
            ]
            return replace(reply, calls=calls).messages(self.lines[number]["path"])
        return [self._own(value, number)]

    def _arguments(self, match: re.Match[str]) -> str:
        return self._replies[int(match[1])].arguments

    def _text(self, match: re.Match[str]) -> str:
        return own_text(int(match[1]), max(int(match[2]) // self._shorter, 8), match[3], self._session)


def with_time(body: dict[str, Any], time: str) -> dict[str, Any]:
    """The request, whose system text begins with a line about the time. A billing line stays the first."""
    if "system" in body:
        billing, *rest = body["system"]
        return {**body, "system": [billing, {"type": "text", "text": time}, *rest]}
    key = "input" if "input" in body else "messages"
    first, *others = body[key]
    assert first["role"] in ("system", "developer")
    text = first["content"]
    said = f"{time}\n{text}" if isinstance(text, str) else [{**text[0], "text": time}, *text]
    return {**body, key: [{**first, "content": said}, *others]}


def share(exchange: Exchange) -> float:
    """Of a prompt's tokens those that were not computed."""
    tokens, cached = exchange.tokens
    return cached / tokens
