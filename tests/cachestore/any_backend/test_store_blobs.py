"""Blobs: what is written is verified while it arrives, and what is read is the digest's bytes or nothing."""

import random
import threading
import time
from typing import Any

import pytest
from kvasir.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from kvasir.formats.block_file import encode, parse_header
from kvasir.formats.digest import Digest
from kvasir.formats.tensor_layouts import TensorSpec

from cachestore_svc.blobs.blob_writer import BlobWriter, NewBlob, PartWriter, finish_all
from cachestore_svc.facts.records import BlobDamaged, BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Clock, Lab, damaged, publish, write
from tests.made_models.synthetic import SMALL, TINY, SyntheticAgent

TENSORS = BlobKind.TENSORS


def a_block(seed: int = 1) -> tuple[Digest, bytes]:
    return next(iter(SyntheticAgent(SMALL, seed).turn(256).new_blobs.items()))


def test_what_was_written_is_read_back_and_no_longer_missing(store: Store) -> None:
    digest, data = a_block()
    assert store.blobs.find_missing(NS, [digest]) == [digest]
    write(store, digest, data, TENSORS, frame=1000)
    assert store.blobs.find_missing(NS, [digest]) == []
    assert bytes(store.blobs.read(NS, digest)) == data
    assert store.blobs.write_status(NS, digest).is_complete


def test_a_blob_that_is_stored_takes_no_bytes(store: Store) -> None:
    digest, data = a_block()
    write(store, digest, data, TENSORS)
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        assert writer.is_stored
        assert writer.received_bytes == len(data)
        writer.finish()


