"""The answers of the store's RPCs have what its records have: both are joined by the names of their fields."""

from google.protobuf.message import Message
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.server.answers import name_in_record

from cachestore_svc.facts import records
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.moving.arrivals import Waiting
from cachestore_svc.moving.copying import Progress

# Fields that no record has: those that are given, those of an engine, and those of the other records of the message.
OF_AN_AGENT = {"agent_count", "quota_bytes", "unreferenced_bytes", "damaged_blob_count"}
ANSWERS: list[tuple[type[Message], tuple[type, ...], set[str]]] = [
    (pb.SnapshotVersion, (records.SnapshotVersion,), {"context_tokens"}),
    (pb.Agent, (records.AgentRecord,), set()),
    (pb.Ownership, (Ownership, records.AgentRecord), set()),
    (pb.AcquireLeaseResponse, (records.Lease,), {"lease", "head"}),
    (pb.LeaseToken, (records.LeaseToken,), set()),
    (pb.RenewLeaseResponse, (records.Lease,), set()),
    (pb.RenewLeasesResponse, (records.RenewedLeases,), set()),
    (pb.HeldLease, (records.HeldLease,), set()),
    (pb.TransferProgress, (Progress,), set()),
    (pb.MoveWaiting, (Waiting,), set()),
    (pb.EventCursor, (records.EventCursor,), set()),
    (pb.AgentDeleted, (records.AgentDeleted,), set()),
    (pb.AgentUpdated, (records.AgentUpdated,), set()),
    (pb.LeaseWanted, (records.LeaseWanted,), set()),
    (pb.BlobDamaged, (records.BlobDamaged,), set()),
    (pb.GetStatsResponse, (records.Stats,), {"scrub"}),
    (pb.ScrubStatus, (records.ScrubState,), {"bytes_per_s"}),
    (pb.GetUsageResponse, (records.Stats,), {"shared_blob_count", "shared_bytes"}),
    (pb.GetUsageResponse, (records.AgentUsage,), OF_AN_AGENT),
    (pb.CollectGarbageResponse, (records.GcReport,), set()),
    (pb.VerifyBlobsResponse, (records.VerifyProgress,), {"repaired"}),
    (pb.DeleteAgentResponse, (records.Deletion,), set()),
    (pb.QueryWriteStatusResponse, (records.WriteStatus,), set()),
    (pb.ListSnapshotsResponse, (records.SnapshotPage,), {"has_had"}),
]


def test_each_field_of_an_answer_is_of_its_record() -> None:
    for kind, found, others in ANSWERS:
        named = kind.DESCRIPTOR.fields_by_name
        missing = {
            name for name, field in named.items() if not any(hasattr(each, name_in_record(field)) for each in found)
        }
        assert missing == others, kind
