"""The engine's calls to the cache store: memories, blobs, commits, leases, events.

Reading delays the first token, so a turn has one small budget of time without progress for all of its reads; bytes that
arrive earn more. Every failed read is a miss with its reason. Bytes that were read are checked against their digest
before they are used.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients.aio.handed_upload import FEATURE, put_by_files
from kvasir.formats.block_file import FileBytes
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.store.answers import (
    LEASE_TTL_S,
    NEVER_MOVED,
    NO_HEAD,
    AgentHeads,
    EventCursor,
    Head,
    LastMove,
    LeaseGrant,
    LeaseRenewal,
    StoreEvent,
    StoreMiss,
    Version,
    answer_checked,
    event_of,
    found_prefix,
    head_of,
    last_move_of,
    miss_of,
    moves,
    settings_of,
    takes_back,
)
from inference_svc.memory.store.connection import StoreClients, StoreConnection
from inference_svc.memory.store.files import StoreFiles
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.stored_windows import FoundPrefix

_MAX_BLOCK_HASHES = 10_000
_HASHED_AT_ONCE_BYTES = 128 << 10


class RemoteCache(StoreConnection):
    """One namespace of one cache store, seen from the engine."""

    def __init__(
        self,
        clients: StoreClients,
        namespace: str,
        files: StoreFiles | None = None,
        token_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As `StoreConnection`. `files`: those of the store, if they may be read."""
        super().__init__(clients, namespace, token_file, clock)
        self._files = files
        self._cursor: cachestore_pb2.EventCursor | None = None

    # --- reading: a failure is a StoreMiss ---

    async def heads(self, agent_id: str, kv_identity_hash: str, budget: Budget) -> AgentHeads:
        """The agent's newest version, under whichever KV identity."""
        try:
            agent = await self._read(lambda: self.client.get_agent(agent_id), budget)
        except errors.NotFound:
            return AgentHeads()
        with answer_checked("the store's answer about the agent"):
            lines = [head_of(line) for line in agent.lines]
        newest = max(lines, key=lambda line: line.version, default=NO_HEAD)
        ours = next((line for line in lines if line.kv_identity_hash == kv_identity_hash), None)
        return AgentHeads(newest, ours if ours != newest else None, settings_of(agent))

    async def last_move(self, agent_id: str, within_s: float) -> LastMove:
        """By which move the agent came here last."""
        budget = Budget(within_s, 1.0, self._clock)
        try:
            return last_move_of(await self._read(lambda: self.client.get_agent(agent_id), budget))
        except errors.NotFound:
            return NEVER_MOVED

    async def version(self, agent_id: str, version: int, budget: Budget) -> Head:
        """A version of the agent. Raises NotFound (VERSION_NOT_FOUND, AGENT_NOT_FOUND)."""
        snapshot, _ = await self._read(
            lambda: self.client.get_snapshot(agent_id, version=version, timeout_s=budget.remaining_s), budget
        )
        with answer_checked("the store's answer about the version"):
            return head_of(snapshot)

    async def manifest(self, agent_id: str, head: Head, budget: Budget) -> bytes:
        """Bytes of a version's manifest, equal to their digest."""
        try:
            _, data = await self._read(
                lambda: self.client.get_snapshot(
                    agent_id, head.kv_identity_hash, head.version, timeout_s=budget.remaining_s
                ),
                budget,
            )
        except errors.NotFound as error:
            raise StoreMiss(Miss(MissReason.BLOB_MISSING, f"version {head.version} is gone")) from error
        if head.manifest is not None and Digest.of(data) != head.manifest:
            raise StoreMiss(Miss(MissReason.BLOB_DAMAGED, f"manifest {head.manifest}: other bytes were received"))
        return data

    async def read_blobs(self, digests: Sequence[Digest], budget: Budget) -> tuple[list[FileBytes], Miss | None]:
        """The longest prefix of the blobs that arrived whole and correct within the budget, and why it is not all."""
        blobs: list[FileBytes] = []

        async def take(data: FileBytes) -> None:
            blobs.append(data)

        return blobs, await self.give_blobs(digests, budget, take)

    async def give_blobs(
        self, digests: Sequence[Digest], budget: Budget, take: Callable[[FileBytes], Awaitable[None]]
    ) -> Miss | None:
        """Give `take` the blobs in their order, as they arrive whole and correct within the budget; the time that it
        takes does not count. Returns why not all of them did.
        """
        try:
            taken = await self._read_files(digests, budget, take)
            if taken == len(digests):
                return None
            async with contextlib.aclosing(self.clients.reading.get_blobs(digests[taken:])) as arriving:
                for _ in digests[taken:]:
                    _, data = await self._read(lambda: anext(arriving), budget)
                    budget.earn(len(data))
                    self.moved()
                    await take(data)
        except StoreMiss as error:
            return error.miss
        except errors.KvasirError as error:
            return miss_of(error)
        return None

    async def _read_files(
        self, digests: Sequence[Digest], budget: Budget, take: Callable[[FileBytes], Awaitable[None]]
    ) -> int:
        """Read the store's files up to one for which the store has to be asked. Returns how many were read."""
        if self._files is None:
            return 0
        taken = 0
        async with contextlib.aclosing(self._files.read_in_order(digests)) as arriving:
            while taken < len(digests) and (data := await self._read(lambda: anext(arriving), budget)) is not None:
                budget.earn(len(data))
                await take(data)
                taken += 1
        return taken

    async def find_prefix(
        self, kv_identity_hash: str, block_hashes: Sequence[str], groups: Sequence[int], budget: Budget
    ) -> FoundPrefix:
        """The longest stored prefix of a chain that may be shared, in these groups of layers."""
        asked = block_hashes[:_MAX_BLOCK_HASHES]

        async def find() -> FoundPrefix:
            answer = await self.client.find_prefix(kv_identity_hash, asked, groups, timeout_s=budget.remaining_s)
            return found_prefix(answer, groups, len(asked))

        try:
            return await self._read(find, budget)
        except errors.NotFound as error:
            raise StoreMiss(miss_of(error)) from error

    # --- writing: a failure is a KvasirError, and each call has a timeout; of bulk data, one without progress ---

    async def write_tensors(
        self, files: Sequence[FileBytes], stall_timeout_s: float, digests: Sequence[Digest] = ()
    ) -> tuple[list[Digest], int]:
        """Make tensor files durable, however long that takes while bytes move. Returns their digests in order, and the
        number of bytes that had to be sent. Raises DeadlineExceeded after so long without progress.

        `digests`: of the files, where somebody has computed them.
        """
        client, local = self.clients.writing, self._files  # before work is done in vain
        digests = list(digests) or await digests_of(files)
        blobs = dict(zip(digests, files, strict=True))
        there: list[int] = []

        def note(now: cachestore_pb2.TransferProgress) -> None:
            there.append(now.bytes_done)
            self.moved()

        async def put() -> cachestore_pb2.TransferProgress:
            if local is None or FEATURE not in self.features:
                return await client.put_blobs(blobs, on_progress=note, stall_timeout_s=stall_timeout_s)
            # One file is a turn's tail, which the store lacks nearly always: it is not asked first.
            missing = digests
            if len(digests) > 1:
                missing = await client.find_missing(digests, timeout_s=stall_timeout_s)
            return await put_by_files(
                client, blobs, missing, local.handed, on_progress=note, stall_timeout_s=stall_timeout_s
            )

        with self.bulk():
            progress = await self._noting(put())
        return digests, progress.bytes_total - there[0]

    async def renew(self, digests: Sequence[Digest], timeout_s: float) -> None:
        """Keep blobs that no manifest names for another grace period. Blobs that are gone do not come back."""
        await self._noting(self.client.find_missing(digests, timeout_s=timeout_s))

    async def write_manifest(self, manifest: bytes, stall_timeout_s: float) -> None:
        """Make a manifest durable. What it names is needed by its commit only."""
        await self._noting(self.client.put_manifest(manifest, stall_timeout_s=stall_timeout_s))

    async def commit(
        self,
        agent_id: str,
        manifest: Digest,
        parent: Version,
        timeout_s: float,
        *,
        is_brought: bool = False,
        base_version: int = 0,
        handed_over_by: str = "",
        lease: tuple[str, int] | None = None,
    ) -> Head:
        """Make a stored manifest the next version of the agent's line. `lease`: owner and generation. `base_version`:
        the earlier version that it goes on from; 0: its parent. `handed_over_by`: the peer that began the turn. Raises
        Conflict when the head is not its parent, or when the lease is fenced.
        """
        version = await self._noting(
            self.client.commit(
                agent_id,
                manifest,
                parent.number,
                parent_manifest=parent.manifest,
                lease=_token(*lease) if lease is not None else None,
                is_brought=is_brought,
                base_version=base_version,
                handed_over_by=handed_over_by,
                timeout_s=timeout_s,
            )
        )
        return head_of(version)

    # --- leases and the store's events: beside turns; a failure is a KvasirError ---

    async def acquire_lease(
        self, agent_id: str, kv_identity_hash: str, owner: str, *, begins_anew: bool, asks: bool, timeout_s: float
    ) -> LeaseGrant:
        """Raises FailedPrecondition (LEASE_HELD)."""
        got = await self.client.acquire_lease(
            agent_id,
            kv_identity_hash,
            owner,
            ttl_s=LEASE_TTL_S,
            begins_anew=begins_anew,
            asks=asks,
            timeout_s=timeout_s,
        )
        return LeaseGrant(got.lease.generation, head_of(got.head) if got.HasField("head") else NO_HEAD)

    async def renew_leases(
        self, owner: str, kv_identity_hash: str, generations: Mapping[str, int], timeout_s: float
    ) -> LeaseRenewal:
        got = await self.client.renew_leases(
            owner, kv_identity_hash, generations, ttl_s=LEASE_TTL_S, timeout_s=timeout_s
        )
        return LeaseRenewal(*(frozenset(each.agent_id for each in named) for named in (got.lost, got.wanted)))

    async def release_lease(
        self, agent_id: str, kv_identity_hash: str, owner: str, generation: int, timeout_s: float
    ) -> None:
        await self.client.release_lease(agent_id, kv_identity_hash, _token(owner, generation), timeout_s=timeout_s)

    async def copy_agent(self, agent_id: str, peer: str, timeout_s: float) -> None:
        """Let a peer of the store copy the agent's bytes, so that little is left to send when it moves. Nothing can be
        seen of it there before. Raises KvasirError.
        """
        async for _ in self.client.pulling_agent("", agent_id, to_peer=peer, only_bytes=True, timeout_s=timeout_s):
            pass

    async def move_agent(self, agent_id: str, peer: str, move_id: str, timeout_s: float) -> None:
        """Move the agent to a peer of the store; returns once the peer owns it. Raises KvasirError: then both stores
        know, or will find out, who owns it.
        """
        await self.client.move_agent(agent_id, to_peer=peer, move_id=move_id, timeout_s=timeout_s)

    async def has_moved(self, agent_id: str, peer: str, move_id: str) -> bool | None:
        """Whether the store knows that the agent is this peer's by this move; None while one is under way. Raises
        KvasirError.
        """
        owned = (await self.client.get_agent(agent_id)).ownership
        if owned.state == cachestore_pb2.OWNER_STATE_MOVING:
            return None
        has_moved = bool(owned.state == cachestore_pb2.OWNER_STATE_MOVED)
        return has_moved and (owned.peer, owned.move_id) == (peer, move_id)

    @property
    def event_cursor(self) -> EventCursor | None:
        """The place in the store's history up to which events are known; None before the store was ever watched."""
        return None if self._cursor is None else EventCursor(self._cursor.incarnation, self._cursor.sequence)

    async def was_taken_back(self, agent_id: str, since: EventCursor | None) -> bool:
        """Whether a change that is no turn (a rollback, a deletion) has happened to the agent since; also True if the
        store cannot know. Raises KvasirError like any call of the store.
        """
        return await self._has_happened(lambda response: takes_back(response, agent_id), since)

    async def was_changed(self, agent_id: str, since: EventCursor | None, own: Collection[Digest]) -> bool:
        """The same, and whether a turn made a version. Turns that made the manifests `own` do not count."""

        def is_change(response: cachestore_pb2.WatchEventsResponse) -> bool:
            return takes_back(response, agent_id) or moves(response, agent_id, own)

        return await self._has_happened(is_change, since)

    async def newest_event(self) -> EventCursor:
        """The place of now in the store's history. Raises KvasirError like any call of the store."""
        async with contextlib.aclosing(self.client.watch(None)) as responses:
            latest = await anext(responses, None)
        if latest is None:
            raise errors.Unavailable("the store ended its events", reason="STOPPING", retry_after_s=1.0)
        return EventCursor(latest.cursor.incarnation, latest.cursor.sequence)

    async def _has_happened(
        self, what: Callable[[cachestore_pb2.WatchEventsResponse], bool], since: EventCursor | None
    ) -> bool:
        if since is None:
            return True
        now = await self.newest_event()
        if now == since:
            return False
        cursor = cachestore_pb2.EventCursor(incarnation=since.incarnation, sequence=since.sequence)
        async with contextlib.aclosing(self.client.watch(cursor)) as responses:
            async for each in responses:
                if what(each):
                    return True
                if each.cursor.sequence >= now.sequence:
                    return False
        raise errors.Unavailable("the store ended its events", reason="STOPPING", retry_after_s=1.0)

    async def was_taken_back_within(self, budget: Budget, agent_id: str, since: EventCursor | None) -> bool:
        """`was_taken_back` as a part of a turn. Raises StoreMiss when the store does not answer within the budget."""
        return await self._read(lambda: self.was_taken_back(agent_id, since), budget)

    async def watch(self) -> AsyncGenerator[StoreEvent, None]:
        """Events of the namespace, from where the last watch was cut."""
        async with contextlib.aclosing(self.client.watch(self._cursor)) as responses:
            try:
                async for each in responses:
                    self._cursor = each.cursor
                    if (event := event_of(each)) is not None:
                        yield event
            except errors.Unauthenticated:
                self._breaker.ask_again()
                raise


def _token(owner: str, generation: int) -> cachestore_pb2.LeaseToken:
    return cachestore_pb2.LeaseToken(owner=owner, generation=generation)


async def digests_of(files: Sequence[FileBytes]) -> list[Digest]:
    """Computed on another thread, where that takes longer than to go there."""
    if sum(map(len, files)) < _HASHED_AT_ONCE_BYTES:
        return [Digest.of(data) for data in files]
    return await asyncio.to_thread(lambda: [Digest.of(data) for data in files])
