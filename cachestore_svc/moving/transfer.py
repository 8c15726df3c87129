"""Agents moving whole: pulled from a peer, exported to an archive, imported from one.

Each moves only what lacks, blob by blob, with bounded memory, and ends in one commit; until then nothing is visible.
Cut short anywhere, it leaves blobs that a repetition finds and garbage collection removes.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvasir.clients import AioStoreClient
from kvasir.errors import AlreadyExists, DataLoss, InvalidArgument, NotFound, Unavailable
from kvasir.formats import archive
from kvasir.formats import manifest as manifests
from kvasir.formats.archive_reader import ArchiveReader, BlobPiece, Described
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

from cachestore_svc.lease_waiting import once_free
from cachestore_svc.moving.inbound import BlobIntake, Stored
from cachestore_svc.moving.manifest_room import ManifestRoom
from cachestore_svc.moving.outbound import BlobReader, BlobSource
from cachestore_svc.moving.peers import Peers, errors_of_peer
from cachestore_svc.records import MAX_DIGESTS_PER_REQUEST, MAX_PAGE_SIZE, BlobKind, Origin, SnapshotVersion
from cachestore_svc.store import Store
from cachestore_svc.threads import StoreThreads

_MAX_CUTS = 4
# Of a thousand versions each. A peer whose list goes on is given up.
MAX_PEER_PAGES = 100
_CUT_PAUSE_S = 0.3
T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """How far a pull is."""

    blobs_total: int
    bytes_total: int
    blobs_done: int = 0
    bytes_done: int = 0
    blobs_skipped: int = 0


@dataclass(frozen=True, slots=True)
class PullOrder:
    """What to copy from where to where."""

    namespace: str
    peer: str
    agent_id: str
    local_agent_id: str
    kv_identity_hash: str  # "": the line that was used last there


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive on its way out: its size, its bytes in pieces of at most 1 MiB, and what they are read from."""

    size_bytes: int
    pieces: AsyncIterator[bytes]
    source: BlobSource


@dataclass(frozen=True, slots=True)
class _Described:
    """The part of an archive's description that is kept while its blobs arrive."""

    agent_id: str
    manifest: Digest
    kv_identity_hash: str


@dataclass(frozen=True, slots=True)
class _Offered:
    """What a peer has, once its manifest is here."""

    version: int
    manifest: Digest
    kv_identity_hash: str
    parent_manifest: str
    digests: Sequence[Digest]


