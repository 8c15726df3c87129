"""What callers of a fleet saw: of each agent its acts, of each lease who had it when; and several stores as one, whose
calls are noted.
"""

import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import AioStoreClient

from tests.campaigns.history.linear import (
    Act,
    Deletion,
    Missing,
    Read,
    Span,
    UndecidedError,
    Write,
    unexplained,
    with_two_owners,
)
from tools.kvasir_tiny.words import Dice

_Made = TypeVar("_Made")
# These took no effect. Any other failure may have been behind the effect, or before it.
_REFUSED = (
    errors.NotFound,
    errors.Conflict,
    errors.FailedPrecondition,
    errors.AlreadyExists,
    errors.InvalidArgument,
    errors.ResourceExhausted,
)
# What a clock's step may take from a lease: less than half a second is none, and a larger one is not seen exactly.
_MARGIN_S = 1.0


class Record:
    """Acts by agent, and leases."""

    def __init__(self) -> None:
        self.acts: dict[str, list[Act]] = defaultdict(list)
        self.spans = list[Span]()
        self.undecided = 0  # agents of whose acts the last judgement says nothing

    def wrote(self, agent: str, began: float, where: str, snapshot: pb.SnapshotVersion | None = None) -> None:
        """Or may have written: then its caller has no answer."""
        if snapshot is None:
            self.acts[agent].append(Write(began, math.inf, where))
        else:
            self.acts[agent].append(Write(began, time.monotonic(), where, snapshot.version, snapshot.manifest.hash))

    def problems(self) -> list[str]:
        found, self.undecided = list[str](), 0
        for agent, acts in self.acts.items():
            try:
                if act := unexplained(acts):
                    found.append(f"{agent}: no order of its acts gives {act}: {sorted(acts, key=lambda a: a.began)}")
            except UndecidedError:
                self.undecided += 1
        for before, span in with_two_owners(self.spans, _MARGIN_S):
            found.append(f"{span.line}: two owners at one time: {before}, {span}")
        return found


class AnyStore:
    """The stores of one memory: each call goes to any of them, and is noted as its caller sees it."""

    def __init__(self, stores: Sequence[AioStoreClient], record: Record, seed: int) -> None:
        self._stores, self._record, self._dice = stores, record, Dice(f"stores {seed}")

    def _any(self) -> tuple[AioStoreClient, str]:
        number = self._dice.below(len(self._stores))
        return self._stores[number], f"store {number + 1}"

    async def close(self) -> None:
        for each in self._stores:
            await each.close()

    async def list_agents(self) -> pb.ListAgentsResponse:
        """Of each store; the last answer."""
        for each in self._stores:
            page = await each.list_agents()
        return page

    # --- reads ---

    async def get_snapshot(self, agent: str, version: int | None = None) -> tuple[pb.SnapshotVersion, bytes]:
        store, where = self._any()
        began = time.monotonic()
        try:
            found = await store.get_snapshot(agent, version=version)
        except errors.NotFound:
            ended, acts = time.monotonic(), self._record.acts[agent]
            acts.append(Read(began, ended, where) if version is None else Missing(began, ended, where, version))
            raise
        self._read(agent, began, where, found[0], is_newest=version is None)
        return found

    async def list_snapshots(self, agent: str) -> pb.ListSnapshotsResponse:
        store, where = self._any()
        began = time.monotonic()
        page = await store.list_snapshots(agent)
        for number, each in enumerate(page.snapshots):
            self._read(agent, began, where, each, is_newest=number == 0)
        return page

    def _read(self, agent: str, began: float, where: str, found: pb.SnapshotVersion, *, is_newest: bool) -> None:
        about = found.version, found.manifest.hash, is_newest
        self._record.acts[agent].append(Read(began, time.monotonic(), where, *about))

    async def export_agent(self, agent: str, version: int) -> AsyncIterator[bytes]:
        async for piece in self._any()[0].export_agent(agent, version=version):
            yield piece

    # --- writes ---

    async def rollback_agent(self, agent: str, version: int) -> pb.SnapshotVersion:
        return await self._write(agent, lambda store: store.rollback_agent(agent, version), lambda made: made)

    async def import_agent(self, agent: str, archive: Iterable[bytes], *, replace: bool) -> pb.SnapshotVersion:
        def sent(store: AioStoreClient) -> Awaitable[pb.SnapshotVersion]:
            return store.import_agent(agent, archive, replace=replace)

        return await self._write(agent, sent, lambda made: made)

    async def fork_agent(self, source: str, agent: str) -> pb.Agent:
        return await self._write(agent, lambda store: store.fork_agent(source, agent), lambda made: made.lines[0])

    async def delete_agent(self, agent: str) -> None:
        store, where = self._any()
        began, acts = time.monotonic(), self._record.acts[agent]
        try:
            await store.delete_agent(agent)
        except _REFUSED:
            raise
        except BaseException:
            acts.append(Deletion(began, math.inf, where))
            raise
        acts.append(Deletion(began, time.monotonic(), where))

    async def _write(
        self,
        agent: str,
        call: Callable[[AioStoreClient], Awaitable[_Made]],
        snapshot_of: Callable[[_Made], pb.SnapshotVersion],
    ) -> _Made:
        store, where = self._any()
        began = time.monotonic()
        try:
            made = await call(store)
        except _REFUSED:
            raise
        except BaseException:
            self._record.wrote(agent, began, where)
            raise
        self._record.wrote(agent, began, where, snapshot_of(made))
        return made

    # --- leases ---

    async def acquire_lease(self, agent: str, kv_hash: str, owner: str, ttl_s: float) -> tuple[pb.LeaseToken, Span]:
        """The lease, and the time in which it surely is this owner's."""
        sent = time.monotonic()
        answer = await self._any()[0].acquire_lease(agent, kv_hash, owner, ttl_s=ttl_s)
        return answer.lease, Span(agent, owner, time.monotonic(), sent + ttl_s)

    async def release_lease(self, agent: str, kv_hash: str, lease: pb.LeaseToken) -> None:
        await self._any()[0].release_lease(agent, kv_hash, lease)
