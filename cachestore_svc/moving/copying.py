"""Copies a line's newest version from a peer: the manifest, then the blobs that are missing here, each durable when
reported. Nothing is visible before the caller commits. Every byte is verified; bytes for which a caller would be
refused count as the peer's damage.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvasir.clients import AioStoreClient
from kvasir.clients.aio.blob_transfers import side_by_side
from kvasir.clients.store_client_transfers import striped
from kvasir.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument, KvasirError, Unavailable
from kvasir.formats.digest import Digest
from kvasir.waits import LOOK_S, PAUSE_S

from cachestore_svc.facts.ownership import OwnerState
from cachestore_svc.facts.records import MAX_DIGESTS_PER_REQUEST, MAX_PAGE_SIZE, BlobKind, Origin, SnapshotVersion
from cachestore_svc.moving.inbound import BlobIntake, Stored
from cachestore_svc.moving.manifest_room import ManifestRoom
from cachestore_svc.moving.peering.peers import errors_of_peer
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.snapshots import KnownManifest, bytes_of

_MAX_CUTS = 5
MAX_PEER_PAGES = 100  # Of a thousand versions each. A peer whose list goes on is given up.
_TIMES_A_GRACE = 4  # a copy renews the promise of its blobs so often in a grace period
T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    blobs_total: int
    bytes_total: int
    blobs_done: int = 0
    bytes_done: int = 0
    blobs_skipped: int = 0
    bytes_came: int = 0  # from the peer, also of blobs that are not whole

    def count(self, missing: Sequence[Digest]) -> None:
        self.blobs_done = self.blobs_total - len(missing)
        self.bytes_done = self.bytes_total - sum(digest.size_bytes for digest in missing)


@dataclass(frozen=True, slots=True)
class LineOrder:
    namespace: str
    peer: str
    agent_id: str  # there
    kv_identity_hash: str  # "": the line of the newest version there
    version: int | None = None  # None: the newest there


@dataclass(frozen=True, slots=True)
class Offered:
    """What a peer has. Its manifest has been read; it is stored with the blobs that it names."""

    version: int
    manifest: Digest
    data: bytes
    known: KnownManifest
    digests: Sequence[Digest]

    @property
    def kv_identity_hash(self) -> str:
        return self.known.facts.kv_identity_hash

    @property
    def parent_manifest(self) -> str:
        return self.known.facts.parent

    @property
    def kept_bytes(self) -> int:
        """Beside its digests."""
        return len(self.data) + bytes_of(self.known)

    @property
    def everything(self) -> Sequence[Digest]:
        return (self.manifest, *self.digests)


class LineCopies:
    def __init__(self, store: AioStore, manifests: ManifestRoom, stall_timeout_s: float) -> None:
        self._store = store
        self.manifests = manifests
        self._stall_timeout_s = stall_timeout_s

    async def take_offer(self, remote: AioStoreClient, order: LineOrder, room: AsyncExitStack) -> Offered:
        """Read the peer's manifest, also for its commit. `room` has its kept bytes."""
        with errors_of_peer(order.peer):
            theirs, data = await remote.get_snapshot(order.agent_id, order.kv_identity_hash, order.version)
        digest = Digest.of(data)
        if digest.hash != theirs.manifest.hash:
            raise DataLoss(f"peer {order.peer}: its manifest's bytes are not those of its digest")
        reading = partial(self._store.snapshots.known, order.namespace, digest, data, bind_shared=False)
        try:
            known = await self._store.threads.run(order.namespace, reading)
        except InvalidArgument as error:
            raise DataLoss(f"peer {order.peer}: {error.message}", reason=error.reason) from None
        digests = list(dict.fromkeys(need.digest for need in known.facts.named))
        offered = Offered(theirs.version, digest, data, known, digests)
        self.manifests.keep_list(room, order.namespace, len(digests), offered.kept_bytes)
        return offered

    async def check_ancestor(self, remote: AioStoreClient, order: LineOrder, ours: SnapshotVersion) -> None:
        """The agent's newest version here may be followed by theirs only if theirs grew out of it."""
        page_token = ""
        for _ in range(MAX_PEER_PAGES):
            with errors_of_peer(order.peer):
                page = await remote.list_snapshots(
                    order.agent_id, page_size=MAX_PAGE_SIZE, page_token=page_token, has_had=ours.manifest.hash
                )
            if page.has_had or any(version.manifest.hash == ours.manifest.hash for version in page.snapshots):
                return
            page_token = page.next_page_token
            if not page_token:
                raise AlreadyExists(
                    f"agent {ours.agent_id!r} exists here at version {ours.version}, and peer {order.peer}'s did not "
                    "grow from it: pull that under another name, or remove the one here first",
                    reason="NOT_AN_ANCESTOR",
                    metadata={"head_version": str(ours.version)},
                )
        raise Unavailable(
            f"peer {order.peer}: its list of versions does not end", reason="PEER_FAILED", retry_after_s=60
        )

    async def fetch(self, remote: AioStoreClient, order: LineOrder, offered: Offered) -> AsyncGenerator[Progress, None]:
        """Get the missing blobs, and store the manifest beside them, unless the caller stops at the first progress."""
        wanted = offered.digests
        progress = Progress(len(wanted), sum(digest.size_bytes for digest in wanted))
        missing = await self.missing(order.namespace, wanted)
        progress.count(missing)
        progress.blobs_skipped = progress.blobs_done
        yield progress
        manifest = order.namespace, offered.manifest, offered.data, BlobKind.MANIFEST
        storing = asyncio.create_task(self.store_bytes(*manifest))
        try:
            async with aclosing(self._fetch(remote, order, missing, progress)) as steps:
                async for _ in steps:
                    yield progress
            await storing
        finally:
            storing.cancel()
            await asyncio.gather(storing, return_exceptions=True)

    async def _fetch(
        self, remote: AioStoreClient, order: LineOrder, missing: Sequence[Digest], progress: Progress
    ) -> AsyncGenerator[None, None]:
        """After a cut, durable blobs are not sent again, and a part goes on at its offset."""
        cuts, others, now_s, next_s = 0, _OtherWriters(self._stall_timeout_s), asyncio.get_running_loop().time, 0.0
        while missing:
            batch = missing[:MAX_DIGESTS_PER_REQUEST]
            streams = [self._receive(remote, order, some, progress) for some in striped(batch)]
            try:
                async with aclosing(side_by_side(streams)) as stored:
                    async for some in stored:
                        cuts = 0
                        progress.blobs_done += len(some)
                        progress.bytes_done += sum(digest.size_bytes for digest in some)
                        if progress.blobs_done == progress.blobs_total or now_s() >= next_s:
                            next_s = now_s() + PAUSE_S
                            yield None
                missing = missing[len(batch) :]
            except Unavailable:
                cuts += 1
                if cuts == _MAX_CUTS:
                    raise
                await asyncio.sleep(PAUSE_S * cuts)
                missing = await self.missing(order.namespace, missing)
                progress.count(missing)
            except FailedPrecondition as error:
                await others.wait(error, await self._arrived(order.namespace, missing))
                missing = await self.missing(order.namespace, missing)
                progress.count(missing)

    @contextlib.asynccontextmanager
    async def kept(self, namespace: str, digests: Sequence[Digest]) -> AsyncGenerator[None, None]:
        """Keep those of these blobs that are here for the block, as nothing names them before the commit."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(max(self._store.grace_period_s / _TIMES_A_GRACE, LOOK_S))
                with contextlib.suppress(KvasirError):  # the commit names the missing ones
                    await self.missing(namespace, digests)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def missing(self, namespace: str, digests: Sequence[Digest]) -> list[Digest]:
        missing: list[Digest] = []
        for start in range(0, len(digests), MAX_DIGESTS_PER_REQUEST):
            batch = digests[start : start + MAX_DIGESTS_PER_REQUEST]
            missing += await self._store.run(namespace, self._store.blobs.find_missing, batch)
        return missing

    async def _receive(
        self, remote: AioStoreClient, order: LineOrder, missing: Sequence[Digest], progress: Progress
    ) -> AsyncGenerator[Sequence[Digest], None]:
        """One stream of blobs into the store; yields those that became durable."""
        status = await self._store.run(order.namespace, self._store.blobs.write_status, missing[0])
        if 0 < status.received_bytes == missing[0].size_bytes:
            # It was cut after its last byte: the peer has nothing more to send, if these bytes are right.
            if await self._store.threads.run(order.namespace, self._finish_part, order.namespace, missing[0]):
                yield missing[:1]
                missing = missing[1:]
            if not missing:
                return
        expected = iter(missing)
        async with BlobIntake(self._store, order.namespace) as intake:
            # Opened before the peer sends: no other writer can change now what has arrived of it.
            offset = await _resumed(intake, missing[0])
            part = missing[0] if offset else None
            messages = remote.read_frames(missing, offset)
            async with aclosing(self._unstalled(messages, order.peer)) as arriving:
                is_first = True
                async for frames in arriving:
                    for frame in frames:
                        progress.bytes_came += len(frame.data)
                        begins = None
                        if is_first or frame.HasField("digest"):
                            digest = next(expected, None)
                            if digest is None or frame.digest.hash != digest.hash:
                                raise DataLoss(f"peer {order.peer} sent a blob that was not requested")
                            begins = None if is_first else digest
                            is_first = False
                        await _take_peers(intake, order.peer, begins, frame.offset, frame.data)
                    if stored := _stored_so_far(intake, order.peer, part):
                        yield stored
            is_whole = next(expected, None) is None
            try:
                await intake.end()
            except InvalidArgument:  # bytes of the last blob are missing
                is_whole = False
            if stored := _stored_so_far(intake, order.peer, part):
                yield stored
        if not is_whole:
            raise Unavailable(f"peer {order.peer} ended the stream early", reason="PEER_UNAVAILABLE", retry_after_s=5)

    async def _arrived(self, namespace: str, missing: Sequence[Digest]) -> tuple[int, int]:
        """How far the first of these is, and how many they are: that changes while another writer gets on."""
        missing = await self.missing(namespace, missing)
        if not missing:
            return 0, 0
        status = await self._store.run(namespace, self._store.blobs.write_status, missing[0])
        return status.received_bytes, len(missing)

    def _finish_part(self, namespace: str, digest: Digest) -> bool:
        """Make a part with all its bytes a blob; False when it is not right, and gone."""
        opened = self._store.blobs.open_writer
        with contextlib.suppress(InvalidArgument), opened(namespace, digest, BlobKind.TENSORS) as writer:
            if writer.received_bytes == digest.size_bytes:
                writer.finish()
                return True
        return False

    async def _unstalled(self, messages: AsyncIterator[T], peer: str) -> AsyncGenerator[T, None]:
        """The same, but a peer that is silent for too long is unavailable."""
        with errors_of_peer(peer):
            try:
                while True:
                    async with asyncio.timeout(self._stall_timeout_s):
                        message = await anext(messages, None)
                    if message is None:
                        return
                    yield message
            except TimeoutError:
                raise Unavailable(f"silent for {self._stall_timeout_s:g} s") from None

    async def store_bytes(self, namespace: str, digest: Digest, data: bytes, kind: BlobKind) -> None:
        def write_rest() -> None:
            with self._store.blobs.open_writer(namespace, digest, kind) as writer:
                writer.write(writer.received_bytes, memoryview(data)[writer.received_bytes :])
                writer.finish()

        def write() -> None:
            try:
                write_rest()
            except InvalidArgument:  # the part that was here may have been the wrong one, and is gone now
                write_rest()

        others = _OtherWriters(self._stall_timeout_s)
        while True:
            try:
                return await self._store.threads.run(namespace, write)
            except FailedPrecondition as error:
                await others.wait(error, None)


class _OtherWriters:
    """Waits for other calls that write the same blob, as two pulls at once do, and gives up when they stand still."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._seen: object = self  # nothing that a caller can have seen
        self._since = 0.0

    async def wait(self, refused: FailedPrecondition, seen: object) -> None:
        """Wait a little. `seen` changes while they get on. Raises `refused` for another reason, or without progress."""
        now = asyncio.get_running_loop().time()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if refused.reason != "WRITE_IN_PROGRESS" or now - self._since > self._stall_timeout_s:
            raise refused
        await asyncio.sleep(PAUSE_S)


