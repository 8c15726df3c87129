"""Blobs on their way in: what overlaps, what is bounded, and what a sender leaves that goes away at a bad moment."""

import asyncio
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from kvasir.errors import InvalidArgument, ResourceExhausted
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import Disk, StrPath
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.moving import inbound
from cachestore_svc.moving.inbound import BlobIntake, Stored
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, write
from tests.made_models.synthetic import SMALL, SyntheticAgent, full_layers, kv_identity


class WaitingDisk(Disk):
    """Opens a part, or syncs it, only when it is told to."""

    def __init__(self, waits_at: str) -> None:
        self.waits_at = waits_at
        self.arrived = threading.Event()
        self.go_on = threading.Event()

    def _wait(self, point: str) -> None:
        if point == self.waits_at and not self.go_on.is_set():
            self.arrived.set()
            assert self.go_on.wait(20)

    def open_append(self, path: StrPath) -> int:
        if str(path).endswith(".part"):
            self._wait("open")
        return super().open_append(path)

    def fsync(self, descriptor: int) -> None:
        if threading.current_thread().name.startswith("store"):
            self._wait("sync")
        super().fsync(descriptor)


@pytest.mark.parametrize("point", ["open", "sync"])
async def test_a_sender_cancelled_while_its_blob_is_opened_or_synced_leaves_no_writer(
    point: str, tmp_path: Path
) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(256)
    [(digest, data)] = turn.new_blobs.items()
    disk = WaitingDisk(point)
    threads = StoreThreads(4)

    async def send(intake: BlobIntake) -> None:
        async with intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data)
            await intake.end()

    with Lab(tmp_path / "data").open(disk) as store:
        sending = asyncio.create_task(send(BlobIntake(AioStore(store, threads), NS)))
        await asyncio.to_thread(disk.arrived.wait, 20)
        sending.cancel()
        await asyncio.sleep(0.05)
        assert not sending.done(), "the thread still uses the writer"
        disk.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        again = BlobIntake(AioStore(store, threads), NS)
        await asyncio.wait_for(send(again), 20)
        outcome = again.outcomes.get_nowait()
        assert isinstance(outcome, Stored), outcome
        assert bytes(store.blobs.read(NS, digest)) == data
    threads.close()


async def test_a_sender_cancelled_while_its_whole_blob_waits_behind_others_leaves_no_writer(tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(256)
    [(digest, data)] = turn.new_blobs.items()
    threads = StoreThreads(4)
    half = len(data) // 2

    async def send(intake: BlobIntake) -> None:
        async with intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data[:half])
            await intake.write(half, data[half:])
            await intake.end()

    with Lab(tmp_path / "data").open() as store:
        full = BlobIntake(AioStore(store, threads), NS)
        waits = asyncio.Event()

        class NoRoom(asyncio.Semaphore):
            async def acquire(self) -> Literal[True]:
                waits.set()
                return await super().acquire()

        full._room = NoRoom(0)
        sending = asyncio.create_task(send(full))
        await waits.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        again = BlobIntake(AioStore(store, threads), NS)
        await asyncio.wait_for(send(again), 20)
        outcome = again.outcomes.get_nowait()
        assert isinstance(outcome, Stored), outcome
    threads.close()


