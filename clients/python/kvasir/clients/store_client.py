"""The cache store's blocking client: every RPC a method, typed errors, transfers that go on after a cut.

Made from `aio_store_client.py` by `tools/make_sync_client.py`; change that one. Errors are the types of
`kvasir.errors`. Round trips have a deadline (`timeout_s` of the client, or of the call); transfers have none,
because a dead peer is noticed by keepalive. One client may be used by many threads.
"""

import copy
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc
from google.protobuf import duration_pb2

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients.archive_file import new_file, pieces_of
from kvasir.clients.channel import Metadata, Tls, bearer, sync_channel
from kvasir.clients.store_client_transfers import (
    READS,
    Buffer,
    OnProgress,
    Upload,
    batches,
    import_requests,
    manifest_digest,
)
from kvasir.errors import FailedPrecondition, Internal, InvalidArgument, NotFound, Unavailable
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FrameAssembler
from kvasir.status import from_rpc_error

_Response = TypeVar("_Response")
_TENSORS, _MANIFEST = pb.BLOB_KIND_TENSORS, pb.BLOB_KIND_MANIFEST
_CUT_PAUSE_S = 0.2
# How long a blob that another writer has open is waited for: a store gives up a silent writer sooner.
_WAIT_S, _MAX_WAITS = 0.25, 240


