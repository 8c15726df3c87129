"""The cache store under fuzz: what its requests may name, and what only a store is sent: blobs, manifests, archives."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import duration_pb2
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.credentials import ADMIN, CLIENT, ENGINE, PEER, Principal
from kvasir.formats.block_hash import block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest

from tests.cachestore.service.running import PRINCIPALS, RunningStore, StoreHome, make_credentials, publish
from tests.campaigns.fuzz import files
from tests.campaigns.fuzz.calling import sending
from tests.campaigns.fuzz.calls import Requests, Scenario
from tests.campaigns.fuzz.campaign import Send
from tests.campaigns.fuzz.contract import Rpc, store_rpcs
from tests.campaigns.fuzz.mutations import Known
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent, SyntheticSnapshot
from tools.kvasir_tiny.words import Dice

_STEADY = Principal("steady", "steady", frozenset({ENGINE, CLIENT, PEER, ADMIN}))
_NAMES = ("ada", "bob", "eve/two", "größe", "mixed", "new 1", "new 2", "new 3", "nobody")
_KV, _KV_MIXED = kv_identity_hash(SMALL), kv_identity_hash(MIXED)
_PIECE = 20_000


class StoreTarget:
    """A running store with some agents, and one that no fuzzed request can name."""

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.home = StoreHome(directory / "h")
        tokens = make_credentials(directory / "credentials.toml", (*PRINCIPALS, _STEADY))
        self._steady_token = tokens.pop(_STEADY.name)
        self._tokens = tokens
        self._options = (
            *("--credentials-file", str(directory / "credentials.toml")),
            *("--peers-file", str(_peers_file(directory, self.home.socket, tokens["foreign"]))),
            # Collections run beside the requests, and what was cut is given up soon.
            *("--grace-period-s", "2", "--gc-interval-s", "3", "--stall-timeout-s", "2"),
        )
        self._agents = {name: SyntheticAgent(SMALL, seed + index) for index, name in enumerate(_NAMES[:4])}
        self._agents["mixed"] = SyntheticAgent(MIXED, seed + 9)
        self._snapshots = {name: agent.turn(300, is_prompt=True) for name, agent in self._agents.items()}
        self._steady = SyntheticAgent(SMALL, seed + 99).turn(300)
        self.rpcs = store_rpcs()
        self.running: RunningStore

    @property
    def addresses(self) -> Mapping[str, str]:
        """Service → where it listens."""
        return {rpc.path.split("/")[1]: self.running.address for rpc in self.rpcs.values()}

    @property
    def pids(self) -> Sequence[int]:
        return [self.running.process.pid]

    @property
    def log(self) -> str:
        return self.running.log

    def start(self) -> None:
        self.running = self.home.start(*self._options)
        for token in (self._tokens["all"], self._tokens["foreign"]):
            with self.running.client(token) as client:
                for name, snapshot in self._snapshots.items():
                    publish(client, name, snapshot, 0)
        with self.running.client(self._steady_token) as client:
            publish(client, "steady", self._steady, 0)

    def is_well(self) -> str | None:
        """Ask for what is known. What is wrong with the answer, if anything is."""
        client = self._steady_client()
        version, manifest_bytes = client.get_snapshot("steady")
        blob = client.get_blob(self._steady.digests[0])
        is_same = manifest_bytes == self._steady.manifest_bytes and Digest.of(bytes(blob)) == self._steady.digests[0]
        return None if version.version == 1 and is_same else f"the known agent is another: {version}"

    def _steady_client(self) -> StoreClient:
        if not hasattr(self, "_client"):
            self._client = self.running.client(self._steady_token)
        return self._client

    def end(self) -> Sequence[str]:
        """Stop the store; what is wrong with what it leaves."""
        if hasattr(self, "_client"):
            self._client.close()
        if (code := self.running.stop(30)) != 0:
            return [f"SIGTERM ended it with {code}"]
        again = self.home.start(*self._options)
        parts = list(again.data_dir.rglob("*.part"))
        again.stop()
        checked = self.home.check()
        wrong = [f"a start left {len(parts)} .part files"] if parts else []
        return wrong if checked["is_clean"] else [*wrong, f"check: {checked}"]

    def close(self) -> None:
        self.home.end()

    def sending(self, seed: int) -> "contextlib.AbstractContextManager[Send]":
        return sending(self.requests(), self.addresses, seed)

    def requests(self) -> Requests:
        known = self._known()
        return Requests(self.rpcs, known, self._tokens, _Scenarios(self.rpcs, known, self._snapshots).all(), "all")

    def _known(self) -> Known:
        snapshots = list(self._snapshots.values())
        digests = [digest for each in snapshots for digest in (*each.digests, each.manifest_digest)]
        digests.append(Digest.of(b"nowhere"))
        numbers = (0, 0, 0, 1, 1, 2, 3)
        leases = [pb.LeaseToken(owner=owner, generation=number) for owner in ("e1", "e2") for number in (1, 2)]
        known: dict[str, Sequence[Any]] = dict.fromkeys(("agent_id", "source_agent_id", "local_agent_id"), _NAMES)
        return known | {
            "name_prefix": ("", "a", "new "),
            "kv_identity_hash": ("", _KV, _KV, _KV_MIXED, "0" * 64),
            "block_hashes": block_hash_chain("default", _KV, list(snapshots[0].manifest.token_ids)),
            **dict.fromkeys(("version", "expected_version", "generation", "sequence"), numbers),
            "page_size": (0, 1, 2, 1000),
            "page_token": ("", "", "YQ==", "YWRh"),
            "retained_versions": (1, 2, 8),
            "first_offset": (0, 0, 1, 100),
            "owner": ("e1", "e2"),
            "peer": ("self", "self", "dead", "unheard of"),
            "force": (True,),
            "kvasir.cachestore.v1.Digest": [digest.to_proto() for digest in digests],
            "kvasir.cachestore.v1.LeaseToken": leases,
            "google.protobuf.Duration": [duration_pb2.Duration(seconds=1), duration_pb2.Duration(nanos=1)],
        }


class _Scenarios:
    """Requests of more than one message or call. A label begins with the RPC that it is about."""

    def __init__(self, rpcs: Mapping[str, Rpc], known: Known, snapshots: Mapping[str, SyntheticSnapshot]) -> None:
        self._rpcs = rpcs
        self._known = known
        self._snapshots = list(snapshots.values())
        self._breaker = Requests(rpcs, known, {"": ""}, {}, "")

    def all(self) -> Mapping[str, Scenario]:
        return {
            "WriteBlobs of tensors": self._tensors,
            "WriteBlobs of a manifest": self._manifest,
            "WriteBlobs in wrong frames": self._wrong_frames,
            "CommitSnapshot of a manifest": self._commit,
            "GetSnapshot of what was committed": self._commit,
            "ReleaseLease of a new lease": self._lease,
            "ImportAgent of an archive": self._import,
            "ImportAgent in wrong messages": self._wrong_import,
        }

    def _tensors(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        content = files.tensor_file(dice.pick(list(dice.pick(self._snapshots).new_blobs.values())), dice)
        return [self._written(files.frames(Digest.of(content), content, dice))]

    def _manifest(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        content = files.manifest(dice.pick(self._snapshots).manifest_bytes, dice, self._known)
        return [self._written(files.frames(Digest.of(content), content, dice, pb.BLOB_KIND_MANIFEST))]

    def _wrong_frames(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        snapshot = dice.pick(self._snapshots)
        frames = [frame for each in snapshot.new_blobs.items() for frame in files.frames(*each, dice)]
        sent = [frame.SerializeToString() for frame in frames]
        place = dice.below(len(sent))
        sent[place] = self._breaker.broken(frames[place], dice)
        if dice.chance(0.3):
            dice.shuffle(sent)
        return [(self._rpcs["WriteBlobs"], sent)]

    def _commit(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        snapshot = dice.pick(self._snapshots)
        content = files.manifest(snapshot.manifest_bytes, dice, self._known)
        if dice.chance(0.35):
            content = snapshot.manifest_bytes
        digest, name = Digest.of(content), dice.pick(_NAMES)
        frames = [frame for each in snapshot.new_blobs.items() for frame in files.frames(*each, dice)]
        frames += files.frames(digest, content, dice, pb.BLOB_KIND_MANIFEST)
        request = pb.CommitSnapshotRequest(agent_id=name, manifest=digest.to_proto())
        after = self._rpcs[dice.pick(["GetSnapshot", "ExportAgent", "ListSnapshots", "VerifyBlobs", "GetAgent"])]
        look = after.request_type(agent_id=name)
        return [
            self._written(frames),
            (self._rpcs["CommitSnapshot"], [request.SerializeToString()]),
            (after, [look.SerializeToString()]),
        ]

    def _lease(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        """A lease of an agent that nobody else names, from its beginning to its end."""
        line = {"agent_id": f"leased {dice.below(10**9)}", "kv_identity_hash": _KV}
        lease = pb.LeaseToken(owner="e1", generation=1)
        acquire = pb.AcquireLeaseRequest(**line, owner="e1", ttl=duration_pb2.Duration(seconds=1))  # type: ignore[arg-type]
        renew = pb.RenewLeaseRequest(**line, lease=lease)  # type: ignore[arg-type]
        release = pb.ReleaseLeaseRequest(**line, lease=lease)  # type: ignore[arg-type]
        return [
            (self._rpcs["AcquireLease"], [acquire.SerializeToString()]),
            (self._rpcs["RenewLease"], [self._breaker.broken(renew, dice)]),
            (self._rpcs["ReleaseLease"], [release.SerializeToString()]),
        ]

    def _import(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        snapshot = dice.pick(self._snapshots)
        blobs = dict(snapshot.new_blobs)
        if dice.chance(0.3):
            chosen = dice.pick(list(blobs))
            blobs[chosen] = files.tensor_file(blobs[chosen], dice)
        packed = files.archive_of(snapshot.manifest_bytes, blobs, dice, self._known)
        header = pb.ImportAgentHeader(agent_id=dice.pick(_NAMES), replace=dice.chance(0.7))
        pieces = [packed[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]
        messages = [pb.ImportAgentRequest(header=header), *(pb.ImportAgentRequest(data=piece) for piece in pieces)]
        return [(self._rpcs["ImportAgent"], [message.SerializeToString() for message in messages])]

    def _wrong_import(self, dice: Dice) -> Sequence[tuple[Rpc, Sequence[bytes]]]:
        [(rpc, messages)] = self._import(dice)
        sent = list(messages)
        place = dice.below(min(len(sent), 3))
        sent[place] = self._breaker.broken(pb.ImportAgentRequest.FromString(sent[place]), dice)
        return [(rpc, sent)]

    def _written(self, frames: Sequence[pb.WriteBlobsRequest]) -> tuple[Rpc, Sequence[bytes]]:
        return self._rpcs["WriteBlobs"], [frame.SerializeToString() for frame in frames]


def _peers_file(directory: Path, own_address: str, token: str) -> Path:
    """The store as its own peer, in another namespace; and one where nobody listens."""
    token_file, file = directory / "peer.token", directory / "peers.toml"
    token_file.write_text(token)
    lines = (
        *("[[peer]]", 'name = "self"', f'address = "{own_address}"', f'token_file = "{token_file}"'),
        *("[[peer]]", 'name = "dead"', f'address = "unix:{directory}/nobody"'),
    )
    file.write_text("\n".join(lines))
    for each in (token_file, file):
        each.chmod(0o600)
    return file
