"""Readers of streams who pause, and who leave and come again: each gets every word, and nothing of them stays."""

import asyncio
import json
import os
import random
import socket
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tests.gateway.conftest import Front
from tests.gateway.http_load import seconds_until_idle
from tests.gateway.serving import MODEL
from tests.made_models.sampling import sampled

READERS = 4
ROUNDS = sampled(1, of=40)
TOKENS = sampled(40, of=100)
SEED = int(os.environ.get("KVASIR_SEED", "1"))
_MORE_BYTES = 64 << 20
# Little fits between gateway and reader: who pauses is waited for.
_SMALL = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
_ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me about the market, and what you saw there."}],
    "logit_bias": {"2": -100},  # the reply does not end before its bound
    "stream": True,
    "temperature": 0,
    "max_tokens": TOKENS,
    "logprobs": True,
    "top_logprobs": 20,
}


class Reader:
    """One reader with habits of its own."""

    def __init__(self, front: Front, name: str, chance: random.Random) -> None:
        self._front = front
        self._chance = chance
        self._comes_again = chance.choice((0, 0, 1, 2))
        self._headers = {**front.bearer(chance.choice(("ada", "bob", "eve"))), "x-agent-id": name}
        self._longest_s = chance.choice((0.0, 0.02, 0.3))

    async def read(self) -> str:
        """The whole text. Who leaves asks for the same again."""
        for left in reversed(range(self._comes_again + 1)):
            text = await self._once(leaves_after=self._chance.randrange(100_000) if left else None)
        assert text is not None
        return text

    async def _once(self, leaves_after: int | None) -> str | None:
        transport = httpx.AsyncHTTPTransport(socket_options=_SMALL)
        url = f"{self._front.gateway.url}/v1/chat/completions"
        data = b""
        async with (
            httpx.AsyncClient(transport=transport, timeout=120) as client,
            client.stream("POST", url, json=_ASKED, headers=self._headers) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for piece in answer.aiter_raw(chunk_size=2048):
                data += piece
                if leaves_after is not None and len(data) > leaves_after:
                    return None
                await asyncio.sleep(self._chance.uniform(0, self._longest_s) if self._chance.random() < 0.2 else 0)
        return text_of(data)


def text_of(data: bytes) -> str:
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", "the stream is whole"
    chunks: list[Any] = [json.loads(line) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.long(3)
@pytest.mark.timeout(3600)
def test_readers_who_pause_leave_and_come_again_get_every_word(front: Front) -> None:
    chance = random.Random(SEED)
    gateway = psutil.Process(front.gateway.pid)

    async def at_once(number: int) -> list[str]:
        readers = [Reader(front, f"slow {number}-{each}", chance) for each in range(READERS)]
        return await asyncio.gather(*(reader.read() for reader in readers))

    asked = {**_ASKED, "stream": False, "logprobs": False, "top_logprobs": None}
    headers = {**front.bearer(), "x-agent-memory": "none"}
    answer = httpx.post(f"{front.gateway.url}/v1/chat/completions", json=asked, headers=headers, timeout=120)
    expected = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    before = 0
    for number in range(ROUNDS):
        assert set(asyncio.run(at_once(number))) == {expected}
        before = before or gateway.memory_info().rss
    assert seconds_until_idle(front, within_s=60) is not None
    grown = gateway.memory_info().rss - before
    print(f"{ROUNDS} rounds of {READERS} readers, seed {SEED}: the gateway grew by {grown >> 20} MiB")
    assert grown < _MORE_BYTES
