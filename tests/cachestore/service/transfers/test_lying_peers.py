"""No byte of a peer that lies, or falls silent in the wrong place, becomes memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.errors import DataLoss, NotFound, PermissionDenied, Unavailable
from kvasir.formats.digest import Digest
from kvasir.formats.frames import frames_of

from tests.cachestore.service.running import StoreHome, assert_whole, publish, start_here
from tests.cachestore.service.transfers.lying_peers import LIES, OTHER, LyingPeer, MovingPeer, lying
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))
MIB = 1 << 20


def test_bytes_of_a_lying_peer_never_become_memory(home: StoreHome, tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 11).turn(600)
    current: dict[str, Callable[[list[pb.BlobFrame]], list[pb.BlobFrame]]] = {}
    peer = LyingPeer(turn, lambda frames: current["lie"](frames))
    with lying(peer) as address:
        here = start_here(home, tmp_path, address)
        with here.client() as ours:
            for name, lie in LIES.items():
                current["lie"] = lie
                with pytest.raises(DataLoss):
                    ours.pull_agent("mac", "ada", timeout_s=20)
                with pytest.raises(NotFound):
                    ours.get_agent("ada")
                assert turn.digests[1] in ours.find_missing(turn.digests), name
            current["lie"] = lambda frames: frames[:1]
            with pytest.raises((Unavailable, DataLoss)):
                ours.pull_agent("mac", "ada", timeout_s=20)
            missing = {digest.hash for digest in ours.find_missing(turn.digests)}
            current["lie"] = lambda frames: [frame for frame in frames if frame.digest.hash in missing]
            assert ours.pull_agent("mac", "ada", timeout_s=60).version == 1
            assert_whole(ours, "ada", turn)


class CutPeer(LyingPeer):
    """Sends from the offset that it was asked for: the first time one frame, later all, after `before_rest`."""

    def __init__(self, turn: SyntheticSnapshot, before_rest: Callable[[], None]) -> None:
        super().__init__(turn, lambda frames: frames)
        self._before_rest = before_rest
        self.offsets: list[int] = []

    def ReadBlobs(self, request: pb.ReadBlobsRequest, context: Any) -> Iterator[pb.ReadBlobsResponse]:  # noqa: N802
        self.offsets.append(request.first_offset)
        if len(self.offsets) == 2:
            self._before_rest()
        first = request.first_offset
        for digest in map(Digest.from_proto, request.digests):
            for frame in frames_of(digest, self._turn.new_blobs[digest], first_offset=first):
                yield pb.ReadBlobsResponse(frame=frame)
                if len(self.offsets) == 1:
                    return
            first = 0


def test_nobody_takes_a_part_away_from_a_pull_that_has_requested_the_rest(home: StoreHome, tmp_path: Path) -> None:
    turn = SyntheticAgent(LARGE, 13).turn(256)
    [digest] = turn.digests
    refused: list[str] = []

    def spoil() -> None:
        with here.client() as another:
            stub = cachestore_pb2_grpc.CacheStoreServiceStub(another._channel)  # type: ignore[no-untyped-call]
            frames = frames_of(digest, bytes(digest.size_bytes), pb.BLOB_KIND_TENSORS, MIB)
            try:
                list(stub.WriteBlobs((pb.WriteBlobsRequest(frame=frame) for frame in frames), timeout=20))
            except grpc.RpcError as error:
                refused.append(str(error.details()))

    peer = CutPeer(turn, spoil)
    with lying(peer) as address:
        here = start_here(home, tmp_path, address)
        with here.client() as ours:
            ours.pull_agent("mac", "ada", timeout_s=20)
            assert_whole(ours, "ada", turn)
    assert peer.offsets == [0, MIB]
    assert "another writer has" in refused[0]


def test_a_peers_manifest_must_have_its_own_digest_and_be_one(home: StoreHome, tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 13).turn(600)
    peer = LyingPeer(turn, lambda frames: frames)
    with lying(peer) as address:
        here = start_here(home, tmp_path, address)
        with here.client() as ours:
            for manifest_bytes in (OTHER.manifest_bytes, turn.manifest_bytes + b"\x08\x01", b"\xff\xff"):
                peer.manifest_bytes = manifest_bytes
                with pytest.raises(DataLoss):
                    ours.pull_agent("mac", "ada", timeout_s=20)
                with pytest.raises(NotFound):
                    ours.get_agent("ada")


def test_a_peers_malformed_manifest_is_the_peers_fault(home: StoreHome, tmp_path: Path) -> None:
    peer = LyingPeer(SyntheticAgent(SMALL, 13).turn(600), lambda frames: frames)
    peer.manifest_bytes = b"\xff\xff"
    peer.manifest_digest = Digest.of(peer.manifest_bytes)
    with lying(peer) as address:
        here = start_here(home, tmp_path, address)
        with here.client() as ours:
            with pytest.raises(DataLoss) as caught:
                ours.pull_agent("mac", "ada", timeout_s=20)
            assert caught.value.reason == "MANIFEST_REFUSED"
            assert caught.value.message.startswith("peer mac: ")


@pytest.mark.long(2)
def test_a_peer_whose_list_of_versions_does_not_end_is_given_up(home: StoreHome, tmp_path: Path) -> None:
    peer = LyingPeer(SyntheticAgent(SMALL, 13).turn(600), lambda frames: frames)
    with lying(peer) as address:
        here = start_here(home, tmp_path, address)
        with here.client() as ours:
            publish(ours, "ada", SyntheticAgent(SMALL, 14).turn(300), 0)
            with pytest.raises(Unavailable) as caught:
                ours.pull_agent("mac", "ada", timeout_s=60)
            assert caught.value.reason == "PEER_FAILED"
            assert peer.pages == 100


def test_a_move_brings_no_label_and_no_retention_that_no_store_gives(home: StoreHome, tmp_path: Path) -> None:
    """A label may be shown in a terminal."""
    peer = MovingPeer(SyntheticAgent(SMALL, 14).turn(300))
    labels = [{"x": "\x1b[2J"}, {"\x1b": "y"}, {"x": "y" * 257}, {"x" * 257: "y"}, {f"{n}": "y" for n in range(65)}]
    lies = [*({"labels": each, "retained_versions": 8} for each in labels), {"retained_versions": 1001}, {}]
    with lying(peer) as address, start_here(home, tmp_path, address).client() as ours:
        for peer.facts in lies:
            with pytest.raises(PermissionDenied) as refused:
                ours.move_agent("ada", from_peer="mac", timeout_s=20)
            assert refused.value.reason == "PEER_MAY_NOT"
            with pytest.raises(NotFound):
                ours.get_agent("ada")
        peer.facts = {"labels": {"x": "y"}, "retained_versions": 8}
        assert ours.move_agent("ada", from_peer="mac", timeout_s=60).labels == {"x": "y"}
