"""Blobs over a real wire: cut, stalled, contested, malformed. What is durable is not sent again, and nothing sticks."""

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import AioStoreClient, StoreClient
from kvasir.errors import Conflict, DeadlineExceeded, KvasirError, ResourceExhausted
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FRAME_BYTES, frames_of
from kvasir.status import from_rpc_error

from tests.cachestore.service.proxy import proxy_to
from tests.cachestore.service.running import RunningStore, StoreHome, assert_whole, publish, store_home
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent, full_layers, kv_identity
from tests.running.waiting import eventually

# One block is 7 MB: several frames.
LARGE = kv_identity("large", full_layers(24, 8, 128))
MIB = 1 << 20


def write_raw(address: str, frames: Iterable[pb.BlobFrame]) -> list[pb.WriteBlobsResponse] | KvasirError:
    with grpc.insecure_channel(address) as channel:
        stub: Any = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            return list(stub.WriteBlobs((pb.WriteBlobsRequest(frame=frame) for frame in frames), timeout=30))
        except grpc.RpcError as error:
            return from_rpc_error(error)


@pytest.mark.long(3)
def test_a_cut_upload_goes_on_without_sending_finished_blobs_again(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(TINY, 1).turn(256 * 40)
    total = sum(digest.size_bytes for digest in turn.digests)
    with proxy_to(running.address) as proxy, StoreClient.connect(proxy.address) as client:
        proxy.cut_after_sent = total // 2
        client.put_blobs(turn.new_blobs)
        assert proxy.cuts == 1
        # What was on its way when the cut came may be sent again, nothing else.
        assert proxy.sent_bytes < total * 1.02 + 3 * MIB
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)


@pytest.mark.long(2)
def test_a_cut_inside_a_blob_goes_on_at_its_offset(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 2).turn(256)
    [digest] = turn.digests
    with proxy_to(running.address) as proxy, StoreClient.connect(proxy.address) as client:
        proxy.cut_after_sent = digest.size_bytes - MIB
        client.put_blobs(turn.new_blobs)
        assert proxy.cuts == 1
        assert proxy.sent_bytes < digest.size_bytes + 3 * MIB
        assert client.write_status(digest).is_complete


def test_a_cut_download_goes_on_at_its_offset(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 3).turn(512)
    total = sum(digest.size_bytes for digest in turn.digests)
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
    with proxy_to(running.address) as proxy, StoreClient.connect(proxy.address) as client:
        proxy.cut_after_received = total * 7 // 10  # inside the second blob
        blobs = {digest: bytes(data) for digest, data in client.get_blobs(turn.digests)}
        assert proxy.cuts == 1
        assert proxy.received_bytes < total + 4 * MIB
    assert blobs == dict(turn.new_blobs)


