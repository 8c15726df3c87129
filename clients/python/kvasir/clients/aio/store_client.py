"""The cache store's asynchronous client. Round trips have a deadline; transfers have none, and resume after a cut."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf import duration_pb2

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc, pairing_pb2, pairing_pb2_grpc
from kvasir.clients.aio.agent_client import AioAgentClient
from kvasir.clients.aio.blob_transfers import AioBlobTransfers
from kvasir.clients.channel import AnyTls, aio_channel, blob_calls, calls_of
from kvasir.clients.store_client_transfers import READS, manifest_digest
from kvasir.formats.digest import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Of a version: its parent, its base, and the engines that computed its rows."""

    parent_manifest: Digest | None = None  # of the version before it; None: any
    base_version: int = 0  # the earlier version that it goes on from; 0: the one before it
    handed_over_by: str = ""  # the peer whose engine began the turn
    is_brought: bool = False  # the writer knows that rows of it came by import or pull


class AioStoreClient(AioBlobTransfers, AioAgentClient):
    """A cache store. A transfer fails when it was cut `max_cuts` times and no blob was finished in between."""

    def __init__(
        self, channel: grpc.aio.Channel, *, token: str | None = None, timeout_s: float = 10.0, max_cuts: int = 5
    ) -> None:
        stubs: Any = (cachestore_pb2_grpc.CacheStoreServiceStub, cachestore_pb2_grpc.MovingServiceStub)
        calls = calls_of(channel, *stubs, pairing_pb2_grpc.PeerServiceStub, **blob_calls(channel))
        super().__init__(channel, calls, token, timeout_s, max_cuts)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls: AnyTls | None = None,
        timeout_s: float = 10.0,
        retry_reads: bool = True,
        max_cuts: int = 5,
    ) -> Self:
        """A client of the store at unix:/path or host:port. Connects with the first call. Raises InvalidArgument,
        and Unauthenticated for a token that no header can hold."""
        channel = aio_channel(address, tls, READS if retry_reads else ())
        return cls(channel, token=token, timeout_s=timeout_s, max_cuts=max_cuts)

    # --- snapshots ---

    async def commit(
        self,
        agent_id: str,
        manifest: Digest,
        expected_version: int,
        *,
        lease: pb.LeaseToken | None = None,
        lineage: Lineage = Lineage(),
        awaited: Sequence[Digest] = (),
        timeout_s: float | None = None,
    ) -> pb.SnapshotVersion:
        """Make a stored manifest the agent's next version. Raises Conflict, FailedPrecondition. Safe to repeat.
        `awaited`: blobs that are on their way through other calls, as the manifest may be (a store with the feature
        `awaits`)."""
        parent = lineage.parent_manifest
        request = pb.CommitSnapshotRequest(
            agent_id=agent_id,
            manifest=manifest.to_proto(),
            expected_version=expected_version,
            lease=lease,
            is_brought=lineage.is_brought,
            parent_manifest=parent.to_proto() if parent is not None else None,
            base_version=lineage.base_version,
            handed_over_by=lineage.handed_over_by,
            awaited=[digest.to_proto() for digest in awaited],
        )
        return (await self._call(pb.CommitSnapshotResponse, request, timeout_s)).snapshot

    async def get_snapshot(
        self, agent_id: str, kv_identity_hash: str = "", version: int | None = None, *, timeout_s: float | None = None
    ) -> tuple[pb.SnapshotVersion, bytes]:
        """As AioAgentClient's, and of any size."""
        snapshot, manifest = await super().get_snapshot(agent_id, kv_identity_hash, version, timeout_s=timeout_s)
        return snapshot, manifest or bytes(await self.get_blob(manifest_digest(snapshot), timeout_s=timeout_s))

    async def find_prefix(
        self,
        kv_identity_hash: str,
        block_hashes: Sequence[str],
        groups: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
    ) -> pb.FindPrefixResponse:
        """The longest stored prefix of a chain of block hashes (engine role). `groups`: 0 for the layers that keep all
        tokens, n for those of window n, ascending; none means 0 alone."""
        request = pb.FindPrefixRequest(kv_identity_hash=kv_identity_hash, block_hashes=block_hashes, groups=groups)
        return await self._call(pb.FindPrefixResponse, request, timeout_s)

    # --- leases ---

    async def acquire_lease(
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
        """Take the right to extend a line. Raises FailedPrecondition if another owner holds it.

        `asks` asks that owner to release it. `begins_anew` fences this owner's earlier lease, of a process that ended.
        """
        request = pb.AcquireLeaseRequest(
            agent_id=agent_id,
            kv_identity_hash=kv_identity_hash,
            owner=owner,
            ttl=_duration(ttl_s),
            begins_anew=begins_anew,
            asks=asks,
        )
        return await self._call(pb.AcquireLeaseResponse, request, timeout_s)

    async def renew_lease(
        self, agent_id: str, kv_identity_hash: str, lease: pb.LeaseToken, *, ttl_s: float | None = None
    ) -> pb.RenewLeaseResponse:
        """Prolong a lease. Raises Conflict (fenced), NotFound."""
        request = pb.RenewLeaseRequest(
            agent_id=agent_id, kv_identity_hash=kv_identity_hash, lease=lease, ttl=_duration(ttl_s)
        )
        return await self._call(pb.RenewLeaseResponse, request)

    async def renew_leases(
        self,
        owner: str,
        kv_identity_hash: str,
        generations: Mapping[str, int],
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> pb.RenewLeasesResponse:
        """Prolong an owner's live leases, by agent; the response names those that were lost. At most 10,000."""
        leases = [pb.HeldLease(agent_id=agent, generation=number) for agent, number in generations.items()]
        request = pb.RenewLeasesRequest(
            owner=owner, kv_identity_hash=kv_identity_hash, leases=leases, ttl=_duration(ttl_s)
        )
        return await self._call(pb.RenewLeasesResponse, request, timeout_s)

    async def release_lease(
        self, agent_id: str, kv_identity_hash: str, lease: pb.LeaseToken, *, timeout_s: float | None = None
    ) -> None:
        """Give a lease back. Raises Conflict (fenced), NotFound."""
        request = pb.ReleaseLeaseRequest(agent_id=agent_id, kv_identity_hash=kv_identity_hash, lease=lease)
        await self._call(pb.ReleaseLeaseResponse, request, timeout_s)

    # --- for stores, of each other (peer role) ---

    async def offer_agent(
        self, agent_id: str, move_id: str, generation: int, *, timeout_s: float | None = None
    ) -> pb.OfferAgentResponse:
        """Request from a peer an agent that is to move here. Raises NotFound, FailedPrecondition, Unavailable."""
        request = pb.OfferAgentRequest(agent_id=agent_id, move_id=move_id, generation=generation)
        return await self._call(pb.OfferAgentResponse, request, timeout_s)

    async def hand_over_agent(
        self, agent_id: str, move_id: str, generation: int, *, timeout_s: float | None = None
    ) -> None:
        """Take the agent over: all of it is durable here. Raises FailedPrecondition (MOVE_UNKNOWN)."""
        request = pb.HandOverAgentRequest(agent_id=agent_id, move_id=move_id, generation=generation)
        await self._call(pb.HandOverAgentResponse, request, timeout_s)

    async def undo_move(self, agent_id: str, move_id: str, *, timeout_s: float | None = None) -> None:
        """Give up a move that was not handed over."""
        await self._call(pb.UndoMoveResponse, pb.UndoMoveRequest(agent_id=agent_id, move_id=move_id), timeout_s)

    async def fence_agent(self, agent_id: str, generation: int, *, timeout_s: float | None = None) -> None:
        """Report an agent's newer owner. Raises FailedPrecondition (OWNER_NEWER), Unavailable."""
        request = pb.FenceAgentRequest(agent_id=agent_id, generation=generation)
        await self._call(pb.FenceAgentResponse, request, timeout_s)

    # --- events and care ---

    def watch(
        self, after: pb.EventCursor | None = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        """The events of the namespace, first `started` or `lost`. Keep each `cursor` to continue from it later."""
        return self._responses(self._stub.WatchEvents, pb.WatchEventsRequest(after=after), timeout_s)

    def verify_blobs(
        self, agent_id: str = "", *, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.VerifyBlobsResponse, None]:
        """Hash the blobs of an agent again, or all blobs. Damaged blobs are quarantined and named."""
        return self._responses(self._stub.VerifyBlobs, pb.VerifyBlobsRequest(agent_id=agent_id), timeout_s)

    async def collect_garbage(self, *, dry_run: bool = False) -> pb.CollectGarbageResponse:
        """Mark blobs that nothing names, and remove those that were marked long enough ago (admin role)."""
        request = pb.CollectGarbageRequest(dry_run=dry_run)
        return await self._call(pb.CollectGarbageResponse, request, has_deadline=False)

    async def get_capabilities(self, *, timeout_s: float | None = None) -> pb.GetCapabilitiesResponse:
        return await self._call(pb.GetCapabilitiesResponse, pb.GetCapabilitiesRequest(), timeout_s)

    async def get_stats(self) -> pb.GetStatsResponse:
        return await self._call(pb.GetStatsResponse, pb.GetStatsRequest())

    async def reload_peers(self, *, timeout_s: float | None = None) -> pairing_pb2.ReloadPeersResponse:
        """Let the store read its file of peers again (admin role). Raises FailedPrecondition if the file is wrong."""
        return await self._call(pairing_pb2.ReloadPeersResponse, pairing_pb2.ReloadPeersRequest(), timeout_s)


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(int(seconds * 1000))
    return duration
