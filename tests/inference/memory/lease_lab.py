"""Lines of hot memories beside a played store, which grants what it is told to."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey
from inference_svc.memory.agent_memory import AgentMemory, Publication
from inference_svc.memory.lines.line import Line
from inference_svc.memory.lines.line_states import Stage, Standing
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.store.answers import (
    EventsLost,
    Head,
    LeaseGrant,
    LeaseRenewal,
    StoreEvent,
)
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.token_ids import TokenChars, TokenIds
from tests.inference.turns.parts import line_parts

KV = "kv"
HEAD = Head(3, Digest.of(b"three"), 2, KV)
HELD = errors.FailedPrecondition("held", reason="LEASE_HELD", metadata={"owner": "engine-2"})


class Store:
    """Grants what it is told to, and notes what it is asked."""

    is_reachable = True

    def __init__(self) -> None:
        self.takes_s = self.release_takes_s = 0.0
        self.generation = 0  # of whatever is granted; 0: a new one each time
        self.refusals: list[errors.KvasirError] = []
        self.asked: list[tuple[str, bool]] = []
        self.renewed: list[dict[str, int]] = []
        self.released: list[tuple[str, int]] = []
        self.lost: frozenset[str] = frozenset()
        self.wanted: frozenset[str] = frozenset()
        self.answering = asyncio.Event()
        self.answering.set()
        self.watched: list[errors.KvasirError] = []  # what a watch ends with
        self.connection = self.bulk = self.leases = self.events = self

    async def acquire(
        self, agent: str, _kv: str, _owner: str, *, begins_anew: bool, timeout_s: float, **_how: object
    ) -> LeaseGrant:
        self.asked.append((agent, begins_anew))
        self._take(timeout_s)
        await self.answering.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        return LeaseGrant(self.generation or len(self.asked), HEAD)

    async def renew(self, _owner: str, _kv: str, generations: dict[str, int], timeout_s: float) -> LeaseRenewal:
        self.renewed.append(generations)
        self._take(timeout_s)
        await self.answering.wait()
        return LeaseRenewal(self.lost, self.wanted)

    async def release(self, agent: str, _kv: str, _owner: str, generation: int, timeout_s: float) -> None:
        if timeout_s < self.release_takes_s:
            raise errors.DeadlineExceeded("a busy store")
        self.released.append((agent, generation))

    def _take(self, timeout_s: float) -> None:
        if timeout_s < self.takes_s:
            raise errors.DeadlineExceeded("a busy store")

    def has_moved_within(self, _seconds: float) -> bool:
        return False

    async def watch(self) -> AsyncGenerator[StoreEvent, None]:
        if self.watched:
            raise self.watched.pop(0)
        await asyncio.Event().wait()
        yield EventsLost()


class Engine:
    """Hot memories by agent."""

    def __init__(self) -> None:
        self.memories = self
        self.model = SimpleNamespace(kv_identity_hash=KV)
        self.hot: dict[str, AgentMemory] = {}
        self.forgotten = list[AgentKey | str]()

    def sizes(self) -> dict[AgentKey, int]:
        return {AgentKey("default", agent): 1 for agent in self.hot}

    def tag_of(self, key: AgentKey) -> object:
        return self.hot.get(key.agent_id)

    def drop(self, key: AgentKey) -> None:
        self.hot.pop(key.agent_id, None)

    def drop_begun(self, of: AgentKey | str) -> None:
        self.forgotten.append(of)


class Lab:
    def __init__(self) -> None:
        self.now, self.slept_s = 100.0, 0.0
        self.store, self.engine = Store(), Engine()
        store: Any = self.store
        clocks = {"clock": lambda: self.now - self.slept_s, "lease_clock": lambda: self.now}
        self.deleted = list[AgentKey]()
        parts = line_parts(engine=self.engine, on_deleted=self.deleted.append, **clocks)
        self.lines = Lines("default", store, parts)

    def remember(self, agent: str, *, is_safe: bool = True) -> None:
        publication = Publication(Standing(HEAD, Stage.STORED if is_safe else Stage.MADE))
        self.engine.hot[agent] = AgentMemory(
            RememberedText("", TokenIds(), TokenChars()), (), manifest_pb2.Turn(), 0, "", publication
        )

    def line(self, agent: str) -> Line:
        return self.lines.line(agent)

    async def held(self, agent: str) -> None:
        self.line(agent).lease.request()
        await settle()
        assert self.counts(agent)

    def counts(self, agent: str) -> bool:
        lease = self.line(agent).lease.held
        return lease is not None and lease.counts(self.now)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
