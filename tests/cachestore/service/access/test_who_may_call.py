"""Who may call what: every RPC of the contract against no, wrong, roleless and foreign credentials, and hostile names.

The tables are checked against the service's descriptor: an RPC without a row fails here.
"""

import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import field_mask_pb2
from google.protobuf.message import Message
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc, manifest_pb2
from kvasir.clients.channel import calls_of
from kvasir.errors import InvalidArgument, KvasirError, NotFound, PermissionDenied, Unauthenticated
from kvasir.formats.block_hash import block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.status import from_rpc_error

from tests.cachestore.service.running import RunningStore, make_credentials, publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent

SERVICES = [pb.DESCRIPTOR.services_by_name[name] for name in ("CacheStoreService", "AgentService", "MovingService")]
RPCS = {method.name: method for service in SERVICES for method in service.methods}
KV = kv_identity_hash(SMALL)
TURN = SyntheticAgent(SMALL, 1).turn(600, is_prompt=True)
ONE = TURN.digests[0].to_proto()
SECRET = "ada"
CHAIN = block_hash_chain("default", KV, list(TURN.manifest.token_ids))

LEASE = pb.LeaseToken(owner="me", generation=1)


def update(**fields: Any) -> pb.UpdateAgentRequest:
    """Changes the last of the fields."""
    mask = field_mask_pb2.FieldMask(paths=["is_pinned" if "is_pinned" in fields else "retained_versions"])
    return pb.UpdateAgentRequest(agent=pb.Agent(**fields), update_mask=mask)


# A well-formed request of every RPC, about agent `SECRET` and its blobs in namespace "default".
REQUESTS: Mapping[str, Callable[[], list[Message]]] = {
    "FindMissingBlobs": lambda: [pb.FindMissingBlobsRequest(digests=[TURN.digests[0].to_proto()])],
    "WriteBlobs": lambda: [
        pb.WriteBlobsRequest(frame=pb.BlobFrame(digest=TURN.digests[0].to_proto(), kind=pb.BLOB_KIND_TENSORS))
    ],
    "QueryWriteStatus": lambda: [pb.QueryWriteStatusRequest(digest=TURN.digests[0].to_proto())],
    "ReadBlobs": lambda: [pb.ReadBlobsRequest(digests=[TURN.digests[0].to_proto()])],
    "CommitSnapshot": lambda: [pb.CommitSnapshotRequest(agent_id=SECRET, manifest=TURN.manifest_digest.to_proto())],
    "GetSnapshot": lambda: [pb.GetSnapshotRequest(agent_id=SECRET)],
    "ListSnapshots": lambda: [pb.ListSnapshotsRequest(agent_id=SECRET)],
    "ListAgents": lambda: [pb.ListAgentsRequest()],
    "GetAgent": lambda: [pb.GetAgentRequest(agent_id=SECRET)],
    "GetUsage": lambda: [pb.GetUsageRequest(agent_id=SECRET)],
    "UpdateAgent": lambda: [update(agent_id=SECRET, is_pinned=True)],
    "ForkAgent": lambda: [pb.ForkAgentRequest(source_agent_id=SECRET, agent_id="thief")],
    "RollbackAgent": lambda: [pb.RollbackAgentRequest(agent_id=SECRET, version=1)],
    "DeleteAgent": lambda: [pb.DeleteAgentRequest(agent_id=SECRET, force=True)],
    "FindPrefix": lambda: [pb.FindPrefixRequest(kv_identity_hash=KV, block_hashes=CHAIN)],
    "AcquireLease": lambda: [pb.AcquireLeaseRequest(agent_id="free", kv_identity_hash=KV, owner="me")],
    "RenewLease": lambda: [pb.RenewLeaseRequest(agent_id=SECRET, kv_identity_hash=KV, lease=LEASE)],
    "RenewLeases": lambda: [
        pb.RenewLeasesRequest(
            owner=LEASE.owner, kv_identity_hash=KV, leases=[pb.HeldLease(agent_id=SECRET, generation=1)]
        )
    ],
    "ReleaseLease": lambda: [pb.ReleaseLeaseRequest(agent_id=SECRET, kv_identity_hash=KV, lease=LEASE)],
    "PullAgent": lambda: [pb.PullAgentRequest(peer="nobody", agent_id=SECRET)],
    "MoveAgent": lambda: [pb.MoveAgentRequest(from_peer="nobody", agent_id=SECRET)],
    "ClaimAgent": lambda: [pb.ClaimAgentRequest(agent_id=SECRET)],
    "OfferAgent": lambda: [pb.OfferAgentRequest(agent_id=SECRET, move_id="0" * 16)],
    "HandOverAgent": lambda: [pb.HandOverAgentRequest(agent_id=SECRET, move_id="0" * 16, generation=1)],
    "UndoMove": lambda: [pb.UndoMoveRequest(agent_id=SECRET, move_id="0" * 16)],
    "FenceAgent": lambda: [pb.FenceAgentRequest(agent_id=SECRET, generation=1)],
    "ExportAgent": lambda: [pb.ExportAgentRequest(agent_id=SECRET)],
    "ImportAgent": lambda: [pb.ImportAgentRequest(header=pb.ImportAgentHeader(agent_id="imported"), data=b"x" * 600)],
    "WatchEvents": lambda: [pb.WatchEventsRequest()],
    "VerifyBlobs": lambda: [pb.VerifyBlobsRequest(agent_id=SECRET)],
    "CollectGarbage": lambda: [pb.CollectGarbageRequest(dry_run=True)],
    "GetCapabilities": lambda: [pb.GetCapabilitiesRequest()],
    "GetStats": lambda: [pb.GetStatsRequest()],
}

