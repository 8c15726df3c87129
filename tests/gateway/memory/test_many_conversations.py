"""Conversations without a name that begin with the same long instructions hold them once, in the store and in the pool,
and are told apart.
"""

import random
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient
from kvasir.formats import manifest
from kvasir.formats.block_hash import BLOCK_TOKENS

from tests.gateway.agents.__main__ import long_model
from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL

CHAT = "/v1/chat/completions"
LINE = "Rule {}: whoever works at the quay writes down what comes and what goes, and says so when asked. "


class Talk:
    """One conversation, and where its answers came from."""

    def __init__(self, front: Front, system: str, number: int) -> None:
        self._front = front
        self._said: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"I am number {number}."},
        ]
        self.agents: list[str] = []
        self.prompt = self.cached = 0

    def turn(self) -> None:
        body = {"model": "any", "messages": self._said, "max_tokens": 4}
        url, headers = self._front.gateway.url + CHAT, self._front.bearer()
        answer = httpx.post(url, json=body, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        self._said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        usage = answer.json()["usage"]
        self.prompt, self.cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        self.agents.append(answer.headers["x-agent-id"])


def held_bytes(front: Front) -> int:
    """The pool's pages in use, as the engine tells whoever owns its socket."""
    with front.house.client() as owner:
        return int(owner.get_stats().engine.kv_memory_used_bytes)


def memory_of(client: InferenceClient, talk: Talk) -> manifest_pb2.Manifest:
    return manifest.parse(client.get_snapshot(talk.agents[-1])[1])


def tell_apart(front: Front, count: int, rules: int, least_tokens: int, *, kills: bool) -> None:
    """Two turns of each conversation, the second ones in another order; `kills`: a third one after a kill."""
    system = f"For {count}. " + "".join(map(LINE.format, range(rules)))
    talks = [Talk(front, system, number) for number in range(count)]
    with front.house.client(front.keys["ada"]) as client:
        before = held_bytes(front)
        talks[0].turn()
        one = held_bytes(front) - before
        assert talks[0].prompt >= least_tokens
        shared = talks[0].prompt // BLOCK_TOKENS - 1  # the last block holds what each says of itself
        for talk in talks[1:]:
            talk.turn()
            assert talk.cached >= shared * BLOCK_TOKENS
        _tell_apart_again(talks)
        # Each has a page or two of its own; a page is as much of the first one as a block is of its prompt.
        page = one / -(-talks[0].prompt // BLOCK_TOKENS)
        assert held_bytes(front) - before <= one + count * 3 * page
        stored = [[block.hash for block in memory_of(client, talk).blocks] for talk in talks]
        assert len({tuple(blocks[:shared]) for blocks in stored}) == 1
        assert len({block for blocks in stored for block in blocks}) <= shared + 2 * count
    if kills:
        front.gateway.kill()
        front.house.restart()
        front.gateway.start()
        _tell_apart_again(talks)
    for talk in talks:
        httpx.delete(f"{front.gateway.url}/v1/agents/{talk.agents[0]}", headers=front.bearer())


def _tell_apart_again(talks: list[Talk]) -> None:
    for talk in random.Random(7).sample(talks, len(talks)):
        before = talk.prompt
        talk.turn()
        assert talk.cached >= before
    assert len({talk.agents[0] for talk in talks}) == len(talks)
    assert all(len(set(talk.agents)) == 1 for talk in talks)


@pytest.mark.long(5)
def test_conversations_with_the_same_instructions_hold_them_once_and_are_distinguished(front: Front) -> None:
    tell_apart(front, count=5, rules=26, least_tokens=640, kills=False)


@pytest.mark.long(160)
@pytest.mark.timeout(900)
def test_two_hundred_conversations_with_eight_thousand_tokens_of_instructions_hold_them_once(tmp_path: Path) -> None:
    model = long_model(tmp_path / MODEL)
    with running_front(tmp_path / "front", model=model, engine_options=("--memory-gib", "1")) as front:
        tell_apart(front, count=200, rules=360, least_tokens=8192, kills=True)