async def test_a_sender_cancelled_twice_leaves_no_writer_of_a_blob_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads its outcomes, so that the blob waits; and the one behind it is being opened."""
    monkeypatch.setattr(inbound, "_MAX_OUTCOMES", 4)
    blobs = list(SyntheticAgent(SMALL, 1).turn(256 * 7).new_blobs.items())
    disk, threads = WaitingDisk(""), StoreThreads(4)

    async def send(intake: BlobIntake, digest: Digest, data: bytes) -> None:
        half = len(data) // 2
        await intake.begin(digest, BlobKind.TENSORS, 0, data[:half])
        await intake.write(half, data[half:])

    async def send_all(intake: BlobIntake) -> None:
        async with intake:
            for blob in blobs[:5]:
                await send(intake, *blob)
            while intake._writing or intake._whole or not intake.outcomes.full():  # noqa: ASYNC110  its tasks' work
                await asyncio.sleep(0.01)
            await send(intake, *blobs[5])
            while not intake._whole:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            disk.waits_at = "open"
            await send(intake, *blobs[6])
            await asyncio.Event().wait()  # as for a sender that sends nothing more

    with Lab(tmp_path / "data").open(disk) as store:
        sending = asyncio.create_task(send_all(BlobIntake(AioStore(store, threads), NS)))
        await asyncio.to_thread(disk.arrived.wait, 20)
        for _ in range(2):
            sending.cancel()
            await asyncio.sleep(0.05)
        disk.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        async with BlobIntake(AioStore(store, threads), NS) as again:
            await send(again, *blobs[5])
            await asyncio.wait_for(again.end(), 20)
            outcome = again.outcomes.get_nowait()
        assert isinstance(outcome, Stored), outcome
    threads.close()


@pytest.mark.parametrize("cut", [1, 3, 100])
async def test_a_manifest_that_comes_in_pieces_is_made_durable_with_the_blob_behind_it(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, threads, groups = SyntheticAgent(SMALL, 1).turn(300), StoreThreads(4), list[int]()
    finish_all = inbound.finish_all
    monkeypatch.setattr(inbound, "finish_all", lambda some: (groups.append(len(some)), finish_all(some))[1])
    monkeypatch.setattr(inbound, "_ENOUGH_BYTES", 1)  # for a group by itself
    monkeypatch.setattr(inbound, "_COMPANY_S", 60)
    manifest, [(digest, data), *_] = turn.manifest_bytes, turn.new_blobs.items()
    with Lab(tmp_path / "data").open() as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            await intake.begin(turn.manifest_digest, BlobKind.MANIFEST, 0, manifest[:cut])
            for at in range(cut, len(manifest), cut if cut == 100 else len(manifest)):
                await intake.write(at, manifest[at : at + (cut if cut == 100 else len(manifest))])
            for _ in range(10):  # what would begin without the blob does so now
                await asyncio.sleep(0)
            await intake.begin(digest, BlobKind.TENSORS, 0, data)
            await asyncio.wait_for(intake.end(), 20)
            assert intake._held_bytes == 0
        found = [intake.outcomes.get_nowait() for _ in range(2)]
        assert {each.digest for each in found if isinstance(each, Stored)} == {turn.manifest_digest, digest}
        assert bytes(store.blobs.read(NS, turn.manifest_digest)) == manifest
        assert cut == 100 or groups == [2], "many pieces are written as they come"
    threads.close()


async def test_a_manifest_whose_sender_leaves_in_its_middle_goes_on_where_it_ended(tmp_path: Path) -> None:
    turn, threads = SyntheticAgent(SMALL, 1).turn(300), StoreThreads(4)
    manifest, digest = turn.manifest_bytes, turn.manifest_digest
    with Lab(tmp_path / "data").open() as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            await intake.begin(digest, BlobKind.MANIFEST, 0, manifest[:100])
            await intake.write(100, manifest[100:150])
            with pytest.raises(InvalidArgument) as refused:
                await intake.end()
            assert refused.value.metadata["received_bytes"] == "150"
        assert store.blobs.write_status(NS, digest).received_bytes == 150
        async with BlobIntake(AioStore(store, threads), NS) as again:
            await again.begin(digest, BlobKind.MANIFEST, 150, manifest[150:])
            await asyncio.wait_for(again.end(), 20)
        assert bytes(store.blobs.read(NS, digest)) == manifest
    threads.close()


@pytest.mark.parametrize("wrong", ["too many bytes", "other bytes"])
async def test_a_manifest_in_pieces_that_is_another_is_refused(wrong: str, tmp_path: Path) -> None:
    turn, threads = SyntheticAgent(SMALL, 1).turn(300), StoreThreads(4)
    manifest, digest = turn.manifest_bytes, turn.manifest_digest
    rest = manifest[100:] + b"x" if wrong == "too many bytes" else bytes(reversed(manifest[100:]))
    with Lab(tmp_path / "data").open() as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            await intake.begin(digest, BlobKind.MANIFEST, 0, manifest[:100])
            await intake.write(100, rest)
            await asyncio.wait_for(intake.end(), 20)
            assert getattr(intake.outcomes.get_nowait(), "reason", "") == "DIGEST_MISMATCH"
            assert intake._held_bytes == 0
        assert store.blobs.find_missing(NS, [digest]) == [digest]
    threads.close()


async def test_too_many_bytes_of_a_manifest_are_refused_beside_a_full_room(tmp_path: Path) -> None:
    """No other bytes would end the wait for room."""
    digest, threads, piece = Digest.of(bytes(4 << 20)), StoreThreads(4), bytes(1 << 20)
    with Lab(tmp_path / "data").open() as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake, asyncio.timeout(20):
            await intake.begin(digest, BlobKind.MANIFEST, 0, piece)
            for at in range(1 << 20, 3 << 20, 1 << 20):
                await intake.write(at, piece)
            await intake.write(3 << 20, piece[:-1])
            await intake.write((4 << 20) - 1, piece)
            await intake.end()
            assert getattr(intake.outcomes.get_nowait(), "reason", "") == "MANIFEST_REFUSED"
            assert intake._held_bytes == 0
    threads.close()


LARGE = kv_identity("large", full_layers(24, 8, 128))  # a block has 7 MB
MIB = 1 << 20


def pieces(data: bytes) -> list[tuple[int, bytes]]:
    return [(start, data[start : start + MIB]) for start in range(0, len(data), MIB)]


async def test_frames_are_taken_while_the_disk_writes_but_only_a_few_mebibytes(tmp_path: Path) -> None:
    [(digest, data)] = SyntheticAgent(LARGE, 1).turn(256).new_blobs.items()
    disk = WaitingDisk("open")
    threads = StoreThreads(4)
    taken: list[int] = []

    async def send(intake: BlobIntake) -> None:
        async with intake:
            for offset, piece in pieces(data):
                if offset:
                    await intake.write(offset, piece)
                else:
                    await intake.begin(digest, BlobKind.TENSORS, 0, piece)
                taken.append(offset)
            await intake.end()

    with Lab(tmp_path / "data").open(disk) as store:
        intake = BlobIntake(AioStore(store, threads), NS)
        sending = asyncio.create_task(send(intake))
        await asyncio.to_thread(disk.arrived.wait, 20)
        await asyncio.sleep(0.05)
        assert len(taken) == 4
        disk.go_on.set()
        await asyncio.wait_for(sending, 20)
        assert intake.outcomes.get_nowait() == Stored(digest, existed=False)
        assert bytes(store.blobs.read(NS, digest)) == data
    threads.close()


class SyncingDisk(Disk):
    """Lets no part's sync end before several are under way."""

    def __init__(self, several: int) -> None:
        self._several = several
        self._changed = threading.Condition()
        self._under_way = 0
        self.most = 0

    def fsync(self, descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and threading.current_thread().name.startswith("store"):
            with self._changed:
                self._under_way += 1
                self.most = max(self.most, self._under_way)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.most >= self._several, 10)
                self._under_way -= 1
        super().fsync(descriptor)


