"""Replies as the memories of agents have them, read through the engine."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import NotFound
from kvasir.formats import manifest
from kvasir.formats.digest import Digest
from kvasir_gateway import conversations as module
from kvasir_gateway.engine import CallerAtEngine
from kvasir_gateway.page.conversation.transcript import transcript
from kvasir_gateway.reading.records import Made, _replies_behind
from kvasir_gateway.turn import Place, Said

from tests.gateway.dialects.test_conversations import conversations, reply, user
from tests.made_models.synthetic import SMALL


class Remembering:
    """An engine's client with one agent, of this memory."""

    def __init__(self, *messages: manifest_pb2.Message) -> None:
        self._data = manifest.build(
            kv_identity=SMALL,
            token_ids=[1],
            text="x",
            token_chars=[1],
            tail=Digest.of(b"tail"),
            messages=messages,
            created_unix_ms=5,
        )

    async def get_snapshot(self, _agent_id: str, *_version: object) -> tuple[None, bytes]:
        return None, self._data


def _noted(makers: list[threading.Thread], make: Callable[[], Made]) -> Made:
    makers.append(threading.current_thread())
    return make()


def test_a_reply_that_spelled_a_special_token_is_read_as_it_was_told() -> None:
    said = [
        manifest_pb2.Message(role="user", content="What ends a message?"),
        manifest_pb2.Message(role="assistant", content="<\ufdd0|im_end|>", is_reply=True),
    ]
    caller = CallerAtEngine(Remembering(*said))  # type: ignore[arg-type]
    assert asyncio.run(caller.records.messages("a")) == [user("What ends a message?"), reply("<|im_end|>")]
    makers: list[threading.Thread] = []
    beside = CallerAtEngine(Remembering(*said), lambda make: asyncio.to_thread(_noted, makers, make))  # type: ignore[arg-type]
    assert asyncio.run(beside.records.messages("a")) == asyncio.run(caller.records.messages("a"))
    shown = asyncio.run(transcript(beside, "a", None)).messages
    assert threading.main_thread() not in makers
    assert len(makers) == 2
    assert [message.content for message in shown] == ["What ends a message?", "<|im_end|>"]


class Slow:
    """An engine's client whose agents take a moment to be read, and are gone then."""

    def __init__(self) -> None:
        self.calls = self.open = self.most = 0

    async def list_snapshots(self, _agent_id: str) -> None:
        self.calls, self.open = self.calls + 1, self.open + 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(0.01)
        finally:
            self.open -= 1
        raise NotFound("gone")


async def test_ids_of_many_agents_are_looked_up_a_few_at_a_time_and_no_longer_than_somebody_waits() -> None:
    slow = Slow()
    caller = CallerAtEngine(slow)  # type: ignore[arg-type]
    places = [Place(f"agent {number % 20}", f"turn {number}", 1, "") for number in range(60)]
    assert await caller.records.said_until(places, iter) == {}
    assert (slow.calls, slow.most) == (20, 8)
    leaving = asyncio.create_task(caller.records.said_until(places, iter))
    await asyncio.sleep(0.005)
    assert slow.open == 8
    leaving.cancel()
    await asyncio.sleep(0.02)
    assert (slow.calls, slow.open) == (28, 0)


def test_many_ids_of_one_agent_cost_one_walk_through_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [make(str(number)) for number in range(100) for make in (user, reply)]
    known, digested, plain = conversations(), list[Said](), module.canonical
    places = [
        Place("a", "", number, digest) for number, digest in zip(range(200), known.digests_of(said), strict=False)
    ]
    others = [Place("a", "", number, places[7].digest) for number in (1, 9, -193, 200, 1000)]
    monkeypatch.setattr(module, "canonical", lambda one: (digested.append(one), plain(one))[1])
    found = _replies_behind(said, [*places, *others], known.digests_of)
    assert found == {place: said[: place.number + 1] for place in places[1::2]}
    assert digested == said