def test_a_store_killed_in_the_middle_of_an_upload_loses_nothing_it_acknowledged(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(TINY, 4).turn(256 * 40)
    done: list[int] = []

    def kill_at_half(progress: pb.TransferProgress) -> None:
        done.append(progress.blobs_done)
        if progress.blobs_done == 20:
            running.kill()

    with running.client(max_cuts=1) as client, pytest.raises(KvasirError):
        client.put_blobs(turn.new_blobs, on_progress=kill_at_half)
    with home.start().client() as client:
        missing = client.find_missing(turn.digests)
        assert len(missing) <= 40 - max(done)
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_upload_goes_on_where_another_store_answers_for_the_one_that_has_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    turn = SyntheticAgent(LARGE, 6).turn(256)
    [digest] = turn.digests
    frames = list(frames_of(digest, turn.new_blobs[digest], pb.BLOB_KIND_TENSORS))
    with store_home(tmp_path / "a") as home, store_home(tmp_path / "b") as other_home:
        running, other = home.start(), other_home.start()
        refusal = write_raw(running.address, frames[:3])
        assert isinstance(refusal, KvasirError)
        with running.client() as client, client if name == "a" else other.client() as sent_to:
            assert client.write_status(digest).received_bytes == 3 * MIB
            status = client.write_status(digest)

            async def answer(*_: object) -> pb.QueryWriteStatusResponse:
                return status

            monkeypatch.setattr(AioStoreClient, "write_status", answer)
            assert sent_to.put_blobs(turn.new_blobs).blobs_done == 1
            assert sent_to.find_missing(turn.digests) == []


def test_a_sender_that_stops_in_the_middle_is_given_up_and_its_blob_is_free_again(home: StoreHome) -> None:
    running = home.start("--stall-timeout-s", "1")
    turn = SyntheticAgent(LARGE, 5).turn(256)
    [digest] = turn.digests
    frames = list(frames_of(digest, turn.new_blobs[digest], pb.BLOB_KIND_TENSORS))
    forever = threading.Event()

    def half() -> Iterable[pb.BlobFrame]:
        yield from frames[:3]
        forever.wait(20)

    began = time.monotonic()
    refusal = write_raw(running.address, half())
    forever.set()
    assert isinstance(refusal, KvasirError)
    assert refusal.reason == "SENDER_STALLED"
    assert time.monotonic() - began < 10
    with running.client() as client:
        assert client.write_status(digest).received_bytes == 3 * MIB
        client.put_blobs(turn.new_blobs)
        assert client.write_status(digest).is_complete


def test_a_client_that_vanishes_leaves_its_part_for_the_next(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 6).turn(256)
    [digest] = turn.digests
    frames = list(frames_of(digest, turn.new_blobs[digest], pb.BLOB_KIND_TENSORS))
    with grpc.insecure_channel(running.address) as channel:
        stub: Any = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
        sent = threading.Event()

        def some() -> Iterable[pb.WriteBlobsRequest]:
            for frame in frames[:4]:
                yield pb.WriteBlobsRequest(frame=frame)
            time.sleep(0.5)
            sent.set()
            time.sleep(20)

        call = stub.WriteBlobs(some())
        sent.wait(60)
        call.cancel()
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
        assert bytes(client.get_blob(digest)) == turn.new_blobs[digest]


def _digest_and_frames(data: bytes) -> tuple[Digest, list[pb.BlobFrame]]:
    return Digest.of(data), list(frames_of(Digest.of(data), data, pb.BLOB_KIND_TENSORS))


def test_malformed_streams_are_refused_and_named_and_the_next_write_works(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 7).turn(256)
    [digest] = turn.digests
    data = turn.new_blobs[digest]
    frames = list(frames_of(digest, data, pb.BLOB_KIND_TENSORS))
    first, second = frames[0], frames[1]
    name, tensors = digest.to_proto(), pb.BLOB_KIND_TENSORS
    flipped = bytearray(data)
    flipped[-1] ^= 1
    garbage, garbage_frames = _digest_and_frames(b"\xff" * 5000)
    cases: dict[str, tuple[list[pb.BlobFrame], str]] = {
        "no digest first": ([second], "frame.digest"),
        "digest malformed": ([pb.BlobFrame(digest=pb.BlobFrame().digest, data=b"x")], "frame.digest"),
        "no kind": ([pb.BlobFrame(digest=name, data=b"x")], "frame.kind"),
        "unknown kind": ([pb.BlobFrame(digest=name, kind=9, data=b"x")], "frame.kind"),  # type: ignore[arg-type]
        "begins in the middle": (
            [pb.BlobFrame(digest=name, kind=tensors, offset=5, data=b"x")], "frame.offset"
        ),
        "negative offset": ([pb.BlobFrame(digest=name, kind=tensors, offset=-1, data=b"x")], "frame.offset"),
        "a frame twice": ([first, first], "frame.data"),
        "a gap": ([first, frames[2]], "frame.offset"),
        "a frame too large": (
            [pb.BlobFrame(digest=name, kind=tensors, data=data[: FRAME_BYTES + 1])], "frame.data"
        ),
        "other bytes": (list(frames_of(digest, bytes(flipped), tensors)), "data"),
        "no tensor file": (garbage_frames, ""),
        "the next blob begins too early": ([first, *garbage_frames], "frame.data"),
        "ends too early": (frames[:2], "frame.data"),
    }  # fmt: skip
    for case, (sent, field) in cases.items():
        refusal = write_raw(running.address, sent)
        assert isinstance(refusal, KvasirError), case
        assert type(refusal).__name__ == "InvalidArgument", (case, refusal)
        if field:
            assert refusal.field == field, (case, refusal.field, refusal.message)
    with running.client() as client:
        assert client.find_missing([digest, garbage]) == [digest, garbage]
        client.put_blobs(turn.new_blobs)
        assert bytes(client.get_blob(digest)) == data


def test_one_bad_blob_among_many_is_refused_and_no_other_is_harmed(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(TINY, 17).turn(256 * 60)
    bad = turn.digests[30]
    flipped = bytearray(turn.new_blobs[bad])
    flipped[-1] ^= 1
    sent = {digest: bytes(flipped) if digest == bad else data for digest, data in turn.new_blobs.items()}
    frames = [frame for digest, data in sent.items() for frame in frames_of(digest, data, pb.BLOB_KIND_TENSORS)]
    refusal = write_raw(running.address, frames)
    assert isinstance(refusal, KvasirError)
    assert (refusal.reason, refusal.metadata["digest"]) == ("DIGEST_MISMATCH", bad.hash)
    with running.client() as client:
        assert bad in client.find_missing(turn.digests)
        client.put_blobs(turn.new_blobs)
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)


def test_bytes_after_a_blobs_end_are_refused_but_the_blob_stays(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 15).turn(256)
    [digest] = turn.digests
    frames = list(frames_of(digest, turn.new_blobs[digest], pb.BLOB_KIND_TENSORS))
    refusal = write_raw(running.address, [*frames, pb.BlobFrame(offset=digest.size_bytes, data=b"x")])
    assert isinstance(refusal, KvasirError)
    assert refusal.field == "frame.digest"
    with running.client() as client:
        assert client.find_missing([digest]) == []
    other = SyntheticAgent(LARGE, 16).turn(256)
    [digest] = other.digests
    frames = list(frames_of(digest, other.new_blobs[digest], pb.BLOB_KIND_TENSORS))
    longer = [*frames[:-1], pb.BlobFrame(offset=frames[-1].offset, data=frames[-1].data + b"x")]
    refusal = write_raw(running.address, longer)
    assert isinstance(refusal, KvasirError)
    assert refusal.reason == "DIGEST_MISMATCH"


def test_an_empty_first_frame_asks_whether_a_blob_is_there(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(SMALL, 8).turn(512)
    here, absent = turn.digests
    with running.client() as client:
        client.put_blobs({here: turn.new_blobs[here]})
    asked = [pb.BlobFrame(digest=d.to_proto(), kind=pb.BLOB_KIND_TENSORS) for d in (here, absent)]
    answers = write_raw(running.address, asked)
    assert isinstance(answers, list)
    assert [(each.digest.hash, each.existed) for each in answers] == [(here.hash, True)]


def test_a_blob_that_is_there_is_acknowledged_and_its_frames_are_skipped(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 9).turn(256)
    [digest] = turn.digests
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
    answers = write_raw(running.address, frames_of(digest, turn.new_blobs[digest], pb.BLOB_KIND_TENSORS))
    assert isinstance(answers, list)
    assert [each.existed for each in answers] == [True]


def test_two_clients_with_the_same_blobs_both_succeed(home: StoreHome) -> None:
    running = home.start()
    turn = SyntheticAgent(LARGE, 10).turn(256 * 3)
    with ThreadPoolExecutor(4) as pool:

        def put(_: int) -> int:
            with running.client() as client:
                return client.put_blobs(turn.new_blobs).blobs_done

        assert list(pool.map(put, range(4))) == [3] * 4
    with running.client() as client:
        publish(client, "ada", turn, 0)
        assert_whole(client, "ada", turn)


@pytest.mark.long(3)
def test_eight_writers_on_one_line_make_one_version_each_time(home: StoreHome) -> None:
    running = home.start()
    rounds, writers = 6, 8
    heads: set[tuple[int, str]] = set()
    turns = [[SyntheticAgent(SMALL, 100 * r + w).turn(300) for w in range(writers)] for r in range(rounds)]

    def contend(writer: int, parent: int, barrier: threading.Barrier) -> int | None:
        turn = turns[parent][writer]
        with running.client() as client:
            client.put_blobs(turn.new_blobs)
            client.put_manifest(turn.manifest_bytes)
            barrier.wait(30)
            try:
                return client.commit("ada", turn.manifest_digest, parent).version
            except Conflict as error:
                heads.add((parent, error.metadata["head_version"]))
                return None

    with ThreadPoolExecutor(writers) as pool, running.client() as client:
        for parent in range(rounds):
            barrier = threading.Barrier(writers)
            made = list(pool.map(contend, range(writers), itertools.repeat(parent), itertools.repeat(barrier)))
            assert sorted(version for version in made if version) == [parent + 1]
            assert_whole(client, "ada", turns[parent][next(w for w, version in enumerate(made) if version)])
    assert heads == {(parent, str(parent + 1)) for parent in range(rounds)}


def test_a_full_quota_is_reported_with_numbers_and_the_next_operation_works(home: StoreHome) -> None:
    running = home.start("--quota-bytes", str(2 * MIB))
    turn = SyntheticAgent(TINY, 11).turn(256 * 40)
    with running.client() as client:
        with pytest.raises(ResourceExhausted) as caught:
            client.put_blobs(turn.new_blobs)
        assert caught.value.reason == "QUOTA_FULL"
        assert any(character.isdigit() for character in caught.value.message)
        stats = client.get_stats()
        assert stats.blob_bytes + stats.reserved_bytes <= 2 * MIB


@pytest.mark.long(9)
def test_readers_that_do_not_read_hold_little_memory_and_are_given_up(home: StoreHome) -> None:
    running = home.start("--read-buffer-bytes", str(16 * MIB), "--stall-timeout-s", "1")
    turn = SyntheticAgent(LARGE, 12).turn(256 * 8)
    total = sum(digest.size_bytes for digest in turn.digests)
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
        assert [digest for digest, _ in client.get_blobs(turn.digests)] == turn.digests
    before = running.memory_bytes()
    request = pb.ReadBlobsRequest(digests=[digest.to_proto() for digest in turn.digests])
    channels = [grpc.insecure_channel(running.address, [("k", n)]) for n in range(12)]
    try:
        calls = []
        for channel in channels:
            stub: Any = cachestore_pb2_grpc.CacheStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            calls.append(stub.ReadBlobs(request))
        peak = 0
        for _ in range(20):
            time.sleep(0.1)
            peak = max(peak, running.memory_bytes())
        # 12 readers, 56 MB each: unbounded this is 670 MB.
        assert peak - before < 200 * MIB, (peak - before) / MIB
        with running.client() as client:
            assert client.get_stats().blob_count == 8
        time.sleep(1)
        stalled = from_rpc_error(_end_of(calls[0]))
        assert stalled.reason == "READER_STALLED"
        with running.client() as client:
            eventually(lambda: read_bytes(client, turn.digests) == total, 60)
    finally:
        for channel in channels:
            channel.close()


def read_bytes(client: StoreClient, digests: Sequence[Digest]) -> int:
    """0 where it was given up, too: on a busy machine any reader may take nothing for a second."""
    try:
        return sum(len(data) for _, data in client.get_blobs(digests))
    except DeadlineExceeded:
        return 0


class ForgottenClient(AioStoreClient):
    """The store collects garbage between its answer and what is sent on it."""

    async def write_status(self, digest: Digest) -> pb.QueryWriteStatusResponse:
        status = await super().write_status(digest)
        if status.received_bytes:
            await self.collect_garbage()
        return status


async def test_an_upload_begins_again_when_the_store_gave_up_what_had_arrived(home: StoreHome) -> None:
    running = home.start("--grace-period-s", "0")
    turn = SyntheticAgent(LARGE, 15).turn(256)
    [(digest, data)] = turn.new_blobs.items()
    refused = write_raw(running.address, itertools.islice(frames_of(digest, data, pb.BLOB_KIND_TENSORS, 0), 2))
    assert isinstance(refused, KvasirError)
    async with ForgottenClient.connect(running.address) as client:
        assert (await AioStoreClient.write_status(client, digest)).received_bytes == 2 * MIB
        await client.put_blobs(turn.new_blobs)
        assert bytes(await client.get_blob(digest)) == data


def _end_of(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    return caught.value


@pytest.mark.long(2)
def test_a_slow_reader_gets_everything(home: StoreHome) -> None:
    running = home.start("--read-buffer-bytes", str(16 * MIB))
    turn = SyntheticAgent(LARGE, 13).turn(256 * 3)
    with running.client() as client:
        client.put_blobs(turn.new_blobs)
        seen = []
        for digest, data in client.get_blobs(turn.digests):
            time.sleep(0.3)
            seen.append((digest, bytes(data)))
    assert dict(seen) == dict(turn.new_blobs)


def test_leaving_a_read_early_frees_the_store(shared_store: RunningStore) -> None:
    turn = SyntheticAgent(LARGE, 14).turn(256 * 3)
    with shared_store.client() as client:
        client.put_blobs(turn.new_blobs)
        for _ in range(20):
            blobs = client.get_blobs(turn.digests)
            next(blobs)
            blobs.close()
        assert [digest for digest, _ in client.get_blobs(turn.digests)] == turn.digests
