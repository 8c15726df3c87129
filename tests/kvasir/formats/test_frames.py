"""Frames of blobs over any cuts and from peers that lie, and sizes that a peer only says."""

import random
import tracemalloc
from concurrent import futures

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import StoreClient
from kvasir.errors import DataLoss
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FRAME_BYTES, FrameAssembler, frames_of


@settings(max_examples=25)
@given(st.lists(st.integers(0, 2 * FRAME_BYTES), min_size=1, max_size=3), st.integers(0, 1 << 32))
def test_blobs_arrive_as_they_were_over_any_cuts(sizes: list[int], seed: int) -> None:
    source = random.Random(seed)
    blobs = {Digest.of(data): data for data in map(source.randbytes, sizes)}
    assembler = FrameAssembler(list(blobs))
    arrived: dict[Digest, bytes] = {}
    while assembler.remaining:
        offset = assembler.received_bytes
        frames = [
            frame
            for index, digest in enumerate(assembler.remaining)
            for frame in frames_of(digest, blobs[digest], first_offset=offset if index == 0 else 0)
        ]
        assembler.resume()
        for frame in frames[: source.randint(1, len(frames))]:
            if blob := assembler.add(frame):
                arrived[blob[0]] = bytes(blob[1])
    assert arrived == blobs


def bad_frames() -> dict[str, list[pb.BlobFrame]]:
    data = bytes(range(256)) * 5000
    frames = list(frames_of(Digest.of(data), data))
    flipped = bytearray(frames[1].data)
    flipped[0] ^= 1
    return {
        "a bit flipped": [frames[0], pb.BlobFrame(offset=frames[1].offset, data=bytes(flipped))],
        "out of order": [frames[1]],
        "twice": [frames[0], frames[0]],
        "a gap": [frames[0], pb.BlobFrame(offset=frames[1].offset + 1, data=frames[1].data[1:])],
        "named again": [frames[0], pb.BlobFrame(digest=frames[0].digest, offset=frames[1].offset, data=frames[1].data)],
        "another": list(frames_of(Digest.of(b"x"), b"x")),
        "too long": [frames[0], pb.BlobFrame(offset=frames[1].offset, data=frames[1].data + b"x")],
        "too large": [pb.BlobFrame(digest=frames[0].digest, data=data)],
        "empty": [pb.BlobFrame(digest=frames[0].digest)],
        "after the end": [*frames, pb.BlobFrame(data=b"x")],
    }


@pytest.mark.parametrize("name", bad_frames())
def test_frames_that_do_not_fit_are_data_loss(name: str) -> None:
    data = bytes(range(256)) * 5000
    assembler = FrameAssembler([Digest.of(data)])
    *_, last = frames = bad_frames()[name]
    for frame in frames[:-1]:
        assembler.add(frame)
    with pytest.raises(DataLoss):
        assembler.add(last)


def test_what_a_peer_only_says_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        assembler = FrameAssembler([Digest("ab" * 32, 3 << 30)])
        assembler.add(pb.BlobFrame(digest=assembler.remaining[0].to_proto(), data=b"x"))
        assert tracemalloc.get_traced_memory()[1] < FRAME_BYTES
    finally:
        tracemalloc.stop()


class _Boaster(cachestore_pb2_grpc.AgentServiceServicer):
    """A store that says of a manifest that it has 3 GiB."""

    def GetSnapshot(self, request: object, context: object) -> pb.GetSnapshotResponse:  # noqa: N802
        return pb.GetSnapshotResponse(
            snapshot=pb.SnapshotVersion(manifest=Digest("ab" * 32, 3 << 30).to_proto()),
        )


def test_a_manifest_that_nobody_would_read_is_not_fetched() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(_Boaster(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with StoreClient.connect(f"127.0.0.1:{port}") as client, pytest.raises(DataLoss) as caught:
            client.get_snapshot("ada")
        assert caught.value.reason == "MANIFEST_REFUSED"
    finally:
        server.stop(0)