def came_from(line: SnapshotVersion, names: Sequence[str], agent_id: str = "") -> bool:
    """Whether a peer of these names may replace this: it is what that peer gave, unchanged (of `agent_id`, or any)."""
    given = line.origin_detail.rpartition("@")[0]  # a name may have one too
    is_given = any(given == f"{name}/{agent_id}" if agent_id else given.startswith(f"{name}/") for name in names)
    return line.origin in (Origin.PULL, Origin.MOVE) and is_given


def check_owns(peer: str, there: Any) -> None:
    """Raises FailedPrecondition (AGENT_MOVED) for an agent of a peer that has an older copy of another store's."""
    known = there.ownership
    if int(known.state) == OwnerState.MOVED:
        raise FailedPrecondition(
            f"agent {there.agent_id!r} has moved from {peer} to its peer {known.peer}: copy it from there",
            reason="AGENT_MOVED",
            metadata={"agent_id": there.agent_id, "owner": known.peer, "generation": str(known.generation)},
        )


async def _take_peers(
    intake: BlobIntake, peer: str, digest: Digest | None, offset: int, data: bytes | memoryview
) -> None:
    """A frame from a peer; `digest` when it begins a blob. A caller's error elsewhere is the peer's here."""
    try:
        if digest is not None:
            await intake.begin(digest, BlobKind.TENSORS, offset, data)
        else:
            await intake.write(offset, data)
    except InvalidArgument as error:
        raise DataLoss(f"peer {peer}: {error.message}", reason=error.reason) from None


async def _resumed(intake: BlobIntake, digest: Digest) -> int:
    try:
        return await intake.resume(digest, BlobKind.TENSORS)
    except InvalidArgument:  # the part that was here was the wrong one, and is gone now
        return await intake.resume(digest, BlobKind.TENSORS)


def _stored_so_far(intake: BlobIntake, peer: str, part: Digest | None) -> list[Digest]:
    """Blobs that became durable since the last call. A blob that fails its digest is the peer's damage, but for one of
    which a part was here: that may have been the wrong one, and is gone now. Raises Unavailable of it."""
    stored: list[Digest] = []
    while not intake.outcomes.empty():
        outcome = intake.outcomes.get_nowait()
        if isinstance(outcome, Stored):
            stored.append(outcome.digest)
        elif isinstance(outcome, InvalidArgument):
            if part is not None and outcome.metadata.get("digest") == part.hash:
                raise Unavailable(outcome.message, reason=outcome.reason, retry_after_s=PAUSE_S)
            raise DataLoss(f"peer {peer}: {outcome.message}", reason=outcome.reason, metadata=outcome.metadata)
        elif outcome is not None:
            raise outcome
    return stored