class Transfers:
    """Moves agents in and out of one store."""

    def __init__(
        self, store: Store, threads: StoreThreads, reader: BlobReader, peers: Peers, stall_timeout_s: float
    ) -> None:
        self._store = store
        self._threads = threads
        self._reader = reader
        self._peers = peers
        self._stall_timeout_s = stall_timeout_s
        self.manifests = ManifestRoom()

    # --- pull ---

    async def pull(self, order: PullOrder) -> AsyncGenerator[Progress | SnapshotVersion, None]:
        """Copy the newest version of a peer's line: manifest → what lacks here → durable → commit. Safe to repeat.

        Yields progress, and last the version here. Raises NotFound, AlreadyExists, Unavailable, DataLoss.
        """
        async with self._peers.connect(order.peer, order.namespace) as remote, AsyncExitStack() as room:
            async with self.manifests.parsing(order.namespace, MAX_MANIFEST_BYTES):
                offered = await self._take_offer(remote, order, room)
            ours = await self._head(order.namespace, order.local_agent_id, offered.kv_identity_hash)
            if ours is not None and ours.manifest == offered.manifest:
                yield ours
                return
            if ours is not None and ours.manifest.hash != offered.parent_manifest:
                await self._check_ancestor(remote, order, offered.kv_identity_hash, ours)
            async with aclosing(self._fetch(remote, order, offered.digests)) as steps:
                async for progress in steps:
                    yield progress
        yield await self._commit(
            order.namespace,
            order.local_agent_id,
            offered.manifest,
            ours,
            Origin.PULL,
            f"{order.peer}/{order.agent_id}@{offered.version}",
        )

    async def _take_offer(self, remote: AioStoreClient, order: PullOrder, room: AsyncExitStack) -> _Offered:
        """Read and store the peer's manifest. `room` has what its list of blobs takes."""
        with errors_of_peer(order.peer):
            theirs, manifest_bytes = await remote.get_snapshot(order.agent_id, order.kv_identity_hash)
        digest = Digest.of(manifest_bytes)
        if digest.hash != theirs.manifest.hash:
            raise DataLoss(f"peer {order.peer}: its manifest's bytes are not those of its digest")
        try:
            manifest = await self._threads.run(order.namespace, manifests.parse, manifest_bytes)
        except InvalidArgument as error:
            raise DataLoss(f"peer {order.peer}: {error.message}", reason=error.reason) from None
        digests = manifests.digests(manifest)
        self.manifests.keep_list(room, order.namespace, len(digests))
        await self._store_bytes(order.namespace, digest, manifest_bytes, BlobKind.MANIFEST)
        kv_hash = kv_identity_hash(manifest.kv_identity)
        return _Offered(theirs.version, digest, kv_hash, manifest.parent_manifest, digests)

    async def _head(self, namespace: str, agent_id: str, kv_hash: str) -> SnapshotVersion | None:
        try:
            return await self._threads.run(namespace, self._store.get_snapshot, namespace, agent_id, kv_hash)
        except NotFound:
            return None

    async def _check_ancestor(
        self, remote: AioStoreClient, order: PullOrder, kv_hash: str, ours: SnapshotVersion
    ) -> None:
        """The line here may be replaced by theirs only if theirs grew out of it."""
        page_token = ""
        for _ in range(MAX_PEER_PAGES):
            with errors_of_peer(order.peer):
                page = await remote.list_snapshots(
                    order.agent_id, kv_hash, page_size=MAX_PAGE_SIZE, page_token=page_token
                )
            if any(version.manifest.hash == ours.manifest.hash for version in page.snapshots):
                return
            page_token = page.next_page_token
            if not page_token:
                raise AlreadyExists(
                    f"{order.local_agent_id!r} has version {ours.version} here, which is not among the versions that "
                    f"peer {order.peer} keeps: pull under another name",
                    reason="NOT_AN_ANCESTOR",
                    metadata={"head_version": str(ours.version)},
                )
        raise Unavailable(
            f"peer {order.peer}: its list of versions does not end", reason="PEER_FAILED", retry_after_s=60
        )

    async def _fetch(
        self, remote: AioStoreClient, order: PullOrder, wanted: Sequence[Digest]
    ) -> AsyncGenerator[Progress, None]:
        """Get what lacks. After a cut, what is durable is not sent again, and a part goes on at its offset."""
        progress = Progress(len(wanted), sum(digest.size_bytes for digest in wanted))
        missing = await self._missing(order.namespace, wanted)
        progress.blobs_skipped = progress.blobs_done = len(wanted) - len(missing)
        progress.bytes_done = progress.bytes_total - sum(digest.size_bytes for digest in missing)
        yield progress
        cuts = 0
        while missing:
            batch = missing[:MAX_DIGESTS_PER_REQUEST]
            try:
                async with aclosing(self._receive(remote, order, batch)) as stored:
                    async for digest in stored:
                        cuts = 0
                        progress.blobs_done += 1
                        progress.bytes_done += digest.size_bytes
                        yield progress
                missing = missing[len(batch) :]
            except Unavailable:
                cuts += 1
                if cuts == _MAX_CUTS:
                    raise
                await asyncio.sleep(_CUT_PAUSE_S * cuts)
                missing = await self._missing(order.namespace, missing)

    async def _missing(self, namespace: str, digests: Sequence[Digest]) -> list[Digest]:
        missing: list[Digest] = []
        for start in range(0, len(digests), MAX_DIGESTS_PER_REQUEST):
            batch = digests[start : start + MAX_DIGESTS_PER_REQUEST]
            missing += await self._threads.run(namespace, self._store.find_missing, namespace, batch)
        return missing

    async def _receive(
        self, remote: AioStoreClient, order: PullOrder, missing: Sequence[Digest]
    ) -> AsyncGenerator[Digest, None]:
        """One stream of blobs into the store; yields each when it is durable."""
        status = await self._threads.run(order.namespace, self._store.write_status, order.namespace, missing[0])
        if 0 < status.received_bytes == missing[0].size_bytes:
            # It was cut after its last byte: there is nothing to ask the peer for, if these bytes are right.
            if await self._threads.run(order.namespace, self._finish_part, order.namespace, missing[0]):
                yield missing[0]
                missing = missing[1:]
            if not missing:
                return
            status = await self._threads.run(order.namespace, self._store.write_status, order.namespace, missing[0])
        expected = iter(missing)
        async with BlobIntake(self._store, self._threads, order.namespace) as intake:
            frames = remote.read_frames(missing, status.received_bytes)
            async with aclosing(self._unstalled(frames, order.peer)) as arriving:
                async for frame in arriving:
                    digest = None
                    if frame.HasField("digest"):
                        digest = next(expected, None)
                        if digest is None or frame.digest.hash != digest.hash:
                            raise DataLoss(f"peer {order.peer} sent a blob that was not asked for")
                    await _take_peers(intake, order.peer, digest, frame.offset, frame.data)
                    for stored in _stored_so_far(intake, order.peer):
                        yield stored
            await intake.end()
            for stored in _stored_so_far(intake, order.peer):
                yield stored
        if next(expected, None) is not None:
            raise Unavailable(f"peer {order.peer} ended the stream early", reason="PEER_UNAVAILABLE", retry_after_s=5)

    def _finish_part(self, namespace: str, digest: Digest) -> bool:
        """Make a part with all its bytes a blob; False when it is not right, and gone."""
        with self._store.open_writer(namespace, digest, BlobKind.TENSORS) as writer:
            if writer.received_bytes == digest.size_bytes:
                try:
                    writer.finish()
                except InvalidArgument:
                    return False
                return True
        return False

    async def _unstalled(self, frames: AsyncIterator[T], peer: str) -> AsyncGenerator[T, None]:
        """The same, but a peer that is silent for too long is unavailable."""
        with errors_of_peer(peer):
            try:
                while True:
                    async with asyncio.timeout(self._stall_timeout_s):
                        frame = await anext(frames, None)
                    if frame is None:
                        return
                    yield frame
            except TimeoutError:
                raise Unavailable(f"silent for {self._stall_timeout_s:g} s") from None

    # --- archives ---

    @asynccontextmanager
    async def export(
        self, namespace: str, agent_id: str, kv_hash: str | None, version: int | None
    ) -> AsyncIterator[Archive]:
        """The archive of one version. Raises NotFound, DataLoss."""
        snapshot = await self._threads.run(namespace, self._store.get_snapshot, namespace, agent_id, kv_hash, version)
        head = archive.head(snapshot.manifest, snapshot.kv_identity_hash, agent_id)
        # The manifest is sent like any blob and is not parsed: the catalog knows what it names.
        async with self.manifests.listing(namespace, snapshot.token_count):
            named = await self._threads.run(
                namespace, self._store.named_blobs, namespace, snapshot.manifest, snapshot.total_bytes
            )
            size_bytes = archive.size_bytes(len(head) + _padded(snapshot.manifest.size_bytes), named)
            source = self._reader.open(namespace, [snapshot.manifest, *named])
            async with source, aclosing(_archive(head, snapshot.manifest, source)) as pieces:
                yield Archive(size_bytes, pieces, source)

    async def import_archive(
        self, namespace: str, agent_id: str, replace: bool, pieces: AsyncIterable[bytes]
    ) -> SnapshotVersion:
        """Read an archive into a new version. Raises InvalidArgument, AlreadyExists, ResourceExhausted."""
        await self._check_may_import(namespace, agent_id, replace)
        async with AsyncExitStack() as room:
            described = await self._take_archive(namespace, pieces, room)
        head = await self._head(namespace, agent_id, described.kv_identity_hash)
        await self._check_may_import(namespace, agent_id, replace)
        return await self._commit(namespace, agent_id, described.manifest, head, Origin.IMPORT, described.agent_id)

    async def _take_archive(self, namespace: str, pieces: AsyncIterable[bytes], room: AsyncExitStack) -> _Described:
        """Store all that an archive holds. `room` has what its list of blobs takes, for as long as it is read."""
        reader = ArchiveReader()
        described: _Described | None = None
        async with BlobIntake(self._store, self._threads, namespace) as intake, AsyncExitStack() as parsing:
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
        for part in parts if described else await self._threads.run(namespace, list, parts):
            if isinstance(part, Described):
                self.manifests.keep_list(room, namespace, len(part.digests))
                await self._store_bytes(namespace, part.manifest_digest, part.manifest_bytes, BlobKind.MANIFEST)
                kv_hash = kv_identity_hash(part.manifest.kv_identity)
                described = _Described(part.agent_id, part.manifest_digest, kv_hash)
            else:
                await _take(intake, part)
            # With each part: one piece may hold more blobs than there is room for outcomes.
            _raise_failures(intake)
        return described

    async def _commit(
        self,
        namespace: str,
        agent_id: str,
        manifest: Digest,
        head: SnapshotVersion | None,
        origin: Origin,
        origin_detail: str,
    ) -> SnapshotVersion:
        """Make the imported or pulled snapshot the newest version, once no engine answers from the one before."""

        async def commit() -> SnapshotVersion:
            async with self.manifests.parsing(namespace, manifest.size_bytes):
                return await self._threads.run(
                    namespace,
                    self._store.commit,
                    namespace,
                    agent_id,
                    manifest,
                    head.version if head else 0,
                    origin=origin,
                    origin_detail=origin_detail,
                    parent_manifest=head.manifest if head else None,
                )

        return await once_free(commit, None)

    async def _check_may_import(self, namespace: str, agent_id: str, replace: bool) -> None:
        try:
            await self._threads.run(namespace, self._store.get_agent, namespace, agent_id)
        except NotFound:
            return
        if not replace:
            raise AlreadyExists(
                f"agent {agent_id!r} exists; an import with `replace` (--replace) adds a version", reason="AGENT_EXISTS"
            )

    async def _store_bytes(self, namespace: str, digest: Digest, data: bytes, kind: BlobKind) -> None:
        def write() -> None:
            with self._store.open_writer(namespace, digest, kind) as writer:
                writer.write(writer.received_bytes, memoryview(data)[writer.received_bytes :])
                writer.finish()

        await self._threads.run(namespace, write)


