"""What one namespace, or a program without a key, may try at the HTTP gateway."""

import asyncio
import contextlib
import json
from collections.abc import Iterator

import httpx2 as httpx
from kvasir_gateway.page.conversation.talking import SAY_BYTES

from tests.campaigns.fairness.attacker import Attacker

_SILENT = 5_000
_CALLERS = 24
_PAGES = 200
_BODY_BYTES = (8 << 20) - 2_000


async def silent_connections(attacker: Attacker) -> None:
    """Thousands of connections without a byte, opened again as they are closed."""
    host, port = attacker.gateway_url.removeprefix("http://").split(":")

    async def silent(_index: int) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            await reader.read()
            writer.close()
        await asyncio.sleep(0.2)

    attacker.flood(_SILENT, silent)


async def large_bodies(attacker: Attacker) -> None:
    """Bodies of 8 MiB: one text, 10,000 messages, a message of one letter many times, nested arrays."""
    bodies = list(_bodies())
    client = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=_CALLERS))

    async def ask(index: int) -> None:
        body, key = bodies[index % len(bodies)], attacker.tokens[index % len(attacker.tokens)]
        with contextlib.suppress(httpx.HTTPError):
            url = f"{attacker.gateway_url}/v1/chat/completions"
            answer = await client.post(url, content=body, headers={"authorization": f"Bearer {key}"})
            if answer.status_code == 429:
                await asyncio.sleep(0.2)

    attacker.flood(_CALLERS, ask)


async def large_forms(attacker: Attacker) -> None:
    """Forms of the page as large as they may be, of escapes alone, and pages between them."""
    form = ("text=" + "%C3%A9" * ((SAY_BYTES - 5) // 6)).encode()
    client = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=_PAGES))

    async def ask(index: int) -> None:
        headers = {"x-api-key": attacker.tokens[index % len(attacker.tokens)], "accept": "text/html"}
        headers |= {"content-type": "application/x-www-form-urlencoded"}
        with contextlib.suppress(httpx.HTTPError):
            if index % 2:
                answer = await client.post(f"{attacker.gateway_url}/page/say", content=form, headers=headers)
            else:
                answer = await client.get(f"{attacker.gateway_url}/page/status", headers=headers)
            if answer.status_code == 429:
                await asyncio.sleep(0.2)

    attacker.flood(_PAGES, ask)


def _bodies() -> Iterator[bytes]:
    letter = {"role": "user", "content": "a"}
    for messages in (
        [{"role": "user", "content": "a" * _BODY_BYTES}],
        [{"role": "user", "content": "a" * 780}] * 9_999,
        [letter] * (_BODY_BYTES // 36),
    ):
        yield json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()
    nested = {"x": [["a"] * 7] * 31_000}
    yield json.dumps({"model": "m", "max_tokens": 1, "metadata": nested, "messages": [letter]}).encode()
