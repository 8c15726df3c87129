"""Transfers whole agents: pulled from a peer, exported to an archive, imported from one. Each sends only the blobs that
are missing, with bounded memory, and ends in one commit; an interrupted one leaves blobs that a repetition uses.
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvasir.clients import AioStoreClient
from kvasir.errors import AlreadyExists
from kvasir.formats import archive
from kvasir.formats.archive import ArchiveReader, Described
from kvasir.formats.digest import Digest
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

from cachestore_svc.facts.ownership import OwnerState, are_two, check_takes_copy, owned_here
from cachestore_svc.facts.records import BlobKind, Origin, SnapshotVersion
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.moving.bringing import Bringing
from cachestore_svc.moving.copying import LineCopies, LineOrder, Offered, Progress, came_from, check_owns
from cachestore_svc.moving.inbound import BlobIntake
from cachestore_svc.moving.manifest_room import ManifestRoom
from cachestore_svc.moving.outbound import BlobReader, BlobSource
from cachestore_svc.moving.peering.peers import Peers, errors_of_peer
from cachestore_svc.pairing.rights import Verb
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.snapshots import KnownManifest


@dataclass(frozen=True, slots=True)
class PullOrder:
    namespace: str
    peer: str
    agent_id: str
    local_agent_id: str
    kv_identity_hash: str  # "": the line of the newest version there
    is_dry_run: bool = False
    is_given: bool = False  # the peer wanted it: it replaces nothing but what it gave before
    only_bytes: bool = False  # no version is made: a move will make it


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive on its way out: its size, its bytes in pieces of at most 1 MiB, and the reader of them."""

    size_bytes: int
    pieces: AsyncIterator[bytes]
    source: BlobSource


@dataclass(frozen=True, slots=True)
class _Described:
    """The part of an archive's description that is kept while its blobs arrive."""

    agent_id: str
    manifest: Digest