# Roles that may call; written a second time, so that the service's own table has a witness.
MAY_CALL: Mapping[str, str] = {
    "FindMissingBlobs": "engine client",
    "WriteBlobs": "engine client",
    "QueryWriteStatus": "engine client",
    "ReadBlobs": "engine client peer admin",
    "CommitSnapshot": "engine",
    "GetSnapshot": "engine client peer admin",
    "ListSnapshots": "engine client peer admin",
    "ListAgents": "engine client peer admin",
    "GetAgent": "engine client peer admin",
    "GetUsage": "engine client admin",
    "UpdateAgent": "engine client admin",
    "ForkAgent": "engine client admin",
    "RollbackAgent": "engine client admin",
    "DeleteAgent": "engine client admin",
    "FindPrefix": "engine",
    "AcquireLease": "engine",
    "RenewLease": "engine",
    "RenewLeases": "engine",
    "ReleaseLease": "engine",
    "PullAgent": "engine client admin peer",
    "MoveAgent": "engine client admin peer",
    "ClaimAgent": "engine client admin",
    "OfferAgent": "peer",
    "HandOverAgent": "peer",
    "UndoMove": "peer",
    "FenceAgent": "peer",
    "ExportAgent": "engine client admin",
    "ImportAgent": "engine client admin",
    "WatchEvents": "engine client admin",
    "VerifyBlobs": "client admin",
    "CollectGarbage": "admin",
    "GetCapabilities": "engine client peer admin",
    "GetStats": "engine client admin",
}

# What a foreign credential with every role is told about `SECRET`: that it does not exist, or nothing at all.
NOTHING: Mapping[str, Callable[[list[Any]], bool]] = {
    "FindMissingBlobs": lambda answers: len(answers[0].missing) == 1,
    "WriteBlobs": lambda answers: answers == [],
    "QueryWriteStatus": lambda answers: answers[0].received_bytes == 0 and not answers[0].is_complete,
    "ListAgents": lambda answers: len(answers[0].agents) == 0,
    "FindPrefix": lambda answers: len(answers[0].blocks) == 0,
    "AcquireLease": lambda answers: answers[0].head_version == 0,
    "RenewLeases": lambda answers: [each.agent_id for each in answers[0].lost] == [SECRET],
    "WatchEvents": lambda answers: answers[0].WhichOneof("event") == "started",
    "CollectGarbage": lambda answers: answers[0].blobs_marked == answers[0].blobs_swept == 0,
    "GetCapabilities": lambda answers: answers[0].namespace == "elsewhere",
    "GetStats": lambda answers: answers[0].blob_count == answers[0].agent_count == answers[0].blob_bytes == 0,
}
REFUSED_WITH: Mapping[str, str] = {
    "ReadBlobs": "NotFound",
    "CommitSnapshot": "FailedPrecondition",
    "GetSnapshot": "NotFound",
    "ListSnapshots": "NotFound",
    "GetAgent": "NotFound",
    "GetUsage": "NotFound",
    "UpdateAgent": "NotFound",
    "ForkAgent": "NotFound",
    "RollbackAgent": "NotFound",
    "DeleteAgent": "NotFound",
    "RenewLease": "NotFound",
    "ReleaseLease": "NotFound",
    "PullAgent": "NotFound",
    "MoveAgent": "NotFound",
    "ClaimAgent": "NotFound",
    "OfferAgent": "FailedPrecondition",
    "HandOverAgent": "NotFound",
    "UndoMove": "NotFound",
    "FenceAgent": "FailedPrecondition",
    "ExportAgent": "NotFound",
    "ImportAgent": "InvalidArgument",
    "VerifyBlobs": "NotFound",
}


