"""Namespace `b`, which does ordinary work and counts how long it takes.

One round is what a day consists of: it asks the gateway for its models, its health and its page, looks at an agent,
asks for blobs and writes one, forks an agent, and lets the fork, whose memory only the store has, take a turn. Whoever
waits for this waits for the store and the engine both.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
from kvasir.clients import AioInferenceClient, AioStoreClient
from kvasir.errors import KvasirError, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.fairness.arena import Arena
from tests.made_models.synthetic import SMALL, SyntheticAgent

GIVES_UP_S = 10.0
_PAUSE_S = 0.01
# The operator's page asks engine and store for all that it shows.
_HTTP = {"http": "/v1/models", "health": "/healthz", "page": "/"}
_SEED = "the seed"
_STORY = "The market was full of people this morning. We cooked too much and gave the rest away. " * 24
_TOKENS = 8


@dataclass
class Worked:
    """What `b` met: seconds by what it did, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time of a call; one that failed took as long as the caller's patience."""
        began = time.monotonic()
        try:
            yield
        except KvasirError as error:
            self.failures[f"{what}: {error.reason}"] += 1
            self.seconds.setdefault(what, []).append(max(GIVES_UP_S, time.monotonic() - began))
        else:
            self.seconds.setdefault(what, []).append(time.monotonic() - began)

    def percentile(self, what: str, fraction: float) -> float:
        """Nan when it was never done."""
        ordered = sorted(self.seconds.get(what, ()))
        return ordered[math.ceil(fraction * len(ordered)) - 1] if ordered else math.nan


class Worker:
    """`b`, with its clients."""

    def __init__(
        self,
        store: AioStoreClient,
        engine_at_store: AioStoreClient,
        engine: AioInferenceClient,
        gateway: httpx.AsyncClient,
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._writer = engine_at_store
        self._engine = engine
        self._numbers = iter(range(1_000_000_000))
        self._kinds = itertools.cycle(("turn", "formed"))
        self._blobs = list(SyntheticAgent(SMALL, 7).turn(600).new_blobs.items())

    async def prepare(self) -> None:
        """The agent that all others are forks of."""
        await self._engine.reply(agent_id=_SEED, prompt=_STORY, sampling={"max_tokens": 2}, timeout_s=60.0)
        await self._writer.put_blobs(dict(self._blobs))

    async def work(self, seconds: float) -> Worked:
        """Rounds, for so long; at least two."""
        worked, until, rounds = Worked(), time.monotonic() + seconds, 0
        while time.monotonic() < until or rounds < 2:
            await self._round(worked)
            rounds += 1
            await asyncio.sleep(_PAUSE_S)
        return worked

    async def _round(self, worked: Worked) -> None:
        for what, path in _HTTP.items():
            with worked.timed(what):
                await self._ask_gateway(path)
        with worked.timed("look"):
            await self._store.get_agent(_SEED)
        with worked.timed("read"):
            async for _ in self._store.get_blobs([self._blobs[0][0]], timeout_s=GIVES_UP_S):
                pass
        with worked.timed("ask"):
            await self._writer.find_missing([digest for digest, _ in self._blobs])
        with worked.timed("write"):
            content = SyntheticAgent(SMALL, next(self._numbers)).turn(64).new_blobs
            await self._writer.put_blobs(content, stall_timeout_s=GIVES_UP_S)
        name = f"fork {next(self._numbers)}"
        with worked.timed("fork"):
            await self._store.fork_agent(_SEED, name)
        kind = next(self._kinds)
        with worked.timed(kind):
            await self._turn(name, worked, has_format=kind == "formed")
        with worked.timed("delete"):
            await self._store.delete_agent(name)

    async def _ask_gateway(self, path: str) -> None:
        """Raises KvasirError for what is no answer."""
        try:
            answer = await self._gateway.get(path, headers={"accept": "text/html" if path == "/" else "*/*"})
        except httpx.HTTPError as error:
            raise Unavailable(type(error).__name__, reason=type(error).__name__.upper()) from None
        if answer.status_code != 200:
            raise Unavailable("no answer", reason=f"HTTP_{answer.status_code}")

    async def _turn(self, name: str, worked: Worked, *, has_format: bool) -> None:
        last: float | None = None
        # Another format each time: it must be tried before it is used.
        regex = f"([a-z A-Z.,]|{next(self._numbers)}){{100}}" if has_format else None
        turn: Any = self._engine.generate(
            agent_id=name,
            prompt=_STORY + "What did we cook?",
            sampling={"max_tokens": _TOKENS},
            regex=regex,
            timeout_s=GIVES_UP_S,
        )
        async for event in turn:
            now = time.monotonic()
            if event.HasField("started") and event.started.miss not in _USUAL_MISSES:
                worked.misses[pb.MissReason.Name(event.started.miss).removeprefix("MISS_REASON_")] += 1
            if event.HasField("delta") and last is not None:
                worked.seconds.setdefault("gap", []).append(now - last)
            if event.HasField("delta"):
                last = now


# Of a fork everything is reused but what is new.
_USUAL_MISSES = (pb.MISS_REASON_UNSPECIFIED, pb.MISS_REASON_TEXT_DIFFERS)


@asynccontextmanager
async def open_worker(arena: Arena) -> AsyncIterator[Worker]:
    """`b`, connected and prepared."""
    house, tokens = arena.house, arena.tokens
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                AioStoreClient.connect(house.store.address, token=tokens[name], timeout_s=GIVES_UP_S)
            )
            for name in ("b", "b-engine")
        ]
        engine = await stack.enter_async_context(AioInferenceClient.connect(house.engine.address, token=tokens["b"]))
        key = {"authorization": f"Bearer {tokens['b']}"}
        client = httpx.AsyncClient(base_url=arena.gateway.url, headers=key, timeout=GIVES_UP_S)
        worker = Worker(stores[0], stores[1], engine, await stack.enter_async_context(client))
        await worker.prepare()
        yield worker
