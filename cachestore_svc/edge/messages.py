"""Requests checked and answers written: between the wire's messages and the store's records.

Each `read_…` raises InvalidArgument naming the field of the request; each `write_…` cannot fail.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from google.protobuf import timestamp_pb2
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.blob_place import is_token
from kvasir.formats.digest import Digest, is_hash
from kvasir.formats.frame_messages import Carrier
from kvasir.names import check_agent_id, check_owner

from cachestore_svc.facts import records
from cachestore_svc.facts.ownership import HERE, MAX_TOLD_GENERATION, Ownership
from cachestore_svc.facts.records import (
    DEFAULT_LEASE_TTL_S,
    MAX_BLOCK_HASHES_PER_REQUEST,
    MAX_DIGESTS_PER_REQUEST,
    MAX_LEASES_PER_REQUEST,
    BlobKind,
)
from cachestore_svc.moving.copying import Progress
from cachestore_svc.moving.outbound import Piece

_KINDS = {pb.BLOB_KIND_TENSORS: BlobKind.TENSORS, pb.BLOB_KIND_MANIFEST: BlobKind.MANIFEST}


def read_digest(message: manifest_pb2.Digest, field: str) -> Digest:
    try:
        return Digest.from_proto(message)
    except ValueError as error:
        raise InvalidArgument(f"{field}: {error}", field=field, reason="BAD_DIGEST") from None


def read_optional_digest(request: pb.CommitSnapshotRequest, field: str) -> Digest | None:
    return read_digest(getattr(request, field), field) if request.HasField(field) else None  # type: ignore[arg-type]


def read_digests(messages: Sequence[manifest_pb2.Digest], field: str = "digests") -> list[Digest]:
    if len(messages) > MAX_DIGESTS_PER_REQUEST:
        raise InvalidArgument(f"{field}: expected at most {MAX_DIGESTS_PER_REQUEST}, got {len(messages)}", field=field)
    try:
        return [Digest.from_proto(message) for message in messages]
    except ValueError:  # one by one, to name the field
        return [read_digest(message, f"{field}[{index}]") for index, message in enumerate(messages)]


def read_kind(kind: int) -> BlobKind:
    found: BlobKind | None = _KINDS.get(kind)  # type: ignore[call-overload]
    if found is None:
        raise InvalidArgument("frame.kind: expected TENSORS or MANIFEST in a blob's first frame", field="frame.kind")
    return found


def read_handed(request: Carrier) -> str:
    """The token of the file in which the request's blob lies; "" if its bytes come."""
    first = request.frames[0]
    is_alone = len(request.frames) == 1 and not first.data and not first.offset
    if request.handed and (not is_token(request.handed) or not is_alone):
        raise InvalidArgument("handed: expected 32 lower-case hex digits, and one frame without data", field="handed")
    return request.handed


def read_kv_hash(text: str, field: str = "kv_identity_hash") -> str:
    if not is_hash(text):
        raise InvalidArgument(f"{field}: expected 64 lower-case hex digits", field=field)
    return text


def read_optional_kv_hash(text: str) -> str | None:
    return read_kv_hash(text) if text else None


def read_block_hashes(texts: Sequence[str]) -> list[str]:
    if len(texts) > MAX_BLOCK_HASHES_PER_REQUEST:
        raise InvalidArgument(
            f"block_hashes: expected at most {MAX_BLOCK_HASHES_PER_REQUEST}, got {len(texts)}", field="block_hashes"
        )
    return [read_kv_hash(text, f"block_hashes[{index}]") for index, text in enumerate(texts)]


def write_frame(piece: Piece) -> tuple[pb.BlobFrame, memoryview]:
    """The frame without its data, and these."""
    return pb.BlobFrame(offset=piece.offset, digest=piece.digest.to_proto() if piece.is_first else None), piece.data


def write_prefix(found: records.FoundPrefix) -> pb.FindPrefixResponse:
    windows = [
        manifest_pb2.WindowBlocks(
            window=each.group, first_block=each.first_block, blocks=[digest.to_proto() for digest in each.blocks]
        )
        for each in found.groups
        if each.group
    ]
    blocks = [digest.to_proto() for digest in found.blocks_of(0)]
    return pb.FindPrefixResponse(blocks=blocks, windows=windows, tokens=found.tokens)


def read_optional_version(
    request: pb.GetSnapshotRequest | pb.ForkAgentRequest | pb.RollbackAgentRequest | pb.ExportAgentRequest,
    field: str = "version",
) -> int | None:
    return read_version(getattr(request, field), field, least=1) if request.HasField(field) else None  # type: ignore[arg-type]


class AgentChanges(TypedDict, total=False):
    """The arguments of Store.update_agent that a request names."""

    labels: Mapping[str, str]
    replaces_labels: bool
    is_pinned: bool
    retained_versions: int


