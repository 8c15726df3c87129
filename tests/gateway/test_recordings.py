"""Conversations of agent clients, as recorded (`recordings/README.md`): from the second turn on nothing is computed
twice, there is one memory, and nothing that they send by default is refused."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Front

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))
_STANDS_FOR = re.compile(r"<<(\d+) (\d+)>>")
_WORDS = [
    "the",
    "agent",
    "reads",
    "a",
    "file",
    "and",
    "says",
    "what",
    "it",
    "found",
    "before",
    "it",
    "changes",
    "another",
    "line",
    "of",
    "it",
]
# Texts are this much shorter than the clients' own, which would take minutes.
SHORTER = 5


def own_text(number: int, chars: int) -> str:
    words = random.Random(number)
    return " ".join(words.choice(_WORDS) for _ in range(chars))[:chars]


def played(value: Any, replies: Iterator[Any]) -> Any:
    """A recorded value with texts of ours, and this conversation's replies."""
    if isinstance(value, dict):
        if value == {"role": "assistant"}:
            return next(replies)
        return {name: played(each, replies) for name, each in value.items()}
    if isinstance(value, list):
        return [played(each, replies) for each in value]
    if isinstance(value, str) and (match := _STANDS_FOR.fullmatch(value)):
        return own_text(int(match[1]), max(int(match[2]) // SHORTER, 8))
    return value


class Conversation:
    """A client's turns before a gateway."""

    def __init__(self, front: Front, recording: Path) -> None:
        self._front = front
        self._lines = [json.loads(line) for line in recording.read_text().splitlines()]
        self._tools = self._lines[0]["body"]["tools"]
        self._replies: list[Any] = []
        self.agents: set[str] = set()

    def turn(self, number: int) -> float:
        """Send it as it was sent; the share of its prompt that was not computed."""
        line = self._lines[number]
        body = played({"tools": self._tools, **line["body"]}, iter(self._replies))
        for block in body.get("system", [])[:1]:  # versions of the client send another value with each request
            block["text"] += f" cch={random.Random(number).getrandbits(20):05x};"
        answer = httpx.post(
            self._front.gateway.url + line["path"], json=body, headers=self._front.bearer(), timeout=120
        )
        assert answer.status_code == 200, answer.text
        self.agents.add(answer.headers["x-agent-id"])
        events = [json.loads(text.removeprefix("data: ")) for text in answer.text.splitlines() if text[:5] == "data:"]
        if "messages" in body:
            return self._anthropic(events)
        return self._responses(events[-1]["response"])

    def _anthropic(self, events: list[Any]) -> float:
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        self._replies.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        used = next(event["usage"] for event in events if event["type"] == "message_delta")
        cached = used["cache_read_input_tokens"]
        return float(cached / (cached + used["input_tokens"]))

    def _responses(self, response: Any) -> float:
        [reply] = response["output"]
        self._replies.append(reply)
        used = response["usage"]
        return float(used["input_tokens_details"]["cached_tokens"] / used["input_tokens"])


@pytest.mark.long(60)
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_a_recorded_conversation_computes_nothing_twice_also_after_a_kill(own_front: Front, recording: Path) -> None:
    talk = Conversation(own_front, recording)
    assert talk.turn(0) == 0
    assert talk.turn(1) >= 0.98
    own_front.house.restart()
    assert talk.turn(2) >= 0.98
    assert len(talk.agents) == 1, "one memory"
    assert "request.refused" not in own_front.gateway.log


def test_each_client_has_a_recording_of_three_turns() -> None:
    assert {path.stem: len(path.read_text().splitlines()) for path in RECORDINGS} == {"claude_code": 3, "codex": 3}