class StoreClient:
    """A cache store, over one channel. Close it with `with` or close().

    A transfer that is cut is taken up again, until it was cut `max_cuts` times without a blob finished in between.
    """

    def __init__(
        self, channel: grpc.Channel, *, token: str | None = None, timeout_s: float = 10.0, max_cuts: int = 5
    ) -> None:
        self._channel = channel
        self._owns_channel = True
        self._stub: Any = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        self._metadata: Metadata = bearer(token) if token else ()
        self._timeout_s = timeout_s
        self._max_cuts = max_cuts

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        retry_reads: bool = True,
        max_cuts: int = 5,
    ) -> Self:
        """A client of the store at unix:/path or host:port. Connects with the first call. Raises InvalidArgument."""
        channel = sync_channel(address, tls, READS if retry_reads else ())
        return cls(channel, token=token, timeout_s=timeout_s, max_cuts=max_cuts)

    def with_token(self, token: str) -> Self:
        """The same service for another caller, over the same channel. A gateway hands on its callers' tokens with it.

        The channel is all that the two clients share, and it stays this one's: closing the new one leaves it open.
        Raises Unauthenticated without a token, because on a Unix socket a call without a token is the owner's.
        """
        other = copy.copy(self)
        other._metadata = bearer(token)
        other._owns_channel = False
        return other

    def close(self) -> None:
        if self._owns_channel:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- blobs ---

    def find_missing(self, digests: Sequence[Digest], *, timeout_s: float | None = None) -> list[Digest]:
        """Those that the store lacks, in the order asked. Extends the lifetime of the others."""
        missing: list[Digest] = []
        for batch in batches(digests):
            request = pb.FindMissingBlobsRequest(digests=[digest.to_proto() for digest in batch])
            response = self._call(pb.FindMissingBlobsResponse, request, timeout_s)
            missing += [Digest.from_proto(digest) for digest in response.missing]
        return missing

    def put_blobs(
        self,
        blobs: Mapping[Digest, Buffer],
        *,
        kind: "pb.BlobKind" = _TENSORS,
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> pb.TransferProgress:
        """Store those of the blobs that the store lacks; on return all are durable. Goes on after a cut where it was.

        Raises ResourceExhausted (quota, disk), InvalidArgument (bytes or header refused), Unavailable (cut too often).
        """
        upload = Upload(blobs, kind, self.find_missing(list(blobs), timeout_s=timeout_s), on_progress)
        cuts = waits = 0
        while upload.pending:
            before = len(upload.pending)
            try:
                self._send(upload, timeout_s)
            except (Unavailable, InvalidArgument) as error:
                # What had arrived may be given up for others' blobs between asking for it and going on after it.
                if isinstance(error, InvalidArgument) and error.reason != "OFFSET_UNEXPECTED":
                    raise
                cuts = cuts + 1 if len(upload.pending) == before else 0
                if cuts >= self._max_cuts:
                    raise
                time.sleep(_CUT_PAUSE_S * (cuts + 1))
            except FailedPrecondition as error:
                # Somebody else sends the same blob: when that ends, it is there, or is ours to send.
                waits += 1
                if error.reason != "WRITE_IN_PROGRESS" or waits == _MAX_WAITS:
                    raise
                time.sleep(_WAIT_S)
        return upload.progress

    def put_manifest(self, data: bytes, *, timeout_s: float | None = None) -> Digest:
        """Store a manifest's bytes."""
        digest = Digest.of(data)
        self.put_blobs({digest: data}, kind=_MANIFEST, timeout_s=timeout_s)
        return digest

    def write_status(self, digest: Digest) -> pb.QueryWriteStatusResponse:
        """How much of a blob has arrived."""
        return self._call(pb.QueryWriteStatusResponse, pb.QueryWriteStatusRequest(digest=digest.to_proto()))

    def get_blobs(
        self, digests: Sequence[Digest], *, timeout_s: float | None = None
    ) -> Generator[tuple[Digest, memoryview], None, None]:
        """The blobs in the order asked, each verified here too. Goes on after a cut where it was.

        Raises NotFound and DataLoss (metadata "digest"), Unavailable (cut too often).
        """
        assembler = FrameAssembler(digests)
        cuts = 0
        while assembler.remaining:
            before = (len(assembler.remaining), assembler.received_bytes)
            try:
                with closing(self._receive(assembler, timeout_s)) as blobs:
                    yield from blobs
            except Unavailable:
                cuts = cuts + 1 if (len(assembler.remaining), assembler.received_bytes) == before else 0
                if cuts >= self._max_cuts:
                    raise
                time.sleep(_CUT_PAUSE_S * (cuts + 1))

    def get_blob(self, digest: Digest, *, timeout_s: float | None = None) -> memoryview:
        """One blob's bytes."""
        with closing(self.get_blobs([digest], timeout_s=timeout_s)) as blobs:
            for _, data in blobs:
                return data
        raise NotFound(f"blob {digest}", metadata={"digest": digest.hash})

    def read_frames(
        self, digests: Sequence[Digest], first_offset: int = 0, *, timeout_s: float | None = None
    ) -> Generator[pb.BlobFrame, None, None]:
        """One stream of frames as they come, unverified, for who writes them on: at most 10,000 blobs."""
        request = pb.ReadBlobsRequest(digests=[digest.to_proto() for digest in digests], first_offset=first_offset)
        call = self._stub.ReadBlobs(request, timeout=timeout_s, metadata=self._metadata)
        with closing(_responses(call)) as responses:
            for response in responses:
                yield response.frame

    # --- snapshots ---

    def commit(
        self,
        agent_id: str,
        manifest: Digest,
        parent_version: int,
        *,
        parent_manifest: Digest | None = None,
        lease: pb.LeaseToken | None = None,
        is_brought: bool = False,
        timeout_s: float | None = None,
    ) -> pb.SnapshotVersion:
        """Make a stored manifest the agent's next version. Raises Conflict, FailedPrecondition. Safe to repeat.

        `is_brought`: the writer knows that rows of it came by import or pull.
        """
        request = pb.CommitSnapshotRequest(
            agent_id=agent_id,
            manifest=manifest.to_proto(),
            parent_version=parent_version,
            lease=lease,
            is_brought=is_brought,
            parent_manifest=parent_manifest.to_proto() if parent_manifest is not None else None,
        )
        return (self._call(pb.CommitSnapshotResponse, request, timeout_s)).snapshot

    def get_snapshot(
        self, agent_id: str, kv_identity_hash: str = "", version: int = 0, *, timeout_s: float | None = None
    ) -> tuple[pb.SnapshotVersion, bytes]:
        """A version (0: the newest; of the line used last) and its manifest's bytes. Raises NotFound, DataLoss."""
        request = pb.GetSnapshotRequest(agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version)
        response = self._call(pb.GetSnapshotResponse, request, timeout_s)
        if response.manifest_bytes:
            return response.snapshot, response.manifest_bytes
        manifest = self.get_blob(manifest_digest(response.snapshot), timeout_s=timeout_s)
        return response.snapshot, bytes(manifest)

    def list_snapshots(
        self, agent_id: str, kv_identity_hash: str = "", *, page_size: int = 0, page_token: str = ""
    ) -> pb.ListSnapshotsResponse:
        """One page of an agent's versions, newest first."""
        request = pb.ListSnapshotsRequest(
            agent_id=agent_id, kv_identity_hash=kv_identity_hash, page_size=page_size, page_token=page_token
        )
        return self._call(pb.ListSnapshotsResponse, request)

    def find_prefix(
        self, kv_identity_hash: str, block_hashes: Sequence[str], *, timeout_s: float | None = None
    ) -> list[Digest]:
        """Digests of the longest stored prefix of a chain of block hashes (engine role)."""
        request = pb.FindPrefixRequest(kv_identity_hash=kv_identity_hash, block_hashes=block_hashes)
        response = self._call(pb.FindPrefixResponse, request, timeout_s)
        return [Digest.from_proto(digest) for digest in response.blocks]

    # --- agents ---

    def list_agents(
        self,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        page_size: int = 0,
        page_token: str = "",
    ) -> pb.ListAgentsResponse:
        """One page of agents by name, those that have all the labels."""
        request = pb.ListAgentsRequest(
            name_prefix=name_prefix, labels=labels, page_size=page_size, page_token=page_token
        )
        return self._call(pb.ListAgentsResponse, request)

    def get_agent(self, agent_id: str) -> pb.Agent:
        return (self._call(pb.GetAgentResponse, pb.GetAgentRequest(agent_id=agent_id))).agent

    def update_agent(
        self,
        agent_id: str,
        *,
        labels: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
        retained_versions: int | None = None,
    ) -> pb.Agent:
        """Change what is given; an empty label value removes the label."""
        request = pb.UpdateAgentRequest(
            agent_id=agent_id,
            labels=labels,
            is_pinned=is_pinned,  # type: ignore[arg-type]  # the stubs do not know that None leaves it out
            retained_versions=retained_versions,
        )
        return (self._call(pb.UpdateAgentResponse, request)).agent

    def fork_agent(self, source_agent_id: str, agent_id: str, kv_identity_hash: str = "", version: int = 0) -> pb.Agent:
        """Start an agent whose first versions are another's. Copies no blob. Raises NotFound, AlreadyExists."""
        request = pb.ForkAgentRequest(
            source_agent_id=source_agent_id, agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version
        )
        return (self._call(pb.ForkAgentResponse, request)).agent

    def rollback_agent(
        self, agent_id: str, version: int, kv_identity_hash: str = "", *, expected_head: int = 0
    ) -> pb.SnapshotVersion:
        """Make an old version the newest again, as a new version. Raises NotFound, Conflict."""
        request = pb.RollbackAgentRequest(
            agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version, expected_head=expected_head
        )
        return (self._call(pb.RollbackAgentResponse, request)).snapshot

    def delete_agent(self, agent_id: str, *, force: bool = False) -> pb.DeleteAgentResponse:
        """Forget an agent; says when its bytes go. Raises NotFound, FailedPrecondition (pinned and not `force`)."""
        return self._call(pb.DeleteAgentResponse, pb.DeleteAgentRequest(agent_id=agent_id, force=force))

    # --- leases ---

    def acquire_lease(
        self,
        agent_id: str,
        kv_identity_hash: str,
        owner: str,
        *,
        ttl_s: float | None = None,
        begins_anew: bool = False,
        asks: bool = False,
        timeout_s: float | None = None,
    ) -> pb.AcquireLeaseResponse:
        """Take the right to extend a line. Raises FailedPrecondition (held; with `asks` its holder is asked to let go).
        `begins_anew` fences the owner's earlier lease: it is of a process that ended.
        """
        request = pb.AcquireLeaseRequest(
            agent_id=agent_id,
            kv_identity_hash=kv_identity_hash,
            owner=owner,
            ttl=_duration(ttl_s),
            begins_anew=begins_anew,
            asks=asks,
        )
        return self._call(pb.AcquireLeaseResponse, request, timeout_s)

    def renew_lease(
        self, agent_id: str, kv_identity_hash: str, lease: pb.LeaseToken, *, ttl_s: float | None = None
    ) -> pb.RenewLeaseResponse:
        """Prolong a lease. Raises Conflict (fenced), NotFound."""
        request = pb.RenewLeaseRequest(
            agent_id=agent_id, kv_identity_hash=kv_identity_hash, lease=lease, ttl=_duration(ttl_s)
        )
        return self._call(pb.RenewLeaseResponse, request)

    def renew_leases(
        self,
        owner: str,
        kv_identity_hash: str,
        generations: Mapping[str, int],
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> pb.RenewLeasesResponse:
        """Prolong an owner's live leases, by agent; says which were lost. At most 10,000."""
        leases = [pb.HeldLease(agent_id=agent, generation=number) for agent, number in generations.items()]
        request = pb.RenewLeasesRequest(
            owner=owner, kv_identity_hash=kv_identity_hash, leases=leases, ttl=_duration(ttl_s)
        )
        return self._call(pb.RenewLeasesResponse, request, timeout_s)

    def release_lease(
        self, agent_id: str, kv_identity_hash: str, lease: pb.LeaseToken, *, timeout_s: float | None = None
    ) -> None:
        """Give a lease back. Raises Conflict (fenced), NotFound."""
        request = pb.ReleaseLeaseRequest(agent_id=agent_id, kv_identity_hash=kv_identity_hash, lease=lease)
        self._call(pb.ReleaseLeaseResponse, request, timeout_s)

    # --- moving ---

    def pull_agent(
        self,
        peer: str,
        agent_id: str,
        *,
        local_agent_id: str = "",
        kv_identity_hash: str = "",
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> pb.SnapshotVersion:
        """Let the store copy an agent's line from a peer of its configuration. Safe to repeat.

        Raises NotFound (peer or agent), AlreadyExists (the line here is not an ancestor), Unavailable (peer), DataLoss.
        """
        request = pb.PullAgentRequest(
            peer=peer, agent_id=agent_id, local_agent_id=local_agent_id, kv_identity_hash=kv_identity_hash
        )
        call = self._stub.PullAgent(request, timeout=timeout_s, metadata=self._metadata)
        with closing(_responses(call)) as responses:
            for response in responses:
                if response.HasField("done"):
                    return cast("pb.SnapshotVersion", response.done)
                if on_progress is not None:
                    on_progress(response.progress)
        raise Internal("the pull ended without saying how")

    def export_agent(
        self, agent_id: str, kv_identity_hash: str = "", version: int = 0, *, timeout_s: float | None = None
    ) -> Generator[bytes, None, None]:
        """The archive of one version, in pieces. Raises NotFound, DataLoss."""
        request = pb.ExportAgentRequest(agent_id=agent_id, kv_identity_hash=kv_identity_hash, version=version)
        call = self._stub.ExportAgent(request, timeout=timeout_s, metadata=self._metadata)
        with closing(_responses(call)) as responses:
            for response in responses:
                yield response.data

    def export_to_file(self, agent_id: str, path: Path, kv_identity_hash: str = "", version: int = 0) -> int:
        """Save the archive of one version; returns its size in bytes. The file appears whole or not at all."""
        with new_file(path) as file:
            with closing(self.export_agent(agent_id, kv_identity_hash, version)) as pieces:
                for piece in pieces:
                    file.write(piece)
            return file.tell()

    def import_agent(
        self, agent_id: str, archive: Iterable[bytes], *, replace: bool = False, timeout_s: float | None = None
    ) -> pb.SnapshotVersion:
        """Read an archive into a new version of a line. Raises InvalidArgument, AlreadyExists, ResourceExhausted."""
        requests = import_requests(agent_id, replace, archive)
        return (self._call(pb.ImportAgentResponse, requests, timeout_s, has_deadline=False)).snapshot

    def import_from_file(self, agent_id: str, path: Path, *, replace: bool = False) -> pb.SnapshotVersion:
        """Send an archive that export_to_file saved."""
        return self.import_agent(agent_id, pieces_of(path), replace=replace)

    # --- events and care ---

    def watch(
        self, after: pb.EventCursor | None = None, *, timeout_s: float | None = None
    ) -> Generator[pb.WatchEventsResponse, None, None]:
        """What happens in the namespace, first `started` or `lost`; keep each `cursor` to go on later."""
        call = self._stub.WatchEvents(pb.WatchEventsRequest(after=after), timeout=timeout_s, metadata=self._metadata)
        with closing(_responses(call)) as responses:
            yield from responses

    def verify_blobs(
        self, agent_id: str = "", *, timeout_s: float | None = None
    ) -> Generator[pb.VerifyBlobsResponse, None, None]:
        """Re-hash an agent's blobs, or all; damaged ones are quarantined and named."""
        request = pb.VerifyBlobsRequest(agent_id=agent_id)
        call = self._stub.VerifyBlobs(request, timeout=timeout_s, metadata=self._metadata)
        with closing(_responses(call)) as responses:
            yield from responses

    def collect_garbage(self, *, dry_run: bool = False) -> pb.CollectGarbageResponse:
        """Mark what nothing names, sweep what rested long enough (admin role)."""
        request = pb.CollectGarbageRequest(dry_run=dry_run)
        return self._call(pb.CollectGarbageResponse, request, has_deadline=False)

    def get_capabilities(self, *, timeout_s: float | None = None) -> pb.GetCapabilitiesResponse:
        return self._call(pb.GetCapabilitiesResponse, pb.GetCapabilitiesRequest(), timeout_s)

    def get_stats(self) -> pb.GetStatsResponse:
        return self._call(pb.GetStatsResponse, pb.GetStatsRequest())

    # --- below ---

    def _call(
        self, response_type: type[_Response], request: Any, timeout_s: float | None = None, *, has_deadline: bool = True
    ) -> _Response:
        """One round trip of the RPC that is answered by this type: XResponse belongs to X."""
        method = getattr(self._stub, response_type.__name__.removesuffix("Response"))
        deadline_s = self._timeout_s if timeout_s is None and has_deadline else timeout_s
        try:
            response = method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return cast("_Response", _parsed(response))

    def _send(self, upload: Upload, timeout_s: float | None) -> None:
        """One stream of what is pending. Raises when it is cut; what was acknowledged by then is done."""
        status = self.write_status(upload.pending[0])
        first_offset = 0 if status.is_complete else status.received_bytes
        call = self._stub.WriteBlobs(upload.requests(first_offset), timeout=timeout_s, metadata=self._metadata)
        with closing(_responses(call)) as responses:
            for response in responses:
                upload.acknowledge(response)
        if upload.pending:
            raise Unavailable("the store ended the stream before every blob was stored")

    def _receive(
        self, assembler: FrameAssembler, timeout_s: float | None
    ) -> Generator[tuple[Digest, memoryview], None, None]:
        """One stream of what remains. Raises when it is cut; what arrived by then is kept."""
        wanted = next(batches(assembler.remaining))
        frames = self.read_frames(wanted, assembler.received_bytes, timeout_s=timeout_s)
        assembler.resume()
        received = 0
        with closing(frames):
            for frame in frames:
                if blob := assembler.add(frame):
                    received += 1
                    yield blob
        if received < len(wanted):
            raise Unavailable("the store ended the stream before every blob was sent")


def _responses(call: Any) -> Generator[Any, None, None]:
    """A stream's responses with typed errors. Leaving early cancels the call, so that the service stops too."""
    try:
        for response in call:
            yield _parsed(response)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    finally:
        call.cancel()


def _parsed(response: Any) -> Any:
    """The response. gRPC gives None for bytes that are no message of its type."""
    if response is None:
        raise Unavailable("the store's answer cannot be parsed")
    return response


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(int(seconds * 1000))
    return duration