def read_agent_changes(request: pb.UpdateAgentRequest) -> AgentChanges:
    """What update_mask names, with its values."""
    agent, changes = request.agent, AgentChanges()
    labels: dict[str, str] = {}
    for path in request.update_mask.paths:
        field, _, label = path.partition(".")
        if path == "labels":
            labels.update(agent.labels)
            changes["replaces_labels"] = True
        elif field == "labels":
            labels[label] = agent.labels[label] if label in agent.labels else ""  # noqa: SIM401  a map of protobuf
        elif path == "is_pinned":
            changes["is_pinned"] = agent.is_pinned
        elif path == "retained_versions":
            changes["retained_versions"] = agent.retained_versions
        else:
            raise InvalidArgument(
                f"update_mask: expected labels, labels.KEY, is_pinned and retained_versions, got {path[:40]!r}",
                field="update_mask",
            )
    if empty := next((name for name, value in agent.labels.items() if not value), None):
        raise InvalidArgument(
            f"agent.labels: expected a value for {empty[:40]!r}; leave it out to remove it", field="agent.labels"
        )
    if not request.update_mask.paths:
        raise InvalidArgument("update_mask: expected at least one path", field="update_mask")
    return AgentChanges({**changes, "labels": labels})


def read_version(version: int, field: str = "version", *, least: int = 0) -> int:
    if version < least:
        raise InvalidArgument(f"{field}: expected {least} or more, got {version}", field=field)
    return version


def read_optional_name(text: str, field: str) -> str:
    return check_agent_id(text, field) if text else ""


def read_move_id(text: str) -> str:
    if not (16 <= len(text) <= 64 and set(text) <= set("0123456789abcdef")):
        raise InvalidArgument("move_id: expected 16 to 64 lower-case hex digits", field="move_id")
    return text


def read_generation(generation: int, *, least: int = 0) -> int:
    if not least <= generation <= MAX_TOLD_GENERATION:
        expected = f"expected {least} to {MAX_TOLD_GENERATION}"
        raise InvalidArgument(f"generation: {expected}, got {generation}", field="generation")
    return generation


def read_ttl_s(request: pb.AcquireLeaseRequest | pb.RenewLeaseRequest | pb.RenewLeasesRequest) -> float:
    return request.ttl.ToMilliseconds() / 1000 if request.HasField("ttl") else DEFAULT_LEASE_TTL_S


def read_lease(message: pb.LeaseToken) -> records.LeaseToken:
    return records.LeaseToken(check_owner(message.owner, "lease.owner"), message.generation)


def read_leases(request: pb.RenewLeasesRequest) -> list[records.HeldLease]:
    if len(request.leases) > MAX_LEASES_PER_REQUEST:
        raise InvalidArgument(
            f"leases: expected at most {MAX_LEASES_PER_REQUEST}, got {len(request.leases)}", field="leases"
        )
    return [
        records.HeldLease(check_agent_id(each.agent_id, f"leases[{index}].agent_id"), each.generation)
        for index, each in enumerate(request.leases)
    ]


def read_cursor(request: pb.WatchEventsRequest) -> records.EventCursor | None:
    if not request.HasField("after"):
        return None
    return records.EventCursor(request.after.incarnation, request.after.sequence)


def write_snapshot(snapshot: records.SnapshotVersion) -> pb.SnapshotVersion:
    return pb.SnapshotVersion(
        agent_id=snapshot.agent_id,
        kv_identity_hash=snapshot.kv_identity_hash,
        version=snapshot.version,
        manifest=snapshot.manifest.to_proto(),
        parent_version=snapshot.parent_version,
        token_count=snapshot.token_count,
        created_at=write_time(snapshot.created_unix_ms),
        total_bytes=snapshot.total_bytes,
        origin=snapshot.origin.value,  # type: ignore[arg-type]  # the numbers are the wire's
        origin_detail=snapshot.origin_detail,
        request_id=snapshot.request_id,
        is_brought=snapshot.is_brought,
        base_version=snapshot.base_version,
        is_text_own=snapshot.is_text_own,
    )


def write_agent(agent: records.AgentRecord) -> pb.Agent:
    return pb.Agent(
        agent_id=agent.agent_id,
        labels=agent.labels,
        is_pinned=agent.is_pinned,
        retained_versions=agent.retained_versions,
        created_at=write_time(agent.created_unix_ms),
        used_at=write_time(agent.used_unix_ms),
        lines=[write_snapshot(line) for line in agent.lines],
        expires_at=write_time(agent.expires_unix_ms) if agent.expires_unix_ms is not None else None,
        ownership=None if agent.ownership == HERE else _write_ownership(agent.ownership, agent.given_by),
    )


def _write_ownership(known: Ownership, given_by: str) -> pb.Ownership:
    return pb.Ownership(
        state=known.state.value,  # type: ignore[arg-type]  # the numbers are the wire's
        generation=known.generation,
        peer=known.peer,
        since=write_time(known.since_unix_ms),
        move_id=known.move_id,
        given_by=given_by,
    )


