"""Agents moving between stores and through archives: only what lacks travels, and no stranger's bytes become memory."""

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import StoreClient
from kvasir.credentials import write_private_text
from kvasir.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    KvasirError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvasir.formats.archive import pack
from kvasir.formats.block_hash import block_hash_chain, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.frames import frames_of

from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import (
    RunningStore,
    StoreHome,
    assert_whole,
    make_credentials,
    publish,
    store_home,
)
from tests.cachestore.service.test_listening import certificate, tls_options
from tests.synthetic import MIXED, SMALL, TINY, WINDOWED, SyntheticAgent, SyntheticSnapshot, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))
MIB = 1 << 20


def peers_file(path: Path, **peers: str) -> Path:
    """A peers file; each value is an address and further lines."""
    text = "".join(f'[[peer]]\nname = "{name}"\naddress = {rest}\n' for name, rest in peers.items())
    path.unlink(missing_ok=True)
    write_private_text(path, text)
    return path


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RunningStore]:
    """Another Mac's store."""
    with store_home(tmp_path / "there") as home:
        yield home.start()


def start_here(home: StoreHome, tmp_path: Path, address: str, *options: str) -> RunningStore:
    """A store whose only peer, "mac", is at an address."""
    return home.start("--peers-file", str(peers_file(tmp_path / "peers.toml", mac=f'"{address}"')), *options)