def test_an_interrupted_write_goes_on_where_it_stopped(store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        writer.write(0, data[:5000])
    assert store.blobs.write_status(NS, digest).received_bytes == 5000
    assert not store.blobs.write_status(NS, digest).is_complete
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        assert writer.received_bytes == 5000
        writer.write(5000, data[5000:])
        writer.finish()
    assert bytes(store.blobs.read(NS, digest)) == data


def test_a_blob_that_comes_whole_has_no_bytes_of_an_interrupted_write(store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        writer.write(0, data[:4999] + bytes((data[4999] ^ 1,)))
    [opened] = store.blobs.open_writers(NS, [NewBlob(digest, TENSORS, comes_whole=True)])
    assert isinstance(opened, PartWriter)
    assert opened.received_bytes == 0
    with opened:
        opened.write(0, data)
        opened.finish()
    assert bytes(store.blobs.read(NS, digest)) == data
    assert store.statistics.of(NS).reserved_bytes == 0


def test_bytes_that_are_not_the_digests_are_refused_and_not_kept(lab: Lab, store: Store) -> None:
    digest, data = a_block()
    wrong = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(InvalidArgument, match="do not match") as refused:
        write(store, digest, wrong, TENSORS)
    assert refused.value.reason == "DIGEST_MISMATCH"
    assert not lab.part_hashes
    assert store.statistics.of(NS).reserved_bytes == 0
    write(store, digest, data, TENSORS)


def test_a_part_that_went_bad_between_two_writes_is_refused(lab: Lab, store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        writer.write(0, data[:5000])
    assert lab.part_hashes == [digest.hash]
    part = lab.blobs.of(NS).begin(digest.hash)
    assert b"".join(part.pieces()) == data[:5000]
    part.append(b"\x00")
    part.close()
    with pytest.raises(InvalidArgument, match="do not match"):
        write(store, digest, data, TENSORS)
    write(store, digest, data, TENSORS)


def test_an_offset_that_is_not_the_next_is_refused(store: Store) -> None:
    digest, data = a_block()
    for offset in (1, 999, 4096):
        with store.blobs.open_writer(NS, digest, TENSORS) as writer:
            with pytest.raises(InvalidArgument, match="expected 0"):
                writer.write(offset, data[offset:])


def test_more_bytes_than_the_digest_says_are_refused(lab: Lab, store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        with pytest.raises(InvalidArgument, match="more than its digest has"):
            writer.write(0, data + b"x")
    assert not lab.part_hashes


def test_fewer_bytes_are_not_a_blob_but_stay_for_resumption(store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        writer.write(0, data[:-1])
        with pytest.raises(InvalidArgument) as refused:
            writer.finish()
        assert refused.value.reason == "BYTES_MISSING"
    assert store.blobs.write_status(NS, digest).received_bytes == len(data) - 1


def test_a_bad_header_is_refused_before_the_bytes_after_it_are_kept(lab: Lab, store: Store) -> None:
    _, data = a_block()
    bad = data.replace(b'"kind":"block"', b'"kind":"blobs"')
    bad = bad.replace(b'\\"kind\\":\\"block\\"', b'\\"kind\\":\\"blobs\\"')
    assert bad != data
    with store.blobs.open_writer(NS, Digest.of(bad), TENSORS) as writer:
        with pytest.raises(InvalidArgument) as refused:
            writer.write(0, bad[:6000])
        assert refused.value.reason == "HEADER_REFUSED"
    assert not lab.part_hashes
    assert store.blobs.write_status(NS, Digest.of(bad)).received_bytes == 0


def test_a_header_that_arrives_in_drops_is_checked_too(store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        for start in range(0, 3000, 100):
            writer.write(start, data[start : start + 100])
        writer.write(3000, data[3000:])
        writer.finish()
    assert bytes(store.blobs.read(NS, digest)) == data


def test_what_is_no_tensor_file_is_refused(store: Store) -> None:
    for data in (b"", b"\x00" * 7, b"not a tensor file" * 9, random.Random(0).randbytes(300)):
        with pytest.raises(InvalidArgument, match="tensor header"):
            write(store, Digest.of(data), data, TENSORS)


def test_what_is_no_manifest_is_refused(store: Store) -> None:
    for data in (b"", b"\xff\xff\xff", b"\x08\x02"):
        with pytest.raises(InvalidArgument) as refused:
            write(store, Digest.of(data), data, BlobKind.MANIFEST)
        assert refused.value.reason == "MANIFEST_REFUSED"


def test_a_tensor_name_outside_the_schema_never_gets_in(store: Store) -> None:
    snapshot = SyntheticAgent(SMALL, 1).turn(256)

    data = next(iter(snapshot.new_blobs.values()))
    identity = parse_header(data, len(data)).identity
    evil = encode(identity, [(TensorSpec("../../etc/passwd", "F16", (1, 256, 64)), bytes(2 * 256 * 64))])
    with pytest.raises(InvalidArgument, match="tensor name"):
        write(store, Digest.of(evil), evil, TENSORS)


def test_a_blob_has_one_writer_at_a_time(store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS):
        with pytest.raises(FailedPrecondition) as refused:
            store.blobs.open_writer(NS, digest, TENSORS)
        assert refused.value.reason == "WRITE_IN_PROGRESS"
    write(store, digest, data, TENSORS)


def test_a_blob_that_another_lists_between_look_up_and_begin_takes_no_bytes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, data = a_block()
    writers = store._core.writers
    begin = writers.begin

    def begin_late(*given: Any) -> Any:
        monkeypatch.undo()
        write(store, digest, data, TENSORS)
        return begin(*given)

    monkeypatch.setattr(writers, "begin", begin_late)
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        assert (writer.is_stored, writer.received_bytes) == (True, len(data))
    assert bytes(store.blobs.read(NS, digest)) == data
    assert store.statistics.of(NS).blob_bytes == len(data)


def test_a_writer_that_ended_takes_nothing_more(store: Store) -> None:
    digest, data = a_block()
    with store.blobs.open_writer(NS, digest, TENSORS) as writer:
        writer.write(0, data)
        writer.finish()
        with pytest.raises(FailedPrecondition):
            writer.write(len(data), b"x")


def test_a_blob_too_large_is_refused_before_a_byte_is_written(lab: Lab) -> None:
    with lab.open(max_blob_bytes=10_000) as store:
        with pytest.raises(InvalidArgument, match="at most 10000") as refused:
            store.blobs.open_writer(NS, Digest("0" * 64, 10_001), TENSORS)
        assert refused.value.reason == "BLOB_TOO_LARGE"
        assert not lab.part_hashes


def test_a_digest_with_another_size_is_another_digest(store: Store) -> None:
    digest, data = a_block()
    write(store, digest, data, TENSORS)
    lie = Digest(digest.hash, digest.size_bytes + 1)
    assert store.blobs.find_missing(NS, [lie]) == [lie]
    assert store.blobs.find_missing(NS, [lie, digest]) == store.blobs.find_missing(NS, [digest, lie]) == [lie]
    with pytest.raises(NotFound):
        store.blobs.read(NS, lie)


def damaged_bytes(data: bytes, how: str, chance: random.Random) -> bytes:
    damaged_data = bytearray(data)
    match how:
        case "flip":
            damaged_data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case "cut":
            del damaged_data[chance.randrange(len(data)) :]
        case "extend":
            damaged_data += b"\x00"
    return bytes(damaged_data)


@pytest.mark.parametrize("how", ["flip", "cut", "extend", "remove"])
def test_a_damaged_blob_is_named_once_never_served_and_may_be_written_again(lab: Lab, store: Store, how: str) -> None:
    digest, data = a_block()
    other, other_data = a_block(2)
    write(store, digest, data, TENSORS)
    write(store, other, other_data, TENSORS)
    start = store.events.after(NS, None).cursor
    if how == "remove":
        lab.blobs.of(NS).remove(digest.hash)
    else:
        lab.overwrite(digest, damaged_bytes(data, how, random.Random(3)))
    for _ in range(3):
        with pytest.raises(DataLoss) as lost:
            store.blobs.read(NS, digest)
        assert lost.value.metadata == {"digest": digest.hash}
    assert damaged(store, NS) == [digest]
    assert [event.body for event in store.events.after(NS, start).events] == [BlobDamaged(digest)]
    assert store.blobs.find_missing(NS, [digest, other]) == [digest]
    assert bytes(store.blobs.read(NS, other)) == other_data
    stored = store.statistics.of(NS).blob_bytes
    write(store, digest, data, TENSORS)
    assert bytes(store.blobs.read(NS, digest)) == data
    assert damaged(store, NS) == []
    assert store.statistics.of(NS).blob_bytes == stored


def test_a_damaged_blob_written_again_rests_again(lab: Lab) -> None:
    digest, data = a_block()
    with lab.open(grace_period_s=100.0) as store:
        write(store, digest, data, TENSORS)
        store.care.collect_garbage()
        lab.clock.pass_s(200)
        lab.overwrite(digest, bytes(len(data)))
        with pytest.raises(DataLoss):
            store.blobs.read(NS, digest)
        write(store, digest, data, TENSORS)
        assert store.care.collect_garbage().blobs_swept == 0
        assert bytes(store.blobs.read(NS, digest)) == data
        lab.clock.pass_s(200)
        assert store.care.collect_garbage().blobs_swept == 1


@pytest.mark.parametrize("is_tight", [False, True])
def test_going_on_with_a_blob_near_the_quota_keeps_what_had_arrived(lab: Lab, is_tight: bool) -> None:
    digest, data = a_block()
    [(other, other_data)] = SyntheticAgent(SMALL, 2).turn(64).new_blobs.items()
    half, other_half = len(data) // 2, len(other_data) // 2
    with lab.open(quota_bytes=len(data) + (0 if is_tight else other_half)) as store:
        with store.blobs.open_writer(NS, digest, TENSORS) as writer:
            writer.write(0, data[:half])
        with store.blobs.open_writer(NS, other, TENSORS) as writer:
            writer.write(0, other_data[:other_half])
        # Where its rest does not fit, another's part goes; its own does not.
        with store.blobs.open_writer(NS, digest, TENSORS) as writer:
            assert writer.received_bytes == half
            writer.write(half, data[half:])
            writer.finish()
        assert bytes(store.blobs.read(NS, digest)) == data
        assert store.blobs.write_status(NS, other).received_bytes == (0 if is_tight else other_half)


def test_of_blobs_that_are_begun_together_each_is_refused_by_itself(lab: Lab) -> None:
    blobs = dict(a_block(seed) for seed in range(4))
    first, *others = blobs
    with lab.open(quota_bytes=2 * first.size_bytes) as store:
        writers = store.blobs.open_writers(NS, [NewBlob(digest, TENSORS) for digest in (first, *blobs)])
        again = writers[1]
        assert isinstance(again, FailedPrecondition)
        assert again.reason == "WRITE_IN_PROGRESS"
        opened = [each for each in writers if isinstance(each, PartWriter)]
        assert [writer.digest for writer in opened] == [first, others[0]]
        assert [each.reason for each in writers[3:] if isinstance(each, ResourceExhausted)] == ["QUOTA_FULL"] * 2
        assert store.statistics.of(NS).reserved_bytes == 2 * first.size_bytes
        for writer in opened:
            writer.write(0, blobs[writer.digest])
        assert finish_all(opened) == [None, None]
        assert store.blobs.find_missing(NS, list(blobs)) == others[1:]
        assert store.statistics.of(NS).reserved_bytes == 0


class HookedClock(Clock):
    """Does something once, when a caller's thread asks it for the `left`th time from then on."""

    left = 0

    def __call__(self) -> float:
        self.left -= threading.current_thread() is threading.main_thread()
        if self.left == 0:
            self.act()
        return super().__call__()

    def act(self) -> None: ...


def test_room_is_made_for_a_group_whose_room_another_sender_took(lab: Lab) -> None:
    """Between the look for room and the reservation, which are further apart the more blobs begin together."""
    left, first, second, others = [a_block(seed) for seed in range(4)]
    lab.clock = clock = HookedClock()
    size_bytes = left[0].size_bytes
    with lab.open(quota_bytes=3 * size_bytes, write_budget_bytes=1 << 40, write_budget_over="refuse") as store:
        with store.blobs.open_writer(NS, left[0], TENSORS) as writer:
            writer.write(0, left[1][:-1])
        taken: list[BlobWriter] = []
        clock.act = lambda: taken.append(store.blobs.open_writer(NS, others[0], TENSORS))  # type: ignore[method-assign]
        clock.left = 2  # the first tells how long what is stored stays
        writers = store.blobs.open_writers(NS, [NewBlob(digest, TENSORS) for digest, _ in (first, second)])
        assert taken, "another sender came"
        assert [each for each in writers if isinstance(each, Exception)] == []
        assert store.blobs.write_status(NS, left[0]).received_bytes == 0, "what was interrupted made room"
        for each in (*writers, *taken):
            assert not isinstance(each, Exception)
            each.abandon()
        assert store.statistics.of(NS).reserved_bytes == 0


def test_the_disk_reserve_is_kept(lab: Lab) -> None:
    digest, data = a_block()
    with lab.open(free_disk_reserve_bytes=1 << 60) as store:
        with pytest.raises(ResourceExhausted, match="free") as refused:
            write(store, digest, data, TENSORS)
        assert refused.value.reason == "DISK_FULL"
        assert refused.value.retry_after_s
        assert store.statistics.of(NS).reserved_bytes == 0


def test_find_missing_of_1000_digests_takes_at_most_10_ms_of_cpu(store: Store) -> None:

    snapshot = SyntheticAgent(TINY, 1).turn(300)
    publish(store, "a", snapshot, 0)
    asked = [*snapshot.digests, *(Digest(f"{n:064x}", 100) for n in range(998))]
    store.blobs.find_missing(NS, asked)
    times = []
    for _ in range(20):
        began = time.process_time()
        assert len(store.blobs.find_missing(NS, asked)) == 998
        times.append(time.process_time() - began)
    assert min(times) < 0.010