class Transfers:
    def __init__(
        self, store: AioStore, reader: BlobReader, peers: Peers, bringing: Bringing, stall_timeout_s: float
    ) -> None:
        self._store = store
        self._reader = reader
        self._peers = peers
        self._bringing = bringing
        self.manifests = ManifestRoom()
        self.copies = LineCopies(store, self.manifests, stall_timeout_s)

    async def pull(self, order: PullOrder) -> AsyncGenerator[Progress | SnapshotVersion, None]:
        """Copy the newest version of a peer's line: manifest → what lacks here → durable → commit. Safe to repeat.
        Yields progress, and last the version here; a dry run yields the first progress. Raises NotFound, AlreadyExists
        (also where the copy here is of another agent of that name), FailedPrecondition (AGENT_MOVED: the line there is
        an older copy, or the one here is another store's), Unavailable, DataLoss; of one that a peer gives also
        PermissionDenied (PEER_MAY_NOT), ResourceExhausted (PEER_LIMIT).
        """
        line = LineOrder(order.namespace, order.peer, order.agent_id, order.kv_identity_hash)
        async with self._peers.connect(order.peer, order.namespace) as remote, AsyncExitStack() as room:
            with errors_of_peer(order.peer):
                there = await remote.get_agent(order.agent_id)
            check_owns(order.peer, there)
            here = await self._store.owner(order.namespace, order.local_agent_id)
            if order.is_given:
                self._bringing.check(Verb.COPY, order.namespace, order.peer, order.local_agent_id, here)
            is_copy = here.state is OwnerState.MOVED and (here.peer == order.peer or not order.is_given)
            given_by = await self._given_by(order, there, is_copy)
            check_takes_copy(order.local_agent_id, here, given_by)
            async with self.manifests.parsing(order.namespace, MAX_MANIFEST_BYTES):
                offered = await self.copies.take_offer(remote, line, room)
            agent = await self._store.agent(order.namespace, order.local_agent_id)
            lines = agent.lines if agent is not None else ()
            ours = next((each for each in lines if each.kv_identity_hash == offered.kv_identity_hash), None)
            newest = lines[0] if lines else None
            if ours is not None and order.is_given and not is_copy and not self._gave(order.peer, ours):
                raise owned_here(order.local_agent_id)
            is_here = ours is not None and ours.manifest == offered.manifest
            if ours is not None and is_here and (ours == newest or not _is_newest(there, offered)):
                yield ours
                return
            # What this store handed over is what the owner's memory grew out of, also where that is not kept any more.
            is_grown = is_copy and bool(here.move_id)
            if newest is not None and not is_grown and newest.manifest.hash != offered.parent_manifest:
                await self._check_ancestor(remote, line, newest)
            await room.enter_async_context(self.copies.kept(order.namespace, offered.everything))
            about = order.namespace, order.peer, order.local_agent_id
            coming = room.enter_context(self._bringing.counted(*about, is_given=order.is_given))
            async with aclosing(self.copies.fetch(remote, line, offered)) as steps:
                async for progress in steps:
                    await self._bringing.check_room(coming, offered, progress, is_dry_run=order.is_dry_run)
                    yield progress
                    if order.is_dry_run:
                        return
            coming.has_come = not order.only_bytes
        if order.only_bytes:
            return
        yield await self._commit_pulled(order, offered, newest, given_by)

    async def _commit_pulled(
        self, order: PullOrder, offered: Offered, newest: SnapshotVersion | None, given_by: int | None
    ) -> SnapshotVersion:
        made = order.namespace, order.local_agent_id, offered.manifest, newest
        detail = f"{order.peer}/{order.agent_id}@{offered.version}"
        terms = CommitTerms(origin=Origin.PULL, origin_detail=detail, owner_generation=given_by)
        async with AsyncExitStack() as room:  # an engine's lease may be waited for
            self.manifests.keep_list(room, order.namespace, len(offered.digests), offered.kept_bytes)
            return await self._commit(*made, terms, offered.known)

    async def _given_by(self, order: PullOrder, there: Any, is_copy: bool) -> int | None:
        """The generation of the owner whose copy here is renewed; None if the copy has another name."""
        if not is_copy or order.local_agent_id != order.agent_id:
            return None
        if are_two(await self._store.labels(order.namespace, order.agent_id), there.labels):
            raise owned_here(order.agent_id)
        return int(there.ownership.generation)

    async def _check_ancestor(self, remote: AioStoreClient, line: LineOrder, newest: SnapshotVersion) -> None:
        """A copy of an earlier version, which nobody has extended here, may be renewed as an ancestor is."""
        if not self._gave(line.peer, newest, line.agent_id):
            await self.copies.check_ancestor(remote, line, newest)

    def _gave(self, peer: str, line: SnapshotVersion, agent_id: str = "") -> bool:
        return came_from(line, self._peers.all_names(peer), agent_id)

    @asynccontextmanager
    async def export(
        self, namespace: str, agent_id: str, kv_hash: str | None, version: int | None
    ) -> AsyncIterator[Archive]:
        snapshot = await self._store.run(namespace, self._store.snapshots.get, agent_id, kv_hash, version)
        head = archive.head(snapshot.manifest, snapshot.kv_identity_hash, agent_id)
        # The manifest is sent like any blob and is not parsed: the catalog knows what it names.
        async with self.manifests.listing(namespace, snapshot.token_count):
            all_of = snapshot.manifest, snapshot.total_bytes
            named = await self._store.run(namespace, self._store.blobs.named_blobs, *all_of)
            manifest_bytes = snapshot.manifest.size_bytes
            before = len(head) + manifest_bytes + len(archive.padding(manifest_bytes))
            size_bytes = archive.size_bytes(before, named)
            source = self._reader.open(namespace, [snapshot.manifest, *named])
            async with source, aclosing(_archive(head, snapshot.manifest, source)) as pieces:
                yield Archive(size_bytes, pieces, source)

    async def import_archive(
        self, namespace: str, agent_id: str, replace: bool, pieces: AsyncIterable[bytes]
    ) -> SnapshotVersion:
        """Read an archive into a new version. Raises InvalidArgument, AlreadyExists, ResourceExhausted."""
        await self._imported_onto(namespace, agent_id, replace)
        async with AsyncExitStack() as room:
            described = await self._take_archive(namespace, pieces, room)
        head = await self._imported_onto(namespace, agent_id, replace)
        terms = CommitTerms(origin=Origin.IMPORT, origin_detail=described.agent_id)
        return await self._commit(namespace, agent_id, described.manifest, head, terms)

    async def _take_archive(self, namespace: str, pieces: AsyncIterable[bytes], room: AsyncExitStack) -> _Described:
        """Store all that an archive holds. `room` has what its list of blobs takes, for as long as it is read."""
        reader = ArchiveReader()
        described: _Described | None = None
        async with BlobIntake(self._store, namespace) as intake, AsyncExitStack() as parsing:
            waited_bytes = 0
            async for piece in pieces:
                # A waiter for more room gives back what it has: else all waiters could wait for each other.
                if not described and (wanted := max(reader.wanted_bytes, len(piece))) > waited_bytes:
                    waited_bytes = wanted
                    await parsing.aclose()
                    await parsing.enter_async_context(self.manifests.parsing(namespace, waited_bytes))
                described = await self._take_parts(namespace, reader, piece, described, intake, room)
                if described:
                    await parsing.aclose()
            reader.finish()
            await intake.end()
            _raise_failures(intake)
        assert described is not None, "a whole archive has a manifest"
        return described

    async def _take_parts(
        self,
        namespace: str,
        reader: ArchiveReader,
        piece: bytes,
        described: _Described | None,
        intake: BlobIntake,
        room: AsyncExitStack,
    ) -> _Described | None:
        """Take the parts that a piece completes: the manifest, once, which is stored and not kept; bytes of blobs."""
        parts = reader.feed(piece)
        # Until it has read the manifest, a piece may take long.
        for part in parts if described else await self._store.threads.run(namespace, list, parts):
            if isinstance(part, Described):
                self.manifests.keep_list(room, namespace, len(part.digests))
                await self.copies.store_bytes(namespace, part.manifest_digest, part.manifest_bytes, BlobKind.MANIFEST)
                everything = (part.manifest_digest, *part.digests)
                await room.enter_async_context(self.copies.kept(namespace, everything))
                described = _Described(part.agent_id, part.manifest_digest)
            elif part.offset == 0:
                await intake.begin(part.digest, BlobKind.TENSORS, 0, part.data)
            else:
                await intake.write(part.offset, part.data)
            # With each part: one piece may hold more blobs than there is room for outcomes.
            _raise_failures(intake)
        return described

    async def _commit(
        self,
        namespace: str,
        agent_id: str,
        manifest: Digest,
        head: SnapshotVersion | None,
        terms: CommitTerms,
        known: KnownManifest | None = None,
    ) -> SnapshotVersion:
        """Make the imported or pulled snapshot the newest version, once no engine answers from the one before."""
        terms = replace(terms, parent_manifest=head.manifest if head else None)

        async def commit() -> SnapshotVersion:
            async with self.manifests.parsing(namespace, manifest.size_bytes):
                asked = agent_id, manifest, head.version if head else 0, terms, known
                return await self._store.run_if_awaited(namespace, self._store.snapshots.commit, *asked)

        return await self._store.once_free(namespace, agent_id, None, commit)

    async def _imported_onto(self, namespace: str, agent_id: str, replace: bool) -> SnapshotVersion | None:
        """The agent's newest version, if there is any. Raises AlreadyExists unless it may be replaced."""
        agent = await self._store.agent(namespace, agent_id)
        if agent is not None and not replace:
            raise AlreadyExists(
                f"agent {agent_id!r} exists; an import with `replace` (--replace) adds a version",
                reason="AGENT_EXISTS",
                metadata={"agent_id": agent_id},
            )
        return agent.lines[0] if agent is not None else None


def _is_newest(there: Any, offered: Offered) -> bool:
    """Whether the peer offers the newest version of the agent. It may list no line."""
    newest = max(there.lines, key=lambda each: int(each.version), default=None)
    return newest is None or newest.manifest.hash == offered.manifest.hash


async def _archive(head: bytes, manifest: Digest, source: BlobSource) -> AsyncGenerator[bytes, None]:
    yield head
    while (piece := await source.next_piece()) is not None:
        digest, begins, ends = piece.digest, piece.is_first, piece.offset + len(piece.data) == piece.digest.size_bytes
        data = bytes(piece.data)
        del piece  # a slow reader keeps this copy alone
        if begins and digest != manifest:
            yield archive.blob_header(digest)
        yield data
        if ends:
            yield archive.padding(digest.size_bytes)
    yield archive.END


def _raise_failures(intake: BlobIntake) -> None:
    while not intake.outcomes.empty():
        outcome = intake.outcomes.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
