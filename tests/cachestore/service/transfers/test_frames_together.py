"""Several frames in a message, and several streams side by side: for those that know them, and never for others."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import AioStoreClient
from kvasir.clients.aio.handed_upload import put_by_files
from kvasir.clients.handed_files import HandedFiles
from kvasir.clients.store_client_transfers import SEVERAL
from kvasir.errors import DataLoss, KvasirError
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FrameAssembler, frames_of
from kvasir.status import from_rpc_error

from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import RunningStore, StoreHome, assert_whole, publish
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))  # a block has 7 MB
MIB = 1 << 20


@contextmanager
def stub_of(address: str) -> Iterator[Any]:
    with grpc.insecure_channel(address) as channel:
        yield cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]


def whole_frames(blobs: Iterable[tuple[Digest, bytes]]) -> list[pb.BlobFrame]:
    return [frame for digest, data in blobs for frame in frames_of(digest, data, pb.BLOB_KIND_TENSORS)]


def together(frames: list[pb.BlobFrame]) -> pb.WriteBlobsRequest:
    return pb.WriteBlobsRequest(frame=frames[0], more=frames[1:])


def write(running: RunningStore, *requests: pb.WriteBlobsRequest) -> list[pb.WriteBlobsResponse] | KvasirError:
    with stub_of(running.address) as stub:
        try:
            return list(stub.WriteBlobs(iter(requests), timeout=30))
        except grpc.RpcError as error:
            return from_rpc_error(error)


def test_blobs_of_a_message_are_answered_together_once_all_are_durable(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(SMALL, 1).turn(256 * 16)
    frames = whole_frames(turn.new_blobs.items())
    answers = write(running, together(frames[:6]), pb.WriteBlobsRequest(frame=frames[6]), together(frames[7:]))
    assert isinstance(answers, list)
    named = [digest.hash for each in answers for digest in (each.digest, *each.more)]
    assert sorted(named) == sorted(digest.hash for digest in turn.digests)
    assert any(each.more for each in answers)
    running.kill()
    with home.start().client() as client:
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)
    again = write(running, together(frames), together(frames))
    assert isinstance(again, list)
    assert all(each.existed for each in again)
    assert sum(1 + len(each.more) for each in again) == 2 * len(frames)


def test_a_caller_of_single_frames_gets_an_answer_for_each_blob(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(SMALL, 2).turn(256 * 16)
    answers = write(running, *(pb.WriteBlobsRequest(frame=each) for each in whole_frames(turn.new_blobs.items())))
    assert isinstance(answers, list)
    assert [len(each.more) for each in answers] == [0] * len(turn.digests)


def test_frames_of_a_message_are_checked_as_if_each_came_alone(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(SMALL, 3).turn(256 * 4)
    good, bad, *_ = turn.digests
    [first], [second] = ([*frames_of(digest, turn.new_blobs[digest], pb.BLOB_KIND_TENSORS)] for digest in (good, bad))
    half = len(second.data) // 2
    begun = pb.BlobFrame(digest=second.digest, kind=second.kind, data=second.data[:half])
    flipped = pb.BlobFrame(digest=second.digest, kind=second.kind, data=second.data[:-1] + b"\x7f")
    cases = {
        "frame.kind": [first, pb.BlobFrame(digest=second.digest, data=second.data)],
        "frame.digest": [first, pb.BlobFrame(offset=first.digest.size_bytes, data=b"x")],
        "frame.offset": [first, begun, pb.BlobFrame(offset=half + 1, data=second.data[half:])],
        "frame.data": [begun, first],
        "data": [first, flipped],
    }
    for field, frames in cases.items():
        refused = write(running, together(frames))
        assert isinstance(refused, KvasirError), field
        assert refused.field == field, refused.message
    handed = pb.WriteBlobsRequest(
        frame=pb.BlobFrame(digest=first.digest, kind=first.kind), more=[second], handed="0" * 32
    )
    refused = write(running, handed)
    assert isinstance(refused, KvasirError)
    assert refused.field == "handed"
    assert "one frame" in refused.message
    with running.client() as client:
        assert client.find_missing([good, bad]) == [bad]
    in_two = [begun, pb.BlobFrame(offset=half, data=second.data[half:]), first]
    answers = write(running, together(in_two))
    assert isinstance(answers, list)
    with running.client() as client:
        assert bytes(client.get_blob(bad)) == turn.new_blobs[bad]


def read(running: RunningStore, digests: Iterable[Digest], *, takes_several: bool) -> list[pb.ReadBlobsResponse]:
    named = [digest.to_proto() for digest in digests]
    with stub_of(running.address) as stub:
        return list(stub.ReadBlobs(pb.ReadBlobsRequest(digests=named, takes_several=takes_several), timeout=30))


def test_small_blobs_are_grouped_only_for_callers_that_take_several(home: StoreHome) -> None:
    running = home.start()
    small, large = SyntheticAgent(TINY, 4).turn(256 * 7), SyntheticAgent(LARGE, 4).turn(256)
    blobs = {**small.new_blobs, **large.new_blobs}
    digests = [*small.digests[:4], *large.digests, *small.digests[4:]]
    with running.client() as client:
        client.put_blobs(blobs)
    alone, grouped = (read(running, digests, takes_several=several) for several in (False, True))
    assert not any(each.more for each in alone)
    assert len(grouped) < len(alone)
    for responses in (alone, grouped):
        assembler = FrameAssembler(digests)
        frames = [frame for each in responses for frame in (each.frame, *each.more)]
        assert {digest: bytes(data) for digest, data in filter(None, map(assembler.add, frames))} == blobs
        most_bytes = MIB if responses is alone else 3 * MIB
        assert all(sum(len(frame.data) for frame in (each.frame, *each.more)) <= most_bytes for each in responses)
        assert all(len(frame.data) <= MIB for frame in frames)


def test_blobs_before_a_damaged_one_of_their_group_arrive(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(SMALL, 5).turn(256 * 6)
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
        damaged = turn.digests[3]
        [path] = home.data_dir.rglob(damaged.hash)
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        coming = client.get_blobs(turn.digests)
        assert [next(coming)[0] for _ in range(3)] == turn.digests[:3]
        with pytest.raises(DataLoss) as lost:
            next(coming)
        assert lost.value.metadata["digest"] == damaged.hash
        assert client.find_missing(turn.digests) == [damaged]


class OtherStore(cachestore_pb2_grpc.CacheStoreServiceServicer):
    """A store that keeps blobs, and knows of a newer contract what a test says."""

    def __init__(self, *features: str) -> None:
        self.features = features
        self.blobs: dict[str, bytes] = {}
        self.frames: list[int] = []  # of each message
        self.calls = 0

    def GetCapabilities(self, request: Any, context: Any) -> pb.GetCapabilitiesResponse:  # noqa: N802
        return pb.GetCapabilitiesResponse(features=self.features)

    def FindMissingBlobs(self, request: pb.FindMissingBlobsRequest, context: Any) -> Any:  # noqa: N802
        return pb.FindMissingBlobsResponse(missing=request.digests)

    def WriteBlobs(self, requests: Iterator[pb.WriteBlobsRequest], context: Any) -> Iterator[Any]:  # noqa: N802
        self.calls += 1
        name, names = "", set()
        for request in requests:
            frames = [request.frame, *request.more]
            self.frames.append(len(frames))
            for frame in frames:
                name = frame.digest.hash or name
                names.add(name)
                self.blobs[name] = self.blobs.get(name, b"") + frame.data
        first, *more = [Digest.of(self.blobs[name]).to_proto() for name in names]
        if self.features:
            yield pb.WriteBlobsResponse(digest=first, more=more)
        else:
            yield from (pb.WriteBlobsResponse(digest=digest) for digest in (first, *more))


def put_there(there: OtherStore, put: Callable[[AioStoreClient], Awaitable[Any]]) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    cachestore_pb2_grpc.add_CacheStoreServiceServicer_to_server(there, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    async def connected() -> None:
        async with AioStoreClient.connect(address) as client:
            await put(client)

    try:
        asyncio.run(connected())
    finally:
        server.stop(0)


@pytest.mark.parametrize("features", [(), (SEVERAL,)])
def test_only_a_store_that_takes_several_frames_gets_them(features: tuple[str, ...]) -> None:
    there = OtherStore(*features)
    small, large = SyntheticAgent(SMALL, 6).turn(256 * 40), SyntheticAgent(LARGE, 6).turn(256 * 3)
    blobs = {**small.new_blobs, **large.new_blobs}
    put_there(there, lambda client: client.put_blobs(blobs))
    assert there.blobs == {digest.hash: data for digest, data in blobs.items()}
    assert there.calls == 2  # side by side
    assert (max(there.frames) > 1) == bool(features)


def test_an_engine_sends_blobs_that_are_too_small_to_hand_over_in_two_streams(tmp_path: Path) -> None:
    there = OtherStore(SEVERAL)
    chance = random.Random(1)
    blobs = {Digest.of(data): data for data in (chance.randbytes(300_000) for _ in range(60))}
    put_there(there, lambda client: put_by_files(client, blobs, list(blobs), HandedFiles(tmp_path, "default")))
    assert there.blobs == {digest.hash: data for digest, data in blobs.items()}
    assert there.calls == 2
    assert max(there.frames) > 1


@pytest.mark.long(2)
def test_a_cut_of_two_streams_sends_nothing_again_that_is_finished(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 7).turn(256 * 6)
    total = sum(digest.size_bytes for digest in turn.digests)

    async def put(address: str) -> None:
        async with AioStoreClient.connect(address) as client:
            progress = await client.put_blobs(turn.new_blobs)
            assert (progress.blobs_done, progress.bytes_done) == (len(turn.digests), total)

    with proxy_to(running.address) as proxy:
        proxy.cut_after_sent = total // 2
        asyncio.run(put(proxy.address))
        assert proxy.cuts == 1
        assert proxy.sent_bytes < total + 2 * turn.digests[0].size_bytes
    with running.client() as client:
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)