@dataclass
class Guarded:
    """A store behind loopback TCP, where only tokens count."""

    running: RunningStore
    tokens: Mapping[str, str]

    def call(self, rpc: str, token: str | None, requests: list[Message] | None = None) -> list[Any] | KvasirError:
        """Its answers (of a watch: the first), or how it refused."""
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        return call(self.running.address, rpc, requests or REQUESTS[rpc](), metadata)


def call(address: str, rpc: str, requests: list[Message], metadata: Any = ()) -> list[Any] | KvasirError:
    with grpc.insecure_channel(address) as channel:
        stub = calls_of(channel, cachestore_pb2_grpc.CacheStoreServiceStub, cachestore_pb2_grpc.MovingServiceStub)
        method = RPCS[rpc]
        argument = iter(requests) if method.client_streaming else requests[0]
        try:
            answer = getattr(stub, rpc)(argument, timeout=20, metadata=metadata)
            if not method.server_streaming:
                return [answer]
            answers: list[Any] = []
            for each in answer:
                answers.append(each)
                if rpc == "WatchEvents":
                    answer.cancel()
                    break
        except grpc.RpcError as error:
            return from_rpc_error(error)
        return answers


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("g")
    tokens = make_credentials(root / "credentials.toml")
    with store_home(root / "h") as home:
        running = home.start("--credentials-file", str(root / "credentials.toml"), listen="127.0.0.1:0")
        with running.client(tokens["all"]) as client:
            publish(client, SECRET, TURN, 0)
            # Short: what takes a memory back waits for it.
            assert client.acquire_lease(SECRET, KV, LEASE.owner, ttl_s=1).lease == LEASE
        yield Guarded(running, tokens)


def test_every_rpc_has_a_row_in_every_table() -> None:
    assert set(REQUESTS) == set(MAY_CALL) == set(RPCS)
    assert set(NOTHING) | set(REFUSED_WITH) == set(RPCS)
    assert not set(NOTHING) & set(REFUSED_WITH)


@pytest.mark.parametrize("rpc", RPCS)
def test_no_credential_or_a_wrong_one_is_unauthenticated(rpc: str, guarded: Guarded) -> None:
    right = guarded.tokens["all"]
    for token in (None, "", "wrong", right[:-1], right + "x", right.upper(), "x" * 4000):
        refusal = guarded.call(rpc, token)
        assert isinstance(refusal, Unauthenticated), (token, refusal)


@pytest.mark.parametrize("rpc", RPCS)
def test_only_the_roles_of_the_contract_may_call(rpc: str, guarded: Guarded) -> None:
    for role in ("engine", "client", "peer", "admin"):
        if role in MAY_CALL[rpc].split():
            continue
        refusal = guarded.call(rpc, guarded.tokens[role])
        assert isinstance(refusal, PermissionDenied), (role, refusal)
        assert refusal.metadata["rpc"] == rpc


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc != "DeleteAgent"])
def test_each_role_of_the_contract_is_let_through(rpc: str, guarded: Guarded) -> None:
    for role in MAY_CALL[rpc].split():
        answer = guarded.call(rpc, guarded.tokens[role])
        assert not isinstance(answer, PermissionDenied | Unauthenticated), (role, answer)


