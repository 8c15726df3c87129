"""Requests checked, and the answers that are more than one record."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, TypeVar

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.blob_place import is_token
from kvasir.formats.digest import BlobName, Digest, names_of
from kvasir.formats.frame_messages import Carrier
from kvasir.names import check_agent_id, check_owner
from kvasir.server.answers import written

from cachestore_svc.facts import records
from cachestore_svc.facts.limits import check_hash, wrong
from cachestore_svc.facts.ownership import HERE, MAX_TOLD_GENERATION
from cachestore_svc.facts.records import (
    DEFAULT_LEASE_TTL_S,
    MAX_BLOCK_HASHES_PER_REQUEST,
    MAX_DIGESTS_PER_REQUEST,
    MAX_LEASES_PER_REQUEST,
    BlobKind,
)
from cachestore_svc.moving.outbound import Piece

T = TypeVar("T")
_EVENTS = {
    records.Committed: "committed",
    records.AgentDeleted: "agent_deleted",
    records.AgentUpdated: "agent_updated",
    records.LeaseWanted: "lease_wanted",
    records.BlobDamaged: "blob_damaged",
}
_KINDS: dict[int, BlobKind] = {pb.BLOB_KIND_TENSORS: BlobKind.TENSORS, pb.BLOB_KIND_MANIFEST: BlobKind.MANIFEST}


def read_digest(message: manifest_pb2.Digest, field: str) -> Digest:
    try:
        return Digest.from_proto(message)
    except ValueError as error:
        raise wrong(field, str(error), reason="BAD_DIGEST") from None


def read_digests(messages: Sequence[manifest_pb2.Digest], field: str = "digests") -> list[Digest]:
    return _read_all(Digest.from_protos, messages, field)


def read_names(messages: Sequence[manifest_pb2.Digest], field: str = "digests") -> list[BlobName]:
    return _read_all(names_of, messages, field)


def _read_all(
    read: Callable[[Sequence[manifest_pb2.Digest]], list[T]], messages: Sequence[manifest_pb2.Digest], field: str
) -> list[T]:
    if len(messages) > MAX_DIGESTS_PER_REQUEST:
        raise wrong(field, f"expected at most {MAX_DIGESTS_PER_REQUEST}, got {len(messages)}")
    try:
        return read(messages)
    except ValueError:  # one by one, to name the field
        for index, message in enumerate(messages):
            read_digest(message, f"{field}[{index}]")
        raise


def read_kind(kind: int) -> BlobKind:
    if kind not in _KINDS:
        raise wrong("frame.kind", "expected TENSORS or MANIFEST in a blob's first frame")
    return _KINDS[kind]


def read_handed(request: Carrier) -> str:
    """The token of the file in which the request's blob lies; "" if its bytes come."""
    first = request.frames[0]
    is_alone = len(request.frames) == 1 and not first.data and not first.offset
    if request.handed and (not is_token(request.handed) or not is_alone):
        raise wrong("handed", "expected 32 lower-case hex digits, and one frame without data")
    return request.handed


def read_block_hashes(texts: Sequence[str]) -> list[str]:
    if len(texts) > MAX_BLOCK_HASHES_PER_REQUEST:
        raise wrong("block_hashes", f"expected at most {MAX_BLOCK_HASHES_PER_REQUEST}, got {len(texts)}")
    return [check_hash(text, f"block_hashes[{index}]") for index, text in enumerate(texts)]


def write_frame(piece: Piece) -> tuple[pb.BlobFrame, memoryview]:
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
    labels: Mapping[str, str]
    replaces_labels: bool
    is_pinned: bool
    retained_versions: int


def read_agent_changes(request: pb.UpdateAgentRequest) -> AgentChanges:
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
            problem = f"expected labels, labels.KEY, is_pinned and retained_versions, got {path[:40]!r}"
            raise wrong("update_mask", problem)
    if empty := next((name for name, value in agent.labels.items() if not value), None):
        raise wrong("agent.labels", f"expected a value for {empty[:40]!r}; leave it out to remove it")
    if not request.update_mask.paths:
        raise wrong("update_mask", "expected at least one path")
    return AgentChanges({**changes, "labels": labels})


def read_version(version: int, field: str = "version", *, least: int = 0) -> int:
    if version < least:
        raise wrong(field, f"expected {least} or more, got {version}")
    return version


def read_move_id(text: str) -> str:
    if not (16 <= len(text) <= 64 and set(text) <= set("0123456789abcdef")):
        raise wrong("move_id", "expected 16 to 64 lower-case hex digits")
    return text


def read_generation(generation: int, *, least: int = 0) -> int:
    if not least <= generation <= MAX_TOLD_GENERATION:
        raise wrong("generation", f"expected {least} to {MAX_TOLD_GENERATION}, got {generation}")
    return generation


def read_ttl_s(request: pb.AcquireLeaseRequest | pb.RenewLeaseRequest | pb.RenewLeasesRequest) -> float:
    return request.ttl.ToMilliseconds() / 1000 if request.HasField("ttl") else DEFAULT_LEASE_TTL_S


def read_lease(message: pb.LeaseToken) -> records.LeaseToken:
    return records.LeaseToken(check_owner(message.owner, "lease.owner"), message.generation)


def read_leases(request: pb.RenewLeasesRequest) -> list[records.HeldLease]:
    if len(request.leases) > MAX_LEASES_PER_REQUEST:
        raise wrong("leases", f"expected at most {MAX_LEASES_PER_REQUEST}, got {len(request.leases)}")
    return [
        records.HeldLease(check_agent_id(each.agent_id, f"leases[{index}].agent_id"), each.generation)
        for index, each in enumerate(request.leases)
    ]


def write_agent(agent: records.AgentRecord) -> pb.Agent:
    ownership = None if agent.ownership == HERE else written(pb.Ownership, agent.ownership, agent)
    return written(pb.Agent, agent, ownership=ownership)


def write_event(event: records.Event) -> pb.WatchEventsResponse:
    body = event.body
    happened = body.snapshot if isinstance(body, records.Committed) else body
    return written(pb.WatchEventsResponse, event, **{_EVENTS[type(body)]: happened})
