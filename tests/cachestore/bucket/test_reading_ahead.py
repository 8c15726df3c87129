"""A reader of a bucket's blobs requests more objects at once while each comes soon, within the bytes that all readers
may hold."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kvasir.formats.digest import Digest
from kvasir.server.shared_room import SharedRoom
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.moving import outbound
from cachestore_svc.moving.outbound import BlobReader
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import NS, Lab, write_all
from tests.made_models.synthetic import SyntheticAgent, full_layers, kv_identity

MIB = 1 << 20
WHERE = "s3://bucket/prefix"
BLOBS = 26
TURN = SyntheticAgent(kv_identity("wide", full_layers(16, 8, 128)), 1).turn(BLOBS * 256)  # of 4.7 MB each


class MeetingBucket(Bucket):
    """Whose later reads of large objects wait until so many are under way; `most`: how many were."""

    meets, begun, under_way, most = 1, 0, 0, 0

    def get(self, name: str, most_bytes: int) -> memoryview:
        if most_bytes < MIB:
            return super().get(name, most_bytes)
        with _changed:
            self.begun, self.under_way = self.begun + 1, self.under_way + 1
            self.most = max(self.most, self.under_way)
            _changed.notify_all()
            if self.begun > 2 * self.meets:
                assert _changed.wait_for(lambda: self.most >= self.meets, 20)
        try:
            return super().get(name, most_bytes)
        finally:
            with _changed:
                self.under_way -= 1


_changed = threading.Condition()


def _most_at_once(root: Path, meets: int, room: SharedRoom) -> int:
    """Reads all blobs, and looks at each."""
    bucket = MeetingBucket(MemoryStore(), WHERE)
    lab = Lab(root)
    lab.kept_blobs = blobs_of(replace(lab.config(), blobs=WHERE, blob_tier_bytes=0), Disk(), bucket)

    async def test(store: Store) -> None:
        threads, whole = StoreThreads(), list[Digest]()
        async with BlobReader(AioStore(store, threads), room).open(NS, TURN.digests) as source:
            data = b""
            while piece := await source.next_piece():
                assert room.held_units <= room.max_units
                data += piece.data
                if len(data) == piece.digest.size_bytes:
                    whole, data = [*whole, Digest.of(data)], b""
        assert whole == list(TURN.digests)
        assert room.held_units == 0
        threads.close()

    with lab.open() as store:
        write_all(store, TURN.new_blobs)
        bucket.meets, bucket.begun, bucket.most = meets, 0, 0
        asyncio.run(asyncio.wait_for(test(store), 60))
    return bucket.most


def test_objects_of_a_bucket_that_come_soon_are_requested_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "_FAR", replace(outbound._FAR, quick_s=1e9))
    assert _most_at_once(tmp_path, 7, SharedRoom(512 * MIB)) in (7, 8, 9)


def test_objects_that_come_late_are_requested_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "_FAR", replace(outbound._FAR, quick_s=0.0))
    assert _most_at_once(tmp_path, 1, SharedRoom(512 * MIB)) <= 2


def test_a_small_room_holds_what_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "_FAR", replace(outbound._FAR, quick_s=1e9))
    assert _most_at_once(tmp_path, 1, SharedRoom(20 * MIB)) <= 4
