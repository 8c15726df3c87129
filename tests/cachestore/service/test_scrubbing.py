"""The scrub in the background finds damage, goes on after a restart and keeps its pace; a peer mends what it has."""

import asyncio
import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import DataLoss, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import Disk, StrPath
from cachestore_svc.store import background_scrub
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.background_scrub import BackgroundScrub
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import Lab
from tests.cachestore.core.lab import publish as publish_in
from tests.cachestore.service.running import RunningStore, StoreHome, assert_whole, publish, start_here, store_home
from tests.cachestore.service.transfers.lying_peers import LIES, LyingPeer, lying
from tests.made_models.synthetic import SMALL, SyntheticAgent

TURN = SyntheticAgent(SMALL, 1).turn(256 * 3 + 10, is_prompt=True)
SIZE = sum(digest.size_bytes for digest in TURN.digests) + len(TURN.manifest_bytes)
DAY = 86_400.0
EAGER = ("--scrub-bytes-per-s", str(1 << 30), "--scrub-every-s", "0.05")


@pytest.fixture
def there(tmp_path: Path) -> Iterator[RunningStore]:
    """A peer that has ada, whole."""
    with store_home(tmp_path / "there") as home:
        store = home.start()
        with store.client() as client:
            publish(client, "ada", TURN, 0)
        yield store


def damage(store: RunningStore, *digests: Digest) -> None:
    """Flip a bit of each on the disk."""
    for digest in digests:
        [path] = store.data_dir.glob(f"namespaces/*/blobs/??/{digest.hash}")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def scrubbed(store: RunningStore) -> pb.ScrubStatus:
    """The state after a pass that began after now."""
    with store.client() as client:
        before = client.get_stats().scrub.began_at.ToNanoseconds()
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            scrub = client.get_stats().scrub
            if scrub.HasField("ended_at") and scrub.began_at.ToNanoseconds() > before:
                return scrub
            time.sleep(0.02)
    raise AssertionError(f"no pass ended: {store.log}")


def test_what_the_scrub_finds_damaged_comes_back_from_a_peer(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address, *EAGER)
    with here.client() as client:
        publish(client, "ada", TURN, 0)
        damage(here, TURN.digests[1], TURN.manifest_digest)
        scrubbed(here)
        assert_whole(client, "ada", TURN)
        counters = client.get_stats().counters
        assert counters["blobs_repaired"] == 2
        assert counters["blobs_scrubbed"] >= len(TURN.digests) + 1
        assert scrubbed(here).blobs_damaged == 0


def test_a_scrub_that_is_requested_repairs_and_reports_what(
    home: StoreHome, there: RunningStore, tmp_path: Path
) -> None:
    here = start_here(home, tmp_path, there.address)
    with here.client() as client:
        publish(client, "ada", TURN, 0)
        publish(client, "own", lost := SyntheticAgent(SMALL, 2).turn(300), 0)
        damage(here, TURN.digests[0], lost.digests[0])
        answers = list(client.verify_blobs(""))
        found = {digest.hash for answer in answers for digest in answer.damaged}
        mended = {digest.hash for answer in answers for digest in answer.repaired}
        assert found == {TURN.digests[0].hash, lost.digests[0].hash}
        assert mended == {TURN.digests[0].hash}
        assert_whole(client, "ada", TURN)


@pytest.mark.parametrize("lie", ["a bit flipped", "cut short", "too long", "wrong offset"])
def test_a_peer_that_lies_changes_nothing(home: StoreHome, tmp_path: Path, lie: str) -> None:
    with lying(LyingPeer(TURN, LIES[lie])) as address:
        here = start_here(home, tmp_path, address)
        with here.client() as client:
            publish(client, "ada", TURN, 0)
            damage(here, TURN.digests[1])
            answers = list(client.verify_blobs(""))
            assert not any(answer.repaired for answer in answers)
            with pytest.raises(DataLoss):
                client.get_blob(TURN.digests[1])
            client.put_blobs({TURN.digests[1]: TURN.new_blobs[TURN.digests[1]]})
            assert_whole(client, "ada", TURN)