@pytest.mark.parametrize("rpc", RPCS)
def test_a_foreign_credential_learns_and_changes_nothing(rpc: str, guarded: Guarded) -> None:
    answer = guarded.call(rpc, guarded.tokens["foreign"])
    if rpc in REFUSED_WITH:
        assert isinstance(answer, KvasirError)
        assert type(answer).__name__ == REFUSED_WITH[rpc]
        assert TURN.digests[1].hash not in answer.message
    else:
        assert isinstance(answer, list), answer
        assert NOTHING[rpc](answer), answer
    with guarded.running.client(guarded.tokens["all"]) as client:
        assert client.get_agent(SECRET).lines[0].version >= 1
        assert client.find_missing(TURN.digests) == []


def test_bytes_written_in_one_namespace_are_not_in_another(guarded: Guarded) -> None:
    own = SyntheticAgent(SMALL, 99).turn(300)
    client_of = guarded.running.client
    with client_of(guarded.tokens["foreign"]) as foreign, client_of(guarded.tokens["all"]) as ours:
        publish(foreign, SECRET, own, 0)
        assert ours.find_missing(own.digests) == own.digests
        assert ours.get_agent(SECRET).lines[0].token_count == 600
        foreign.delete_agent(SECRET)
        assert ours.get_agent(SECRET).lines[0].token_count == 600


def test_a_second_authorization_header_is_refused(guarded: Guarded) -> None:
    twice = tuple(("authorization", f"Bearer {guarded.tokens[name]}") for name in ("client", "all"))
    assert isinstance(call(guarded.running.address, "GetStats", REQUESTS["GetStats"](), twice), Unauthenticated)


def test_a_token_is_requested_on_a_socket_too_when_one_is_sent(shared_store: RunningStore) -> None:
    wrong = (("authorization", "Bearer wrong"),)
    assert isinstance(call(shared_store.address, "GetStats", REQUESTS["GetStats"](), wrong), Unauthenticated)


