"""The cache store under fuzz: what its requests may name, and what only a store is sent: blobs, manifests, archives."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import duration_pb2, field_mask_pb2
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.credentials import ADMIN, CLIENT, ENGINE, PEER, Principal
from kvasir.formats.block_hash import block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest

from tests.cachestore.service.running import PRINCIPALS, RunningStore, StoreHome, make_credentials, publish
from tests.campaigns.fuzz import files
from tests.campaigns.fuzz.calling import sending
from tests.campaigns.fuzz.calls import Requests, Scenario, Step
from tests.campaigns.fuzz.campaign import Send
from tests.campaigns.fuzz.contract import Rpc, store_rpcs
from tests.campaigns.fuzz.mutations import Known
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent, SyntheticSnapshot
from tools.kvasir_tiny.words import Dice

_STEADY = Principal("steady", "steady", frozenset({ENGINE, CLIENT, PEER, ADMIN}))
# Two namespaces of this store are each other's peers: by these names each knows the other.
_THERE, _BACK = (Principal(name, at, frozenset({PEER})) for name, at in (("there", "default"), ("back", "elsewhere")))
_MOVING = tuple(f"moving {number}" for number in range(12))  # agents of the other namespace alone
_MOVES = ("OfferAgent", "HandOverAgent", "UndoMove", "FenceAgent")
_NAMES = ("ada", "bob", "eve/two", "größe", "mixed", "new 1", "new 2", "new 3", "nobody")
_KV, _KV_MIXED = kv_identity_hash(SMALL), kv_identity_hash(MIXED)
_PIECE = 20_000


class StoreTarget:
    """A running store with some agents, and one that no fuzzed request can name."""

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.home = StoreHome(directory / "h")
        tokens = make_credentials(directory / "credentials.toml", (*PRINCIPALS, _STEADY, _THERE, _BACK))
        self._steady_token = tokens.pop(_STEADY.name)
        self._tokens = tokens
        self._options = (
            *("--credentials-file", str(directory / "credentials.toml")),
            *("--peers-file", str(_peers_file(directory, self.home.socket, tokens))),
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
        with self.running.client(self._tokens["foreign"]) as client:
            for name in _MOVING:
                publish(client, name, self._snapshots["ada"], 0)
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
        scenarios = {
            **_Scenarios(self.rpcs, known, self._snapshots).all(),
            **_Lives(self.rpcs, known, self._snapshots).all(),
        }
        tokens_of = dict.fromkeys(_MOVES, _THERE.name)
        return Requests(self.rpcs, known, self._tokens, scenarios, "all", tokens_of=tokens_of)

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
            **dict.fromkeys(("peer", "from_peer", "to_peer"), (_THERE.name, _THERE.name, "dead", "unheard of")),
            "move_id": ("", "ab" * 8, "cd" * 8),
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

    def _tensors(self, dice: Dice) -> Sequence[Step]:
        content = files.tensor_file(dice.pick(list(dice.pick(self._snapshots).new_blobs.values())), dice)
        return [self._written(files.frames(Digest.of(content), content, dice))]

    def _manifest(self, dice: Dice) -> Sequence[Step]:
        content = files.manifest(dice.pick(self._snapshots).manifest_bytes, dice, self._known)
        return [self._written(files.frames(Digest.of(content), content, dice, pb.BLOB_KIND_MANIFEST))]

    def _wrong_frames(self, dice: Dice) -> Sequence[Step]:
        snapshot = dice.pick(self._snapshots)
        frames = [frame for each in snapshot.new_blobs.items() for frame in files.frames(*each, dice)]
        sent = [frame.SerializeToString() for frame in frames]
        place = dice.below(len(sent))
        sent[place] = self._breaker.broken(frames[place], dice)
        if dice.chance(0.3):
            dice.shuffle(sent)
        return [Step(self._rpcs["WriteBlobs"], sent)]

    def _commit(self, dice: Dice) -> Sequence[Step]:
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
            Step(self._rpcs["CommitSnapshot"], [request.SerializeToString()]),
            Step(after, [look.SerializeToString()]),
        ]

    def _lease(self, dice: Dice) -> Sequence[Step]:
        """A lease of an agent that nobody else names, from its beginning to its end."""
        line = {"agent_id": f"leased {dice.below(10**9)}", "kv_identity_hash": _KV}
        lease = pb.LeaseToken(owner="e1", generation=1)
        acquire = pb.AcquireLeaseRequest(**line, owner="e1", ttl=duration_pb2.Duration(seconds=1))  # type: ignore[arg-type]
        renew = pb.RenewLeaseRequest(**line, lease=lease)  # type: ignore[arg-type]
        release = pb.ReleaseLeaseRequest(**line, lease=lease)  # type: ignore[arg-type]
        return [
            Step(self._rpcs["AcquireLease"], [acquire.SerializeToString()]),
            Step(self._rpcs["RenewLease"], [self._breaker.broken(renew, dice)]),
            Step(self._rpcs["ReleaseLease"], [release.SerializeToString()]),
        ]

    def _import(self, dice: Dice) -> Sequence[Step]:
        snapshot = dice.pick(self._snapshots)
        blobs = dict(snapshot.new_blobs)
        if dice.chance(0.3):
            chosen = dice.pick(list(blobs))
            blobs[chosen] = files.tensor_file(blobs[chosen], dice)
        packed = files.archive_of(snapshot.manifest_bytes, blobs, dice, self._known)
        header = pb.ImportAgentHeader(agent_id=dice.pick(_NAMES), replace=dice.chance(0.7))
        pieces = [packed[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]
        messages = [pb.ImportAgentRequest(header=header), *(pb.ImportAgentRequest(data=piece) for piece in pieces)]
        return [Step(self._rpcs["ImportAgent"], [message.SerializeToString() for message in messages])]

    def _wrong_import(self, dice: Dice) -> Sequence[Step]:
        [step] = self._import(dice)
        sent = list(step.messages)
        place = dice.below(min(len(sent), 3))
        sent[place] = self._breaker.broken(pb.ImportAgentRequest.FromString(sent[place]), dice)
        return [Step(step.rpc, sent)]

    def _written(self, frames: Sequence[pb.WriteBlobsRequest]) -> Step:
        return Step(self._rpcs["WriteBlobs"], [frame.SerializeToString() for frame in frames])


class _Lives:
    """An agent's life from its beginning: made, changed, forked, rolled back, moved. Only a step in it is strange, so
    that what lies behind a success is met.
    """

    def __init__(self, rpcs: Mapping[str, Rpc], known: Known, snapshots: Mapping[str, SyntheticSnapshot]) -> None:
        self._rpcs = rpcs
        self._snapshots = [each for name, each in snapshots.items() if name != "mixed"]
        self._breaker = Requests(rpcs, known, {"": ""}, {}, "")

    def all(self) -> Mapping[str, Scenario]:
        return {
            "UpdateAgent of a new agent": self._update,
            "RollbackAgent to a version": self._rollback,
            "ForkAgent of a version": self._fork,
            "PullAgent from the peer": self._pull,
            "MoveAgent from the peer and back": self._move,
            "OfferAgent to the peer": self._given,
            "HandOverAgent to the peer": self._given,
            "UndoMove of an offer": self._undone,
            "FenceAgent of one that was offered": self._undone,
        }

    def _begun(self, dice: Dice) -> tuple[str, Sequence[Step]]:
        """A new agent of two versions."""
        name, steps = f"life {dice.below(10**9)}", []
        for version in range(2):
            snapshot = self._snapshots[(dice.below(2) + version) % len(self._snapshots)]
            digest = Digest.of(snapshot.manifest_bytes)
            frames = [frame for each in snapshot.new_blobs.items() for frame in files.frames(*each, dice)]
            frames += files.frames(digest, snapshot.manifest_bytes, dice, pb.BLOB_KIND_MANIFEST)
            request = pb.CommitSnapshotRequest(agent_id=name, manifest=digest.to_proto(), expected_version=version)
            steps.append(Step(self._rpcs["WriteBlobs"], [frame.SerializeToString() for frame in frames]))
            steps.append(self._step("CommitSnapshot", request))
        return name, steps

    def _update(self, dice: Dice) -> Sequence[Step]:
        name, steps = self._begun(dice)
        agent = pb.Agent(agent_id=name, is_pinned=True, retained_versions=dice.between(1, 9), labels={"a": "b"})
        paths = dice.pick((["labels"], ["labels.a", "is_pinned"], ["retained_versions"], ["is_pinned"]))
        request = pb.UpdateAgentRequest(agent=agent, update_mask=field_mask_pb2.FieldMask(paths=paths))
        return self._lived(name, steps, "UpdateAgent", request, dice)

    def _rollback(self, dice: Dice) -> Sequence[Step]:
        name, steps = self._begun(dice)
        request = pb.RollbackAgentRequest(agent_id=name, version=dice.between(1, 2))
        return self._lived(name, steps, "RollbackAgent", request, dice)

    def _fork(self, dice: Dice) -> Sequence[Step]:
        name, steps = self._begun(dice)
        request = pb.ForkAgentRequest(source_agent_id=name, agent_id=f"{name}, forked")
        return self._lived(request.agent_id, steps, "ForkAgent", request, dice)

    def _pull(self, dice: Dice) -> Sequence[Step]:
        name = f"pulled {dice.below(10**9)}"
        request = pb.PullAgentRequest(peer=_THERE.name, agent_id=dice.pick(_MOVING), local_agent_id=name)
        return self._lived(name, [], "PullAgent", request, dice)

    def _move(self, dice: Dice) -> Sequence[Step]:
        name = dice.pick(_MOVING)
        there, back = (pb.MoveAgentRequest(agent_id=name, from_peer=_THERE.name) for _ in range(2))
        back.to_peer = _THERE.name
        steps = [self._step("MoveAgent", there)]
        return [*self._lived(name, steps, "MoveAgent", dice.pick((there, back)), dice), self._step("MoveAgent", back)]

    def _given(self, dice: Dice) -> Sequence[Step]:
        name, steps = self._begun(dice)
        move_id = f"{dice.below(1 << 60):016x}"
        offer = pb.OfferAgentRequest(agent_id=name, move_id=move_id)
        over = pb.HandOverAgentRequest(agent_id=name, move_id=move_id, generation=1)
        if dice.chance(0.3):
            return self._lived(name, steps, "OfferAgent", offer, dice)
        return self._lived(name, [*steps, self._step("OfferAgent", offer)], "HandOverAgent", over, dice)

    def _undone(self, dice: Dice) -> Sequence[Step]:
        name, steps = self._begun(dice)
        move_id = f"{dice.below(1 << 60):016x}"
        offer = pb.OfferAgentRequest(agent_id=name, move_id=move_id)
        undo = pb.UndoMoveRequest(agent_id=name, move_id=move_id)
        fence = pb.FenceAgentRequest(agent_id=name, generation=dice.between(1, 4))
        steps = [*steps, self._step("OfferAgent", offer)]
        if dice.chance(0.4):
            return self._lived(name, steps, "UndoMove", undo, dice)
        return self._lived(name, [*steps, self._step("UndoMove", undo)], "FenceAgent", fence, dice)

    def _lived(self, name: str, steps: Sequence[Step], rpc: str, request: Any, dice: Dice) -> list[Step]:
        """These steps, a strange one, and a look at the agent or a change of it."""
        after = self._rpcs[dice.pick(["GetAgent", "ListSnapshots", "GetSnapshot", "ClaimAgent", "DeleteAgent"])]
        strange = Step(self._rpcs[rpc], [self._breaker.broken(request, dice)])
        return [*steps, strange, Step(after, [after.request_type(agent_id=name).SerializeToString()])]

    def _step(self, rpc: str, request: Any) -> Step:
        return Step(self._rpcs[rpc], [request.SerializeToString()])


def _peers_file(directory: Path, own_address: str, tokens: Mapping[str, str]) -> Path:
    """The other namespace of this store as its peer, and one where nobody listens."""
    file = directory / "peers.toml"
    lines = ["[[peer]]", 'name = "dead"', f'address = "unix:{directory}/nobody"']
    for here, there in ((_THERE, _BACK), (_BACK, _THERE)):
        token_file = directory / f"{here.name}.token"
        token_file.write_text(tokens[there.name])
        token_file.chmod(0o600)
        lines += ["[[peer]]", f'name = "{here.name}"', f'address = "{own_address}"', f'token_file = "{token_file}"']
        lines += [f'gives = ["{here.namespace}=claim"]', f'takes = ["{here.namespace}=move"]']
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    return file