async def test_small_blobs_of_one_sender_are_synced_side_by_side(tmp_path: Path) -> None:
    blobs = SyntheticAgent(SMALL, 1).turn(256 * 40).new_blobs
    disk = SyncingDisk(2)
    threads = StoreThreads(16)
    with Lab(tmp_path / "data").open(disk) as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            for digest, data in blobs.items():
                await intake.begin(digest, BlobKind.TENSORS, 0, data)
            await intake.end()
        assert store.blobs.find_missing(NS, list(blobs)) == []
    threads.close()
    assert disk.most >= 2


@pytest.mark.parametrize("sent", [1, 7], ids=["begun", "sent whole"])
async def test_a_large_blob_that_turns_out_to_be_stored_is_acknowledged_once(sent: int, tmp_path: Path) -> None:
    [(digest, data)] = SyntheticAgent(LARGE, 1).turn(256).new_blobs.items()
    threads = StoreThreads(4)
    with Lab(tmp_path / "data").open() as store:
        write(store, digest, data, BlobKind.TENSORS)
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data[:MIB])
            for offset, piece in pieces(data)[1:sent]:
                await intake.write(offset, piece)
            await intake.end()
        assert intake.outcomes.get_nowait() == Stored(digest, existed=True)
        assert intake.outcomes.empty()
    threads.close()


