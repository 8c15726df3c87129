"""What one namespace, or a program without a key, may try at the HTTP gateway."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Iterator, Mapping

import httpx2 as httpx
from kvasir_gateway.page.conversation.talking import SAY_BYTES

from tests.campaigns.fairness.attacker import Attacker
from tests.campaigns.fairness.store_attacks import many_agents
from tests.gateway.page.html_page import parsed

_SILENT = 5_000
_CALLERS = 24
_PAGES = 200
_MANY = httpx.Limits(max_connections=_PAGES)
_BODY_BYTES = (8 << 20) - 2_000
_ESCAPES = "é" * (SAY_BYTES // 6 - 200)
_REFUSED_PAUSE_S = 0.2


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
    client = httpx.AsyncClient(
        base_url=attacker.gateway_url, timeout=120, limits=httpx.Limits(max_connections=_CALLERS)
    )

    async def ask(index: int) -> None:
        body, key = bodies[index % len(bodies)], attacker.tokens[index % len(attacker.tokens)]
        headers = {"authorization": f"Bearer {key}"}
        await _answered(client.post("/v1/chat/completions", content=body, headers=headers))

    attacker.flood(_CALLERS, ask)


async def large_forms(attacker: Attacker) -> None:
    """Forms of the page as large as they may be, of escapes alone: turns, and such as an earlier visit or another site
    sends. Pages between them."""
    client = httpx.AsyncClient(base_url=attacker.gateway_url, timeout=120, limits=_MANY)
    keys = [{"x-api-key": token, "accept": "text/html"} for token in attacker.tokens]
    tokens = [await _form_token(client, key) for key in keys]
    own = {"content-type": "application/x-www-form-urlencoded", "origin": attacker.gateway_url}
    foreign = own | {"origin": "http://127.0.0.1:1"}

    async def ask(index: int) -> None:
        place = index // 4 % len(keys)
        form = {"form_token": tokens[place], "id": f"agent {index}", "head": "0", "text": _ESCAPES}
        match index % 4:
            case 1:
                await _answered(client.post("/page/say", data=form, headers=keys[place] | own))
            case 3:
                sender = own if index % 8 == 3 else foreign
                await _answered(client.post("/page/say", data=form | {"form_token": "0"}, headers=keys[place] | sender))
            case _:
                await _answered(client.get("/page/status", headers=keys[place]))

    attacker.flood(_PAGES, ask)


async def small_calls(attacker: Attacker) -> None:
    """Calls that need little each, by many: lists of agents and models, an agent that is not there, a token count."""
    client = httpx.AsyncClient(base_url=attacker.gateway_url, timeout=120, limits=_MANY)
    counted = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

    async def ask(index: int) -> None:
        key = {"x-api-key": attacker.tokens[index % len(attacker.tokens)]}
        match index // len(attacker.tokens) % 4:
            case 0:
                await _answered(client.get("/v1/agents", headers=key))
            case 1:
                await _answered(client.get("/v1/models", headers=key))
            case 2:
                await _answered(client.get("/v1/agents/nobody", headers=key))
            case _:
                await _answered(client.post("/v1/messages/count_tokens", json=counted, headers=key))

    attacker.flood(_PAGES, ask)


async def long_lists(attacker: Attacker) -> None:
    """The page's list, and lists of a thousand agents as JSON, of a namespace that has thousands, by eight readers."""
    await many_agents(attacker, 3_000)
    client = httpx.AsyncClient(base_url=attacker.gateway_url, timeout=120, limits=_MANY)

    async def ask(index: int) -> None:
        key = {"x-api-key": attacker.tokens[index % len(attacker.tokens)]}
        if index // len(attacker.tokens) % 2:
            await _answered(client.get("/v1/agents", params={"page_size": 1000}, headers=key))
        else:
            await _answered(client.get("/page/", headers=key | {"accept": "text/html"}))

    attacker.flood(8, ask)


async def strangers(attacker: Attacker) -> None:
    """Many requests that need no key: health checks, descriptions, sign-ins, refusals."""
    client = httpx.AsyncClient(base_url=attacker.gateway_url, timeout=120, limits=_MANY)
    html = {"accept": "text/html"}
    own = html | {"origin": attacker.gateway_url}

    async def ask(index: int) -> None:
        match index % 5:
            case 0 | 1:
                await _answered(client.get("/healthz"))
            case 2:
                await _answered(client.get("/openapi.json"))
            case 3:
                await _answered(client.get("/", headers=html))
            case _:
                await _answered(client.post("/page/login", data={"form_token": "0", "key": "k" * 4096}, headers=own))

    attacker.flood(_PAGES, ask)


async def _answered(call: Awaitable[httpx.Response]) -> None:
    """A call's end, and a pause where it was one too many."""
    with contextlib.suppress(httpx.HTTPError):
        if (await call).status_code == 429:
            await asyncio.sleep(_REFUSED_PAUSE_S)


async def _form_token(client: httpx.AsyncClient, key: Mapping[str, str]) -> str:
    page = parsed((await client.get("/page/chat", headers=key)).text)
    return page.fields(page.form("say"))["form_token"]


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
