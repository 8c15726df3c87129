"""Blobs on their way in when their sender goes away at an awkward moment: nothing stays open behind it."""

import asyncio
import threading
from pathlib import Path

import pytest

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.moving.inbound import BlobIntake, Stored
from cachestore_svc.records import BlobKind
from cachestore_svc.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab
from tests.synthetic import SMALL, SyntheticAgent


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

    def open_append(self, path: Path) -> int:
        if path.suffix == ".part":
            self._wait("open")
        return super().open_append(path)

    def fsync(self, descriptor: int) -> None:
        if threading.current_thread().name.startswith("store"):
            self._wait("sync")
        super().fsync(descriptor)


@pytest.mark.parametrize("point", ["open", "sync"])
def test_a_sender_cancelled_while_its_blob_is_opened_or_synced_leaves_no_writer(point: str, tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(256)
    [(digest, data)] = turn.new_blobs.items()
    disk = WaitingDisk(point)
    threads = StoreThreads(4)

    async def send(intake: BlobIntake) -> None:
        async with intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data)
            await intake.end()

    async def test() -> None:
        with Lab(tmp_path / "data").open(disk) as store:
            sending = asyncio.create_task(send(BlobIntake(store, threads, NS)))
            await asyncio.to_thread(disk.arrived.wait, 20)
            sending.cancel()
            await asyncio.sleep(0.05)
            assert not sending.done(), "the thread still uses the writer"
            disk.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await sending
            again = BlobIntake(store, threads, NS)
            await asyncio.wait_for(send(again), 20)
            outcome = again.outcomes.get_nowait()
            assert isinstance(outcome, Stored), outcome
            assert bytes(store.read_blob(NS, digest)) == data

    asyncio.run(test())
    threads.close()


def test_a_sender_cancelled_while_its_whole_blob_waits_behind_others_leaves_no_writer(tmp_path: Path) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(256)
    [(digest, data)] = turn.new_blobs.items()
    threads = StoreThreads(4)
    half = len(data) // 2

    async def send(intake: BlobIntake) -> None:
        async with intake:
            await intake.begin(digest, BlobKind.TENSORS, 0, data[:half])
            await intake.write(half, data[half:])
            await intake.end()

    async def test() -> None:
        with Lab(tmp_path / "data").open() as store:
            full = BlobIntake(store, threads, NS)
            waits = asyncio.Event()

            async def wait_for_ever(_size_bytes: int) -> None:
                waits.set()
                await asyncio.Event().wait()

            full._place = wait_for_ever  # type: ignore[method-assign]
            sending = asyncio.create_task(send(full))
            await waits.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            again = BlobIntake(store, threads, NS)
            await asyncio.wait_for(send(again), 20)
            outcome = again.outcomes.get_nowait()
            assert isinstance(outcome, Stored), outcome

    asyncio.run(test())
    threads.close()