def test_an_agent_is_pulled_whole_with_provenance_and_again_only_what_is_new(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    ada = SyntheticAgent(TINY, 1)
    first, second = ada.turn(256 * 10), ada.turn(300)
    with proxy_to(there.address) as proxy, there.client() as theirs:
        here = start_here(home, tmp_path, proxy.address)
        with here.client() as ours:
            publish(theirs, "ada", first, 0)
            seen: list[tuple[int, int, int]] = []
            made = ours.pull_agent(
                "mac", "ada", on_progress=lambda p: seen.append((p.blobs_done, p.blobs_total, p.bytes_done))
            )
            assert (made.version, made.origin, made.origin_detail) == (1, pb.ORIGIN_PULL, "mac/ada@1")
            assert seen[-1] == (10, 10, sum(digest.size_bytes for digest in first.digests))
            assert_whole(ours, "ada", first)
            before = proxy.received_bytes
            assert ours.pull_agent("mac", "ada").version == 1
            assert proxy.received_bytes - before < MIB
            publish(theirs, "ada", second, 1)
            before = proxy.received_bytes
            assert ours.pull_agent("mac", "ada").version == 2
            new_bytes = sum(digest.size_bytes for digest in second.new_blobs)
            assert proxy.received_bytes - before < new_bytes + MIB
            assert_whole(ours, "ada", second)
            assert list(ours.get_capabilities().peers) == ["mac"]


def test_a_pull_may_give_another_name_and_never_overwrites_another_memory(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    mine, theirs = SyntheticAgent(SMALL, 2).turn(300), SyntheticAgent(SMALL, 3).turn(400)
    with here.client() as ours, there.client() as other:
        publish(ours, "ada", mine, 0)
        publish(other, "ada", theirs, 0)
        with pytest.raises(AlreadyExists) as caught:
            ours.pull_agent("mac", "ada")
        assert caught.value.reason == "NOT_AN_ANCESTOR"
        assert_whole(ours, "ada", mine)
        ours.pull_agent("mac", "ada", local_agent_id="their ada")
        assert_whole(ours, "their ada", theirs)
        assert_whole(ours, "ada", mine)


def test_a_pull_is_an_update_when_the_line_here_is_one_of_their_versions(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    ada = SyntheticAgent(SMALL, 4)
    with here.client() as ours, there.client() as theirs:
        publish(theirs, "ada", ada.turn(300), 0)
        ours.pull_agent("mac", "ada")
        for parent in range(1, 5):
            last = ada.turn(300)
            publish(theirs, "ada", last, parent)
        assert ours.pull_agent("mac", "ada").version == 2
        assert_whole(ours, "ada", last)


def test_a_pull_brings_the_blocks_of_windows_and_next_time_only_new_ones(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    ada = SyntheticAgent(WINDOWED, 6)
    with here.client() as ours, there.client() as theirs:
        for parent, tokens in enumerate((1100, 50)):
            last = ada.turn(tokens)
            publish(theirs, "ada", last, parent)
            before = ours.get_stats().counters["blobs_written"]
            ours.pull_agent("mac", "ada")
            assert_whole(ours, "ada", last)
            # Of each group what is new: at first all blocks that are listed, then a tail alone; and the manifest.
            assert ours.get_stats().counters["blobs_written"] - before == len(last.new_blobs) + 1
        assert len(last.new_blobs) == 3


def test_what_is_pulled_binds_no_block_hash(home: StoreHome, there: RunningStore, tmp_path: Path) -> None:
    here = start_here(home, tmp_path, there.address)
    turn = SyntheticAgent(SMALL, 5).turn(600, is_prompt=True)
    kv = kv_identity_hash(SMALL)
    chain = block_hash_chain("default", kv, list(turn.manifest.token_ids))
    with here.client() as ours, there.client() as theirs:
        publish(theirs, "ada", turn, 0)
        ours.pull_agent("mac", "ada")
        assert [*map(Digest.from_proto, theirs.find_prefix(kv, chain).blocks)] == turn.digests[:2]
        assert ours.find_prefix(kv, chain).tokens == 0


@pytest.mark.long(2)
def test_a_cut_pull_goes_on_without_getting_finished_blobs_again(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    turn = SyntheticAgent(LARGE, 6).turn(256 * 4)
    total = sum(digest.size_bytes for digest in turn.digests)
    with proxy_to(there.address) as proxy, there.client() as theirs:
        publish(theirs, "ada", turn, 0)
        here = start_here(home, tmp_path, proxy.address)
        with here.client() as ours:
            proxy.cut_after_received = total // 2
            ours.pull_agent("mac", "ada")
            assert proxy.cuts == 1
            assert proxy.received_bytes < total + 3 * MIB
            assert_whole(ours, "ada", turn)


@pytest.mark.long(5)
def test_a_peer_that_falls_silent_is_unavailable_and_the_next_pull_gets_the_rest(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    turn = SyntheticAgent(LARGE, 7).turn(256 * 4)
    total = sum(digest.size_bytes for digest in turn.digests)
    with proxy_to(there.address) as proxy, there.client() as theirs:
        publish(theirs, "ada", turn, 0)
        here = start_here(home, tmp_path, proxy.address, "--stall-timeout-s", "0.5")
        with here.client() as ours:
            proxy.silent_after_received = total // 2
            with pytest.raises(Unavailable) as caught:
                ours.pull_agent("mac", "ada", timeout_s=60)
            assert "mac" in caught.value.message
            with pytest.raises(NotFound):
                ours.get_agent("ada")
            missing = ours.find_missing(turn.digests)
            assert 0 < len(missing) < len(turn.digests)
            proxy.silent_after_received = None
            proxy.drop_connections()
            before = proxy.received_bytes
            ours.pull_agent("mac", "ada")
            assert proxy.received_bytes - before < sum(digest.size_bytes for digest in missing) + MIB
            assert_whole(ours, "ada", turn)


@pytest.mark.long(3)
def test_a_peer_killed_in_the_middle_leaves_nothing_visible(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    turn = SyntheticAgent(LARGE, 8).turn(256 * 4)
    with there.client() as theirs:
        publish(theirs, "ada", turn, 0)
    here = start_here(home, tmp_path, there.address)

    def kill_at_one(progress: pb.TransferProgress) -> None:
        if progress.blobs_done == 1:
            there.kill()

    with here.client() as ours:
        with pytest.raises(Unavailable):
            ours.pull_agent("mac", "ada", on_progress=kill_at_one, timeout_s=60)
        with pytest.raises(NotFound):
            ours.get_agent("ada")
        publish(ours, "ada", turn, 0)
        assert_whole(ours, "ada", turn)


def test_two_pulls_at_once_end_in_one_line(home: StoreHome, there: RunningStore, tmp_path: Path) -> None:
    here = start_here(home, tmp_path, there.address)
    turn = SyntheticAgent(LARGE, 9).turn(256 * 3)
    with here.client() as ours, there.client() as theirs:
        publish(theirs, "ada", turn, 0)

        with futures.ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda _: ours.pull_agent("mac", "ada"), range(3)))
        assert [version.version for version in made] == [1, 1, 1]
        assert_whole(ours, "ada", turn)


def test_an_absent_agent_or_peer_is_not_found(home: StoreHome, there: RunningStore, tmp_path: Path) -> None:
    here = start_here(home, tmp_path, there.address)
    with here.client() as ours:
        for peer, agent in (("mac", "nobody"), ("elsewhere", "ada")):
            with pytest.raises(NotFound):
                ours.pull_agent(peer, agent)


def test_the_peers_credential_says_which_namespace_is_read(home: StoreHome, tmp_path: Path) -> None:
    tokens = make_credentials(tmp_path / "c.toml")
    turn = SyntheticAgent(SMALL, 10).turn(300)
    cert, key = certificate(tmp_path, "mac")
    other, _ = certificate(tmp_path, "other")
    for name in ("peer", "foreign", "engine"):
        write_private_text(tmp_path / f"{name}.token", tokens[name] + "\n")
    write_private_text(tmp_path / "wrong.token", "x" * 40)
    with store_home(tmp_path / "there") as their_home:
        options = ["--credentials-file", str(tmp_path / "c.toml"), *tls_options(cert, key)]
        there = their_home.start(*options, listen="127.0.0.1:0")
        from kvasir.clients import Tls

        with there.client(tokens["all"], Tls(cert)) as theirs:
            publish(theirs, "ada", turn, 0)

        def peer(token: str, pin: Path) -> str:
            return f'"{there.address}"\ntoken_file = "{tmp_path}/{token}.token"\nca_file = "{pin}"'

        peers = {
            "good": peer("peer", cert),
            "foreign": peer("foreign", cert),
            "wrong": peer("wrong", cert),
            "unpinned": peer("peer", other),
            "tokenless": f'"{there.address}"\nca_file = "{cert}"',
        }
        here = home.start("--peers-file", str(peers_file(tmp_path / "peers.toml", **peers)))
        with here.client(timeout_s=60) as ours:
            refused: dict[str, tuple[type[KvasirError], str]] = {
                "foreign": (NotFound, "AGENT_NOT_FOUND"),
                "wrong": (FailedPrecondition, "PEER_REFUSED"),
                "tokenless": (FailedPrecondition, "PEER_REFUSED"),
                "unpinned": (Unavailable, "PEER_UNAVAILABLE"),
            }
            for name, (error_type, reason) in refused.items():
                with pytest.raises(error_type) as caught:
                    ours.pull_agent(name, "ada", timeout_s=60)
                assert caught.value.reason == reason, name
            assert ours.pull_agent("good", "ada").origin_detail == "good/ada@1"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[[peer]]\nname = "a"\naddress = "192.0.2.1:7000"\n', "ca_file"),
        ('[[peer]]\nname = "a/b"\naddress = "127.0.0.1:1"\n', "name"),
        ('[[peer]]\nname = "a"\naddress = "127.0.0.1:1"\nhost = "x"\n', "host"),
        ('[[peer]]\nname = "a"\naddress = "127.0.0.1:1"\n' * 2, "same name"),
        ('[[peer]]\nname = "a"\naddress = "127.0.0.1:1"\ntoken_file = "/nowhere"\n', "/nowhere"),
        ("peer = 3", "peer"),
        ("[[", "peers.toml"),
    ],
)
def test_a_peers_file_that_is_wrong_keeps_the_store_from_starting(
    text: str, wanted: str, home: StoreHome, tmp_path: Path
) -> None:
    write_private_text(tmp_path / "peers.toml", text)
    assert wanted in home.refusal("--peers-file", str(tmp_path / "peers.toml"))


def test_a_peers_file_that_others_can_write_is_refused(home: StoreHome, tmp_path: Path) -> None:
    file = peers_file(tmp_path / "peers.toml", mac='"127.0.0.1:1"')
    file.chmod(0o622)
    assert "chmod 600" in home.refusal("--peers-file", str(file))


# --- peers that lie ---


class LyingPeer(cachestore_pb2_grpc.CacheStoreServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):
    """A peer whose manifest is true and whose frames are what a test makes of them."""

    def __init__(self, turn: SyntheticSnapshot, frames: Callable[[list[pb.BlobFrame]], list[pb.BlobFrame]]) -> None:
        self._turn = turn
        self._frames = frames
        self.manifest_bytes = turn.manifest_bytes
        self.manifest_digest: Digest | None = None
        self.pages = 0

    def GetAgent(self, request: Any, context: Any) -> pb.GetAgentResponse:  # noqa: N802
        return pb.GetAgentResponse(agent=pb.Agent(agent_id="ada"))

    def ListSnapshots(self, request: Any, context: Any) -> pb.ListSnapshotsResponse:  # noqa: N802
        self.pages += 1
        return pb.ListSnapshotsResponse(next_page_token=f"page {self.pages}")

    def GetSnapshot(self, request: Any, context: Any) -> pb.GetSnapshotResponse:  # noqa: N802
        digest = self.manifest_digest or self._turn.manifest_digest
        snapshot = pb.SnapshotVersion(agent_id="ada", version=1, manifest=digest.to_proto())
        return pb.GetSnapshotResponse(snapshot=snapshot, manifest_bytes=self.manifest_bytes)

    def ReadBlobs(self, request: pb.ReadBlobsRequest, context: Any) -> Iterator[pb.ReadBlobsResponse]:  # noqa: N802
        truth: list[pb.BlobFrame] = []
        for digest in self._turn.digests:
            truth += frames_of(digest, self._turn.new_blobs[digest])
        for frame in self._frames(truth):
            yield pb.ReadBlobsResponse(frame=frame)


@contextmanager
def lying(peer: LyingPeer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(peer, server)  # type: ignore[no-untyped-call]
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(peer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


def _flip(frames: list[pb.BlobFrame]) -> list[pb.BlobFrame]:
    data = bytearray(frames[1].data)
    data[-1] ^= 1
    frames[1].data = bytes(data)
    return frames


LIES: dict[str, Callable[[list[pb.BlobFrame]], list[pb.BlobFrame]]] = {
    "a bit flipped": _flip,
    "another order": lambda frames: frames[::-1],
    "a blob twice": lambda frames: [frames[0], frames[0], *frames[1:]],
    "not asked for": lambda frames: list(frames_of(OTHER.digests[0], OTHER.new_blobs[OTHER.digests[0]])),
    "cut short": lambda frames: [pb.BlobFrame(digest=frames[0].digest, data=frames[0].data[:100]), *frames[1:]],
    "too long": lambda frames: [pb.BlobFrame(digest=frames[0].digest, data=frames[0].data + b"x"), *frames[1:]],
    "no digest": lambda frames: [pb.BlobFrame(data=frames[0].data)],
    "wrong offset": lambda frames: [pb.BlobFrame(digest=frames[0].digest, offset=7, data=frames[0].data)],
    "another's bytes": lambda frames: [
        pb.BlobFrame(digest=frames[0].digest, data=frames[1].data),
        pb.BlobFrame(digest=frames[1].digest, data=frames[0].data),
    ],
}
OTHER = SyntheticAgent(SMALL, 12).turn(256)


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
            assert ours.pull_agent("mac", "ada", timeout_s=20).version == 1
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


def test_nobody_takes_a_part_away_from_a_pull_that_has_asked_for_the_rest(home: StoreHome, tmp_path: Path) -> None:
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


# --- archives of strangers ---


def _tar(*members: tuple[str, bytes], **special: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in special.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _members(turn: SyntheticSnapshot) -> list[tuple[str, bytes]]:
    index = {
        "format": 1,
        "agent_id": "ada",
        "kv_identity_hash": kv_identity_hash(turn.manifest.kv_identity),
        "manifest": turn.manifest_digest.hash,
    }
    blobs = [(f"blobs/{digest.hash}", turn.new_blobs[digest]) for digest in turn.digests]
    return [("kvasir-archive.json", json.dumps(index).encode()), ("manifest.pb", turn.manifest_bytes), *blobs]


def test_hostile_archives_are_refused_and_leave_nothing_visible(home: StoreHome, tmp_path: Path) -> None:
    turn = SyntheticAgent(MIXED, 14).turn(600)
    members = _members(turn)
    good = _tar(*members)
    index, manifest, first, second = members[0], members[1], members[2], members[3]
    flipped = bytearray(good)
    flipped[good.index(turn.new_blobs[turn.digests[-1]]) + 5000] ^= 1
    bad_index = [(members[0][0], text) for text in (b"{}", b"\xff", b"[" * 60_000, b'{"format": 2}', b"{" * 70_000)]
    cases: dict[str, bytes] = {
        "nothing": b"",
        "no archive": b"x" * 5000,
        "zeros": bytes(10_240),
        "truncated in a header": good[:300],
        "truncated in a blob": good[: len(good) // 2],
        "no end": good[: good.rindex(b"ustar") - 257],
        "a bit flipped": bytes(flipped),
        "blobs swapped": _tar(index, manifest, second, first, *members[4:]),
        "a blob missing": _tar(*members[:-1]),
        "a blob more": _tar(*members, ("blobs/" + "0" * 64, b"x")),
        "a path": _tar(index, manifest, ("../../../tmp/x", first[1])),
        "an absolute path": _tar(index, manifest, ("/tmp/x", first[1])),
        "a link": _tar(index, manifest, first, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "a directory": _tar(("kvasir-archive.json", b""), type=tarfile.DIRTYPE),
        "a device": _tar(("kvasir-archive.json", b""), type=tarfile.CHRTYPE),
        "no manifest": _tar(index, *members[2:]),
        "manifest first": _tar(manifest, index, *members[2:]),
        "another manifest": _tar(index, ("manifest.pb", OTHER.manifest_bytes), *members[2:]),
        "a longer blob": _tar(index, manifest, (first[0], first[1] + b"x"), *members[3:]),
        "bytes after the end": good + b"x" * 512,
        "an index of a gigabyte": _huge_header("kvasir-archive.json", 1 << 30),
        "a manifest of a terabyte": good[:1024] + _huge_header("manifest.pb", 1 << 40),
        "a negative size": _huge_header("kvasir-archive.json", -5),
        **{f"bad index {n}": _tar(each, *members[1:]) for n, each in enumerate(bad_index)},
    }
    running = home.start()
    with running.client() as client:
        for name, data in cases.items():
            with pytest.raises(InvalidArgument):
                client.import_agent("ada", [data])
            with pytest.raises(NotFound):
                client.get_agent("ada")
            assert client.get_stats().agent_count == 0, name
        assert client.import_agent("ada", [good]).version == 1
        assert_whole(client, "ada", turn)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h"]


def _huge_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + b"{}" * 10_000


@pytest.mark.long(3)
def test_a_large_import_needs_little_memory(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 15).turn(256 * 20)
    total = sum(digest.size_bytes for digest in turn.digests)
    before = running.memory_bytes()
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, running.memory_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    with running.client() as client:
        client.import_agent("ada", pack(turn.manifest, turn.new_blobs, agent_id="ada"))
        done.set()
        watching.join()
        assert_whole(client, "ada", turn)
    assert total > 130 * MIB
    assert peak - before < 70 * MIB, (peak - before) / MIB


def test_an_import_into_a_full_quota_is_refused_and_the_next_operation_works(home: StoreHome) -> None:
    running = home.start("--quota-bytes", str(2 * MIB))
    turn = SyntheticAgent(TINY, 16).turn(256 * 20)
    with running.client() as client:
        with pytest.raises(ResourceExhausted):
            client.import_agent("ada", pack(turn.manifest, turn.new_blobs, agent_id="ada"))
        with pytest.raises(NotFound):
            client.get_agent("ada")
        assert client.get_stats().agent_count == 0


@pytest.mark.long(2)
def test_an_import_that_is_cut_leaves_nothing_visible(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 17).turn(256 * 3)
    archive = b"".join(pack(turn.manifest, turn.new_blobs, agent_id="ada"))
    with proxy_to(running.address) as proxy, StoreClient.connect(proxy.address) as client:
        proxy.cut_after_sent = len(archive) // 2
        with pytest.raises(Unavailable):
            client.import_agent("ada", [archive])
    with running.client() as client:
        with pytest.raises(NotFound):
            client.get_agent("ada")
        client.import_agent("ada", [archive])
        assert_whole(client, "ada", turn)