def test_health_needs_no_credential(guarded: Guarded) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(guarded.running.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# --- hostile names ---

HOSTILE_NAMES = {
    "empty": "",
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "a\x1b[2Jb",
    "bidi": "ada\u202egnp",
    "zero width": "a\u200bda",
    "line separator": "a\u2028b",
    "decomposed twin": unicodedata.normalize("NFD", "Zoë"),
    "compatibility twin": "\u212bngström",
    "long": "x" * 257,
    "long in bytes": "ü" * 129,
    "a megabyte": "x" * (1 << 20),
}
NAME_FIELDS = {
    "CommitSnapshot": lambda name: pb.CommitSnapshotRequest(agent_id=name, manifest=TURN.manifest_digest.to_proto()),
    "GetSnapshot": lambda name: pb.GetSnapshotRequest(agent_id=name),
    "ListSnapshots": lambda name: pb.ListSnapshotsRequest(agent_id=name),
    "GetAgent": lambda name: pb.GetAgentRequest(agent_id=name),
    "UpdateAgent": lambda name: update(agent_id=name),
    "ForkAgent": lambda name: pb.ForkAgentRequest(source_agent_id=SECRET, agent_id=name),
    "RollbackAgent": lambda name: pb.RollbackAgentRequest(agent_id=name, version=1),
    "DeleteAgent": lambda name: pb.DeleteAgentRequest(agent_id=name),
    "AcquireLease": lambda name: pb.AcquireLeaseRequest(agent_id=name, kv_identity_hash=KV, owner="me"),
    "RenewLease": lambda name: pb.RenewLeaseRequest(agent_id=name, kv_identity_hash=KV, lease=LEASE),
    "RenewLeases": lambda name: pb.RenewLeasesRequest(
        owner="me", kv_identity_hash=KV, leases=[pb.HeldLease(agent_id=name)]
    ),
    "ReleaseLease": lambda name: pb.ReleaseLeaseRequest(agent_id=name, kv_identity_hash=KV, lease=LEASE),
    "PullAgent": lambda name: pb.PullAgentRequest(peer="nobody", agent_id=name),
    "MoveAgent": lambda name: pb.MoveAgentRequest(from_peer="nobody", agent_id=name),
    "ClaimAgent": lambda name: pb.ClaimAgentRequest(agent_id=name),
    "OfferAgent": lambda name: pb.OfferAgentRequest(agent_id=name, move_id="0" * 16),
    "HandOverAgent": lambda name: pb.HandOverAgentRequest(agent_id=name, move_id="0" * 16, generation=1),
    "UndoMove": lambda name: pb.UndoMoveRequest(agent_id=name, move_id="0" * 16),
    "FenceAgent": lambda name: pb.FenceAgentRequest(agent_id=name, generation=1),
    "ExportAgent": lambda name: pb.ExportAgentRequest(agent_id=name),
    "ImportAgent": lambda name: pb.ImportAgentRequest(header=pb.ImportAgentHeader(agent_id=name)),
}
HAVE_NO_NAME = {
    *("FindMissingBlobs", "WriteBlobs", "QueryWriteStatus", "ReadBlobs", "ListAgents", "FindPrefix", "WatchEvents"),
    *("VerifyBlobs", "CollectGarbage", "GetCapabilities", "GetStats", "GetUsage"),
}


def test_every_rpc_that_takes_an_agents_name_has_a_row() -> None:
    assert set(NAME_FIELDS) | HAVE_NO_NAME == set(RPCS)


@pytest.mark.parametrize("rpc", NAME_FIELDS)
def test_hostile_agent_names_are_refused_by_every_rpc_that_takes_one(rpc: str, guarded: Guarded) -> None:
    for kind, name in HOSTILE_NAMES.items():
        refusal = guarded.call(rpc, guarded.tokens["all"], [NAME_FIELDS[rpc](name)])
        assert isinstance(refusal, InvalidArgument), (kind, refusal)
        assert (refusal.field or "").endswith("agent_id"), (kind, refusal.field)


def test_names_that_look_like_paths_are_just_names(guarded: Guarded, tmp_path: Path) -> None:
    names = ["../../etc/passwd", "..", ".", "/", "a/b", "C:\\x", "~", "%2e%2e%2f", "ADA", "Ada", "ada "]
    with guarded.running.client(guarded.tokens["all"]) as client:
        for name in names:
            client.fork_agent(SECRET, name)
        found = {each.agent_id for each in client.list_agents(page_size=1000).agents}
        assert {*names, SECRET} <= found
        for name in names:
            client.delete_agent(name)
        assert client.get_agent(SECRET).agent_id == SECRET
    inside = {path.name for path in guarded.running.data_dir.iterdir()}
    index = {"kvasir.sqlite3", "kvasir.sqlite3-wal", "kvasir.sqlite3-shm", "journal"}
    assert inside <= {"lock", "namespaces", "ballast", *index}


BAD_HASHES = [
    *("", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "٠" * 64),
    *("../" * 21 + "x", "0" * 63 + "\n", "0" * 32 + "/" + "0" * 31),
]
DIGEST_FIELDS = {
    "FindMissingBlobs": lambda digest: pb.FindMissingBlobsRequest(digests=[digest]),
    "WriteBlobs": lambda digest: pb.WriteBlobsRequest(
        frame=pb.BlobFrame(digest=digest, kind=pb.BLOB_KIND_TENSORS, data=b"x")
    ),
    "QueryWriteStatus": lambda digest: pb.QueryWriteStatusRequest(digest=digest),
    "ReadBlobs": lambda digest: pb.ReadBlobsRequest(digests=[digest]),
    "CommitSnapshot": lambda digest: pb.CommitSnapshotRequest(agent_id="x", manifest=digest),
}


@pytest.mark.parametrize("rpc", DIGEST_FIELDS)
def test_what_is_not_64_lower_case_hex_digits_is_no_digest(rpc: str, guarded: Guarded) -> None:
    for text in BAD_HASHES:
        digest = manifest_pb2.Digest(hash=text, size_bytes=1)
        refusal = guarded.call(rpc, guarded.tokens["all"], [DIGEST_FIELDS[rpc](digest)])
        assert isinstance(refusal, InvalidArgument), (text, refusal)
        assert refusal.reason == "BAD_DIGEST"
    negative = manifest_pb2.Digest(hash="0" * 64, size_bytes=-1)
    assert isinstance(guarded.call(rpc, guarded.tokens["all"], [DIGEST_FIELDS[rpc](negative)]), InvalidArgument)


def test_hashes_elsewhere_are_full_matches_too(guarded: Guarded) -> None:
    token = guarded.tokens["all"]
    for text in BAD_HASHES[1:]:
        for rpc, request in (
            ("GetSnapshot", pb.GetSnapshotRequest(agent_id=SECRET, kv_identity_hash=text)),
            ("FindPrefix", pb.FindPrefixRequest(kv_identity_hash=text)),
            ("FindPrefix", pb.FindPrefixRequest(kv_identity_hash=KV, block_hashes=[text])),
            ("AcquireLease", pb.AcquireLeaseRequest(agent_id="x", kv_identity_hash=text, owner="me")),
        ):
            assert isinstance(guarded.call(rpc, token, [request]), InvalidArgument), (rpc, text)


def test_numbers_out_of_range_are_refused_and_named(guarded: Guarded) -> None:
    token = guarded.tokens["all"]
    for rpc, request, field in (
        ("GetSnapshot", pb.GetSnapshotRequest(agent_id=SECRET, version=0), "version"),
        ("ListAgents", pb.ListAgentsRequest(page_size=-1), "page_size"),
        ("ListAgents", pb.ListAgentsRequest(page_token="?"), "page_token"),
        ("RollbackAgent", pb.RollbackAgentRequest(agent_id=SECRET), "version"),
        ("UpdateAgent", update(agent_id=SECRET, retained_versions=0), "retained_versions"),
        ("UpdateAgent", update(agent_id=SECRET, retained_versions=1001), "retained_versions"),
        (
            "CommitSnapshot",
            pb.CommitSnapshotRequest(agent_id="x", manifest=ONE, expected_version=-1),
            "expected_version",
        ),
        ("ReadBlobs", pb.ReadBlobsRequest(digests=[ONE], first_offset=-1), "first_offset"),
        ("ReadBlobs", pb.ReadBlobsRequest(digests=[ONE], first_offset=1 << 62), "first_offset"),
        ("FindMissingBlobs", pb.FindMissingBlobsRequest(digests=[ONE] * 10_001), "digests"),
        ("FindPrefix", pb.FindPrefixRequest(kv_identity_hash=KV, block_hashes=["0" * 64] * 10_001), "block_hashes"),
        ("AcquireLease", pb.AcquireLeaseRequest(agent_id="x", kv_identity_hash=KV, owner=""), "owner"),
    ):  # fmt: skip
        refusal = guarded.call(rpc, token, [request])
        assert isinstance(refusal, InvalidArgument), (rpc, refusal)
        assert refusal.field == field, (rpc, refusal.field)


def test_a_peer_that_is_not_configured_does_not_exist_whatever_host_it_names(guarded: Guarded) -> None:
    for peer in ("", "127.0.0.1:1", "unix:/tmp/x.sock", "http://169.254.169.254/", "../peers"):
        refusal = guarded.call("PullAgent", guarded.tokens["all"], [pb.PullAgentRequest(peer=peer, agent_id="x")])
        assert isinstance(refusal, NotFound), (peer, refusal)
        assert refusal.reason == "PEER_UNKNOWN"


def test_a_digest_of_the_right_form_that_nobody_stored_is_not_found(guarded: Guarded) -> None:
    request = pb.ReadBlobsRequest(digests=[Digest.of(b"never").to_proto()])
    assert isinstance(guarded.call("ReadBlobs", guarded.tokens["all"], [request]), NotFound)


def test_what_the_disk_has_left_is_reported_to_who_looks_after_it_only(guarded: Guarded) -> None:
    """It follows what every namespace writes, byte by byte."""
    told = {role: guarded.call("GetStats", guarded.tokens[role]) for role in ("engine", "client", "admin")}
    free = {role: answer[0].free_disk_bytes for role, answer in told.items() if isinstance(answer, list)}
    assert (free["engine"], free["client"]) == (0, 0)
    assert free["admin"] > 0