def test_a_pass_goes_on_where_it_was_after_a_restart_and_begins_when_it_is_due(lab: Lab) -> None:
    with lab.open() as store:
        publish_in(store, "ada", TURN, 0)
        publish_in(store, "eva", TURN, 0, namespace="other")
        assert store.care.scrubbing.load().ended_unix_ms
        assert store.care.scrubbing.due_in_s(DAY) == DAY
        lab.clock.pass_s(DAY)
        assert store.care.scrubbing.due_in_s(DAY) == 0
        store.care.scrubbing.begin()
        for blob in store.care.scrubbing.next()[:3]:
            assert store.care.scrubbing.is_whole(blob)
        store.care.scrubbing.save()
    with lab.open() as store:
        store.care.scrubbing.load()
        seen = []
        while blobs := store.care.scrubbing.next():
            seen += [(blob.namespace, blob.digest) for blob in blobs]
            assert all(store.care.scrubbing.is_whole(blob) for blob in blobs)
        assert len(seen) == len(set(seen)) == 2 * (len(TURN.digests) + 1) - 3
        assert store.care.scrubbing.state.blobs_checked == 2 * (len(TURN.digests) + 1)
        assert store.care.scrubbing.state.bytes_checked == 2 * SIZE
        lab.clock.set_by_s = -30 * DAY  # a clock that was set back
        assert store.care.scrubbing.due_in_s(DAY) <= DAY


async def scrub_until_a_blob_is_checked(lab: Lab, store: Store, bytes_per_s: int) -> None:
    threads = StoreThreads()
    aio = AioStore(store, threads)
    task = asyncio.create_task(BackgroundScrub(aio, no_peer, bytes_per_s=bytes_per_s, every_s=0.001).run())
    async with asyncio.timeout(60):
        while not store.care.scrubbing.state.blobs_checked:
            lab.clock.pass_s(1)
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    threads.close()


def test_a_pass_that_is_ended_in_the_middle_notes_where_it_was(lab: Lab) -> None:
    with lab.open() as store:
        publish_in(store, "ada", TURN, 0)
        asyncio.run(scrub_until_a_blob_is_checked(lab, store, bytes_per_s=1))
        at = store.care.scrubbing.state
    with lab.open() as store:
        assert store.care.scrubbing.load() == at
        assert (at.blobs_checked, at.ended_unix_ms) == (1, 0)


class FailingReads(Disk):
    """Reads nothing of blobs while it fails."""

    fails = False

    def read(self, path: StrPath, max_bytes: int) -> memoryview:
        if self.fails and "blobs" in Path(path).parts:
            raise OSError(errno.EMFILE, "too many open files")
        return super().read(path, max_bytes)


def test_what_cannot_be_read_now_is_no_damage(lab: Lab) -> None:
    disk = FailingReads()
    with lab.open(disk) as store:
        publish_in(store, "ada", TURN, 0)
        store.care.scrubbing.load()
        store.care.scrubbing.begin()
        blobs = store.care.scrubbing.next()
        disk.fails = True
        with pytest.raises(Unavailable):
            store.care.scrubbing.is_whole(blobs[0])
        disk.fails = False
        assert all(store.care.scrubbing.is_whole(blob) for blob in blobs)
        state = store.care.scrubbing.state
        assert (state.blobs_checked, state.blobs_damaged) == (len(blobs), 0)


async def no_peer(_namespace: str, _digest: Digest) -> bool:
    return False


def test_a_pass_keeps_its_pace(lab: Lab) -> None:
    async def scrub() -> float:
        threads = StoreThreads()
        aio = AioStore(store, threads)
        task = asyncio.create_task(BackgroundScrub(aio, no_peer, bytes_per_s=4 * SIZE, every_s=0.001).run())
        began = time.monotonic()
        while not store.care.scrubbing.state.blobs_checked:
            lab.clock.pass_s(1)
            await asyncio.sleep(0.005)
        while not store.care.scrubbing.state.ended_unix_ms:  # noqa: ASYNC110  another thread changes it
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        threads.close()
        return time.monotonic() - began

    with lab.open() as store:
        publish_in(store, "ada", TURN, 0)
        assert asyncio.run(scrub()) > 0.2


class FullOnce(Disk):
    """Has no room for the first commit."""

    is_full = False

    def reached(self, point: str) -> None:
        if self.is_full and point == "index: before commit":
            self.is_full = False
            raise OSError(errno.ENOSPC, "no room")


def test_a_store_that_starts_on_a_full_disk_is_scrubbed_all_the_same(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_scrub, "LONGEST_RETRY_S", 0.01)
    disk = FullOnce()
    with lab.open(disk, ballast_bytes=0) as store:
        publish_in(store, "ada", TURN, 0)
        disk.is_full = True
        asyncio.run(scrub_until_a_blob_is_checked(lab, store, bytes_per_s=1 << 30))
        assert not disk.is_full
