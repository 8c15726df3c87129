"""The cache store over gRPC: each RPC reads its request, calls the store on a thread, and writes its answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from kvasir import __version__
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc, manifest_pb2
from kvasir.credentials import ADMIN, ENGINE
from kvasir.errors import ResourceExhausted, Unavailable
from kvasir.formats.digest import Digest
from kvasir.formats.frame_messages import MAX_FRAMES, Carrier, carrier_bytes, carrier_reader
from kvasir.formats.manifest_checks import MANIFEST_FORMAT
from kvasir.names import check_agent_id
from kvasir.server.answers import written
from kvasir.server.interceptors import current_principal
from kvasir.waits import ANSWER_S

from cachestore_svc.edge import messages
from cachestore_svc.edge.manifests_ahead import ManifestsAhead
from cachestore_svc.edge.roles import PEOPLE
from cachestore_svc.edge.store_calls import StoreCalls, caller_namespace
from cachestore_svc.edge.uploading import Uploading
from cachestore_svc.facts.limits import check_hash, wrong
from cachestore_svc.facts.records import (
    BLOCK_TOKENS,
    MAX_DIGESTS_PER_REQUEST,
    MAX_FRAME_BYTES,
    EventCursor,
)
from cachestore_svc.index.values import CommitTerms, Done
from cachestore_svc.moving.inbound import BlobIntake
from cachestore_svc.moving.outbound import BlobReader
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.repairing import Repairs
from cachestore_svc.moving.streams import Streams
from cachestore_svc.moving.transfer import Transfers
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.snapshots import EarlyCommit, KnownManifest

_EVENTS_AT_ONCE = 500
# As many are read on the event loop in the time that a thread takes to begin.
_FEW_DIGESTS = 64


@dataclass(frozen=True, slots=True)
class StoreParts:
    store: AioStore
    reader: BlobReader
    transfers: Transfers
    peers: Peers
    repairs: Repairs


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    scrub_bytes_per_s: int
    max_blob_bytes: int
    stall_timeout_s: float


class CacheStoreService(StoreCalls, cachestore_pb2_grpc.CacheStoreServiceServicer):
    def __init__(self, parts: StoreParts, limits: ServiceLimits, stopping: asyncio.Event) -> None:
        super().__init__(parts.store)
        self._parts = parts
        self._limits = limits
        self._streams = Streams(limits.stall_timeout_s)
        self._ahead = ManifestsAhead(parts.store, parts.transfers.manifests)
        self._stopping = stopping
        # Namespaces whose blobs are being read through: one caller at a time keeps a disk busy enough.
        self._verifying: set[str] = set()
        self._receiving: set[str] = set()  # namespaces that have a place for handed files

    # --- blobs ---

    async def FindMissingBlobs(self, request: pb.FindMissingBlobsRequest, context: Any) -> pb.FindMissingBlobsResponse:
        namespace = caller_namespace()

        def answer() -> pb.FindMissingBlobsResponse:
            names = messages.read_names(request.digests)
            whole = self._store.blobs.find_whole(namespace, names)
            missing = {name: each for name, each in zip(names, request.digests, strict=True) if name not in whole}
            return pb.FindMissingBlobsResponse(missing=missing.values())

        return await self._looked_up(len(request.digests), answer)

    async def WriteBlobs(self, request_iterator: AsyncIterator[Carrier], context: Any) -> None:
        uploading = Uploading(BlobIntake(self._store, caller_namespace()), self._ahead)
        receiving = asyncio.create_task(uploading.receive(self._streams.unstalled(request_iterator)))
        try:
            async with aclosing(uploading.answers()) as answers:
                async for response in answers:
                    await self._streams.send(context, response)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def QueryWriteStatus(self, request: pb.QueryWriteStatusRequest, context: Any) -> pb.QueryWriteStatusResponse:
        digest = messages.read_digest(request.digest, "digest")
        status = await self._run(self._store.blobs.write_status, digest)
        return written(pb.QueryWriteStatusResponse, status)

    async def ReadBlobs(self, request: pb.ReadBlobsRequest, context: Any) -> None:
        digests = await self._digests(request.digests, "digests")
        first_bytes = digests[0].size_bytes if digests else 0
        if not 0 <= request.first_offset < max(first_bytes, 1):
            raise wrong("first_offset", f"expected 0 to {max(first_bytes - 1, 0)}, got {request.first_offset}")
        async with self._parts.reader.open(caller_namespace(), digests, request.first_offset) as source:
            while pieces := await source.next_pieces(MAX_FRAMES if request.takes_several else 1):
                message = carrier_bytes(map(messages.write_frame, pieces))
                pieces.clear()  # a slow reader keeps the message alone
                await self._streams.send(context, message, source)

    async def _digests(self, named: Sequence[manifest_pb2.Digest], field: str) -> list[Digest]:
        """Many are read on a thread."""
        if len(named) <= _FEW_DIGESTS:
            return messages.read_digests(named, field)
        return await self._looked_up(len(named), lambda: messages.read_digests(named, field))

    # --- snapshots ---

    async def CommitSnapshot(self, request: pb.CommitSnapshotRequest, context: Any) -> pb.CommitSnapshotResponse:
        manifest, parent = messages.read_digest(request.manifest, "manifest"), None
        if request.HasField("parent_manifest"):
            parent = messages.read_digest(request.parent_manifest, "parent_manifest")
        by = request.handed_over_by and check_agent_id(request.handed_over_by, "handed_over_by")
        terms = CommitTerms(
            messages.read_lease(request.lease) if request.HasField("lease") else None,
            base_version=messages.read_version(request.base_version, "base_version"),
            handed_over_by=by,
            parent_manifest=parent,
            is_brought=request.is_brought,
            bind_shared=ENGINE in current_principal().roles,  # no other caller's
        )
        version = messages.read_version(request.expected_version, "expected_version")
        asked, awaited = (request.agent_id, manifest, version, terms), await self._digests(request.awaited, "awaited")
        async with self._ahead.known(caller_namespace(), manifest, is_coming=bool(awaited)) as known:
            done = await self._early(known, awaited, *asked) if awaited and known is not None else None
            snapshot = done.snapshot if done else await self._run(self._store.snapshots.commit, *asked, known)
        return written(pb.CommitSnapshotResponse, snapshot=snapshot)

    async def _early(
        self,
        known: KnownManifest,
        awaited: Sequence[Digest],
        agent_id: str,
        manifest: Digest,
        version: int,
        terms: CommitTerms,
    ) -> Done | None:
        """Commit with the last of its blobs. None: these did not come as soon as an answer is due."""
        answer: Future[Done] = Future()
        try:
            early = EarlyCommit(known, [manifest, *awaited], answer)
            await self._run(self._store.snapshots.commit_early, early, agent_id, manifest, version, terms)
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            return None
        finally:
            answer.cancel()  # a caller who left, or will commit again, gets no version behind its back

    async def FindPrefix(self, request: pb.FindPrefixRequest, context: Any) -> pb.FindPrefixResponse:
        namespace, kv_hash, groups = caller_namespace(), request.kv_identity_hash, request.groups or (0,)

        def answer() -> pb.FindPrefixResponse:
            hashes = messages.read_block_hashes(request.block_hashes)
            return messages.write_prefix(self._store.prefixes.find(namespace, kv_hash, hashes, groups))

        return await self._looked_up(len(request.block_hashes) * max(1, len(request.groups)), answer)

    # --- leases ---

    async def AcquireLease(self, request: pb.AcquireLeaseRequest, context: Any) -> pb.AcquireLeaseResponse:
        about = request.agent_id, request.kv_identity_hash, request.owner, messages.read_ttl_s(request)
        begins_anew, asks = request.begins_anew, request.asks
        lease = await self._run(self._store.leases.acquire, *about, begins_anew=begins_anew, asks=asks)
        return written(pb.AcquireLeaseResponse, lease, lease=lease.token, head=lease.newest)

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Any) -> pb.RenewLeaseResponse:
        line, token = (request.agent_id, request.kv_identity_hash), messages.read_lease(request.lease)
        lease = await self._run(self._store.leases.renew, *line, token, messages.read_ttl_s(request))
        return written(pb.RenewLeaseResponse, lease)

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Any) -> pb.RenewLeasesResponse:
        held, ttl_s = messages.read_leases(request), messages.read_ttl_s(request)
        kv_hash = check_hash(request.kv_identity_hash)
        renewed = await self._run(self._store.leases.renew_all, request.owner, kv_hash, held, ttl_s)
        return written(pb.RenewLeasesResponse, renewed)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        line = request.agent_id, request.kv_identity_hash
        lease = messages.read_lease(request.lease)
        await self._store.run(caller_namespace(), self._store.leases.release, *line, lease)  # also once nobody waits
        return pb.ReleaseLeaseResponse()

    # --- events and care ---

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        namespace = caller_namespace()
        loop = asyncio.get_running_loop()
        happened = asyncio.Event()

        with self._store.events.watching(namespace, lambda: loop.call_soon_threadsafe(happened.set)):
            after = request.after
            cursor = EventCursor(after.incarnation, after.sequence) if request.HasField("after") else None
            is_first = True
            while True:
                happened.clear()
                batch = await self._run(self._store.events.after, cursor, _EVENTS_AT_ONCE)
                if batch.is_lost:
                    yield written(pb.WatchEventsResponse, batch, lost=pb.EventsLost())
                elif is_first:
                    begun = cursor or batch.cursor
                    yield written(pb.WatchEventsResponse, cursor=begun, started=pb.WatchStarted())
                for event in batch.events:
                    yield messages.write_event(event)
                cursor, is_first = batch.cursor, False
                if not batch.events:
                    await self._wait_or_stop(happened)

    async def VerifyBlobs(self, request: pb.VerifyBlobsRequest, context: Any) -> None:
        agent_id = check_agent_id(request.agent_id) if request.agent_id else None
        namespace = caller_namespace()
        if namespace in self._verifying:
            raise ResourceExhausted(
                "the blobs of this namespace are being verified already", reason="VERIFY_RUNNING", retry_after_s=5
            )
        self._verifying.add(namespace)
        try:
            steps = await self._run(self._store.care.verify, agent_id)
            while (step := await self._store.threads.run(namespace, next, steps, None)) is not None:
                repaired = [digest for digest in step.damaged if await self._parts.repairs.repair(namespace, digest)]
                await self._streams.send(context, written(pb.VerifyBlobsResponse, step, repaired=repaired))
        finally:
            self._verifying.discard(namespace)

    async def CollectGarbage(self, request: pb.CollectGarbageRequest, context: Any) -> pb.CollectGarbageResponse:
        report = await self._run(self._store.care.collect_garbage, request.dry_run)
        return written(pb.CollectGarbageResponse, report)

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Any) -> pb.GetCapabilitiesResponse:
        caller = current_principal()
        features = ["several", *(["sealed"] if self._store.is_sealed(caller.namespace) else [])]
        if ENGINE in caller.roles and await self._receives_files(caller.namespace):
            features.append("handed")
        if not self._store.is_shared:  # another store may list what a commit waits for here
            features.append("awaits")
        if self._store.blobs.are_far:
            features.append("far")
        return pb.GetCapabilitiesResponse(
            version=__version__,
            manifest_format=MANIFEST_FORMAT,
            block_tokens=BLOCK_TOKENS,
            max_frame_bytes=MAX_FRAME_BYTES,
            max_blob_bytes=self._limits.max_blob_bytes,
            max_digests_per_request=MAX_DIGESTS_PER_REQUEST,
            namespace=caller.namespace,
            roles=sorted(caller.roles),
            peers=self._parts.peers.names(caller.namespace) if caller.roles & PEOPLE else (),
            features=features,
        )

    async def _receives_files(self, namespace: str) -> bool:
        """Whether engines on this host may hand files over: known without a thread after the first time."""
        if namespace not in self._receiving and await self._run(self._store.blobs.receive_files):
            self._receiving.add(namespace)
        return namespace in self._receiving

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        stats = await self._run(self._store.statistics.of)
        if ADMIN not in current_principal().roles:  # free bytes of the disk change with the writes of other namespaces
            return written(pb.GetStatsResponse, stats, free_disk_bytes=None)
        state = self._store.care.scrubbing.state
        ended_at = state.ended_unix_ms or None
        scrub = written(pb.ScrubStatus, state, ended_at=ended_at, bytes_per_s=self._limits.scrub_bytes_per_s)
        return written(pb.GetStatsResponse, stats, scrub=scrub)

    async def _wait_or_stop(self, happened: asyncio.Event) -> None:
        """Wait for an event. Raises Unavailable when the service stops."""
        waits = [asyncio.create_task(happened.wait()), asyncio.create_task(self._stopping.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        if self._stopping.is_set():
            raise Unavailable("the store is stopping: watch again from the last cursor", reason="STOPPING")


def add_to_server(service: CacheStoreService, server: Any) -> None:
    """As the generated function, but blobs' frames are not copied on their way through protobuf."""
    moving_blobs: dict[str, Any] = {
        "WriteBlobs": grpc.stream_stream_rpc_method_handler(
            service.WriteBlobs, carrier_reader(pb.WriteBlobsRequest), pb.WriteBlobsResponse.SerializeToString
        ),
        "ReadBlobs": grpc.unary_stream_rpc_method_handler(service.ReadBlobs, pb.ReadBlobsRequest.FromString),
    }
    name = pb.DESCRIPTOR.services_by_name["CacheStoreService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, moving_blobs),))  # of these the first
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_registered_method_handlers(name, moving_blobs)  # of these the last, and before all of the others