async def _archive(head: bytes, manifest: Digest, source: BlobSource) -> AsyncGenerator[bytes, None]:
    yield head
    while (piece := await source.next_piece()) is not None:
        if piece.is_first and piece.digest != manifest:
            yield archive.blob_header(piece.digest)
        yield piece.data
        if piece.offset + len(piece.data) == piece.digest.size_bytes:
            yield archive.padding(piece.digest.size_bytes)
    yield archive.END


def _padded(size_bytes: int) -> int:
    return size_bytes + len(archive.padding(size_bytes))


async def _take(intake: BlobIntake, piece: BlobPiece) -> None:
    if piece.offset == 0:
        await intake.begin(piece.digest, BlobKind.TENSORS)
    await intake.write(piece.offset, piece.data)


async def _take_peers(intake: BlobIntake, peer: str, digest: Digest | None, offset: int, data: bytes) -> None:
    """A frame from a peer; `digest` when it begins a blob. What we would call the caller's error is the peer's here."""
    try:
        if digest is not None:
            await intake.begin(digest, BlobKind.TENSORS, offset)
        await intake.write(offset, data)
    except InvalidArgument as error:
        raise DataLoss(f"peer {peer}: {error.message}", reason=error.reason) from None


def _stored_so_far(intake: BlobIntake, peer: str) -> list[Digest]:
    """Blobs that became durable since last asked. A blob that fails its digest is the peer's damage."""
    stored: list[Digest] = []
    while not intake.outcomes.empty():
        outcome = intake.outcomes.get_nowait()
        if isinstance(outcome, Stored):
            stored.append(outcome.digest)
        elif isinstance(outcome, InvalidArgument):
            raise DataLoss(f"peer {peer}: {outcome.message}", reason=outcome.reason, metadata=outcome.metadata)
        elif outcome is not None:
            raise outcome
    return stored


def _raise_failures(intake: BlobIntake) -> None:
    while not intake.outcomes.empty():
        outcome = intake.outcomes.get_nowait()
        if isinstance(outcome, Exception):
            raise outcome