async def test_a_large_blob_that_cannot_be_opened_is_refused_before_all_of_it_has_come(tmp_path: Path) -> None:
    [(digest, data)] = SyntheticAgent(LARGE, 1).turn(256).new_blobs.items()
    threads = StoreThreads(4)
    with Lab(tmp_path / "data").open(quota_bytes=MIB) as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data[:MIB])
            await intake._written()
            with pytest.raises(ResourceExhausted) as refused:
                await intake.write(MIB, data[MIB : 2 * MIB])
        assert refused.value.reason == "QUOTA_FULL"
        assert store.statistics.of(NS).reserved_bytes == 0
    threads.close()


async def test_small_blobs_of_one_sender_are_listed_in_groups(tmp_path: Path) -> None:
    blobs = SyntheticAgent(SMALL, 1).turn(256 * 40).new_blobs
    threads = StoreThreads(16)
    listed: list[str] = []

    class CountingDisk(Disk):
        def reached(self, point: str) -> None:
            listed.append(point)

    with Lab(tmp_path / "data").open(CountingDisk()) as store:
        listed.clear()
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            for digest, data in blobs.items():
                await intake.begin(digest, BlobKind.TENSORS, 0, data)
            await intake.end()
        assert store.blobs.find_missing(NS, list(blobs)) == []
    threads.close()
    assert len(blobs) == 40
    assert listed.count("index: after commit") <= 10


async def test_a_small_blob_whose_sender_sends_no_more_is_made_durable_before_it_ends(tmp_path: Path) -> None:
    [(digest, data)] = SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()
    threads = StoreThreads(4)
    with Lab(tmp_path / "data").open() as store:
        async with BlobIntake(AioStore(store, threads), NS) as intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data)
            assert await asyncio.wait_for(intake.outcomes.get(), 20) == Stored(digest, existed=False)
    threads.close()


async def test_small_blobs_that_were_sent_before_a_cut_are_kept(tmp_path: Path) -> None:
    blobs = SyntheticAgent(SMALL, 1).turn(256 * 3).new_blobs
    threads = StoreThreads(4)

    async def send(intake: BlobIntake) -> None:
        async with intake:
            for digest, data in blobs.items():
                await intake.begin(digest, BlobKind.TENSORS, 0, data)
            raise ConnectionError

    with Lab(tmp_path / "data").open() as store:
        with pytest.raises(ConnectionError):
            await send(BlobIntake(AioStore(store, threads), NS))
        assert store.blobs.find_missing(NS, list(blobs)) == []
    threads.close()


def test_a_blob_that_another_sender_lists_while_it_is_looked_up_is_not_written_again(tmp_path: Path) -> None:
    [(digest, data)] = SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()
    with Lab(tmp_path / "data").open() as store:
        look_up = store.blobs._lacking
        found: list[list[Digest]] = []

        def lacking(namespace: str, digests: Sequence[Digest]) -> list[Digest]:
            missing = look_up(namespace, digests)
            if not found:
                found.append(missing)
                write(store, digest, data, BlobKind.TENSORS)
            return missing

        store.blobs._lacking = lacking  # type: ignore[method-assign]
        with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
            assert found == [[digest]]
            assert writer.is_stored
        assert bytes(store.blobs.read(NS, digest)) == data