def write_lease(token: records.LeaseToken) -> pb.LeaseToken:
    return pb.LeaseToken(owner=token.owner, generation=token.generation)


def write_acquired(lease: records.Lease) -> pb.AcquireLeaseResponse:
    return pb.AcquireLeaseResponse(
        lease=write_lease(lease.token),
        expires_at=write_time(lease.expires_unix_ms),
        head_version=lease.head_version,
        head=write_snapshot(lease.newest) if lease.newest is not None else None,
    )


def write_renewed(renewed: records.RenewedLeases) -> pb.RenewLeasesResponse:
    def named(leases: Sequence[records.HeldLease]) -> list[pb.HeldLease]:
        return [pb.HeldLease(agent_id=each.agent_id, generation=each.generation) for each in leases]

    return pb.RenewLeasesResponse(lost=named(renewed.lost), wanted=named(renewed.wanted))


def write_progress(progress: Progress) -> pb.TransferProgress:
    return pb.TransferProgress(
        blobs_done=progress.blobs_done,
        blobs_total=progress.blobs_total,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        blobs_skipped=progress.blobs_skipped,
    )


def write_event(event: records.Event) -> pb.WatchEventsResponse:
    message = pb.WatchEventsResponse(cursor=write_cursor(event.cursor), at=write_time(event.at_unix_ms))
    body = event.body
    if isinstance(body, records.Committed):
        message.committed.CopyFrom(write_snapshot(body.snapshot))
    elif isinstance(body, records.AgentDeleted):
        message.agent_deleted.agent_id = body.agent_id
    elif isinstance(body, records.AgentUpdated):
        message.agent_updated.agent_id = body.agent_id
    elif isinstance(body, records.LeaseWanted):
        message.lease_wanted.agent_id = body.agent_id
        message.lease_wanted.kv_identity_hash = body.kv_identity_hash
        message.lease_wanted.takes_back = body.takes_back
    else:
        message.blob_damaged.digest.CopyFrom(body.digest.to_proto())
    return message


def write_cursor(cursor: records.EventCursor) -> pb.EventCursor:
    return pb.EventCursor(incarnation=cursor.incarnation, sequence=cursor.sequence)


def write_stats(stats: records.Stats, *, shows_disk: bool) -> pb.GetStatsResponse:
    """`shows_disk` only to administrators: free bytes of the disk change with what other namespaces write."""
    return pb.GetStatsResponse(
        agent_count=stats.agent_count,
        snapshot_count=stats.snapshot_count,
        blob_count=stats.blob_count,
        blob_bytes=stats.blob_bytes,
        logical_bytes=stats.logical_bytes,
        quota_bytes=stats.quota_bytes or 0,
        reserved_bytes=stats.reserved_bytes,
        free_disk_bytes=stats.free_disk_bytes if shows_disk else 0,
        unreferenced_bytes=stats.unreferenced_bytes,
        damaged_blob_count=stats.damaged_blob_count,
        written_today_bytes=stats.written_today_bytes,
        write_budget_bytes=stats.write_budget_bytes or 0,
        counters=stats.counters,
    )


def write_scrub(state: records.ScrubState, bytes_per_s: int) -> pb.ScrubStatus:
    return pb.ScrubStatus(
        began_at=write_time(state.began_unix_ms),
        ended_at=write_time(state.ended_unix_ms) if state.ended_unix_ms else None,
        blobs_checked=state.blobs_checked,
        bytes_checked=state.bytes_checked,
        blobs_damaged=state.blobs_damaged,
        blobs_repaired=state.blobs_repaired,
        bytes_per_s=bytes_per_s,
    )


def write_usage(stats: records.Stats) -> pb.GetUsageResponse:
    return pb.GetUsageResponse(
        agent_count=stats.agent_count,
        snapshot_count=stats.snapshot_count,
        blob_count=stats.blob_count,
        blob_bytes=stats.blob_bytes,
        quota_bytes=stats.quota_bytes or 0,
        unreferenced_bytes=stats.unreferenced_bytes,
        damaged_blob_count=stats.damaged_blob_count,
    )


def write_agent_usage(usage: records.AgentUsage) -> pb.GetUsageResponse:
    return pb.GetUsageResponse(
        agent_count=1,
        snapshot_count=usage.snapshot_count,
        blob_count=usage.blob_count,
        blob_bytes=usage.blob_bytes,
        shared_blob_count=usage.shared_blob_count,
        shared_bytes=usage.shared_bytes,
    )


def write_time(unix_ms: int) -> timestamp_pb2.Timestamp:
    timestamp = timestamp_pb2.Timestamp()
    # An expiry is later than the clock, and a clock may be anywhere.
    timestamp.FromMilliseconds(min(max(unix_ms, 0), records.LAST_UNIX_MS))
    return timestamp
