"""Reading blobs while the disk, the process or other threads get in the way: only what is damaged is called damaged."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir.errors import DataLoss, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, write
from tests.made_models.synthetic import SMALL, SyntheticAgent

of_each_directory = pytest.mark.parametrize("depth", [0, 1, 2], ids=["of blobs", "the namespace's", "the store's"])


def a_block() -> tuple[Digest, bytes]:
    return next(iter(SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()))


class ReadingDisk(Disk):
    """Does something around each read of a file."""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def read(self, path: Path, max_bytes: int) -> memoryview:
        before, self.before = self.before, lambda: None
        before()
        data = super().read(path, max_bytes)
        after, self.after = self.after, lambda: None
        after()
        return data


def fail_with(error: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EINTR])
def test_a_blob_that_cannot_be_read_now_is_unavailable_and_is_served_later(lab: Lab, error: int) -> None:
    digest, data = a_block()
    disk = ReadingDisk()
    with lab.open(disk) as store:
        write(store, digest, data, BlobKind.TENSORS)
        disk.before = fail_with(error)
        with pytest.raises(Unavailable) as refused:
            store.blobs.read(NS, digest)
        assert (refused.value.reason, refused.value.retry_after_s) == ("DISK_FAILED", 1)
        disk.before = fail_with(error)
        with pytest.raises(Unavailable):
            list(store.care.verify(NS))
        assert store.statistics.of(NS).damaged_blob_count == 0
        assert bytes(store.blobs.read(NS, digest)) == data


def test_a_disk_that_is_away_has_lost_no_blob(lab: Lab) -> None:
    """As a share that was unmounted, below an index that is elsewhere: a scrub would have quarantined all of them."""
    digest, data = a_block()
    away = lab.root.with_name("away")
    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
        lab.root.rename(away)
        calls: list[Callable[[], object]] = [
            lambda: store.blobs.read(NS, digest),
            lambda: list(store.care.verify(NS)),
            lambda: store.blobs.open_writer(NS, Digest.of(b"new"), BlobKind.MANIFEST),
            lambda: store.statistics.of(NS),
        ]
        for call in calls:
            with pytest.raises(Unavailable) as refused:
                call()
            assert refused.value.reason == "DISK_FAILED"
        away.rename(lab.root)
        assert bytes(store.blobs.read(NS, digest)) == data
        lab.file_of(digest).unlink()
        with pytest.raises(DataLoss, match="missing"):
            store.blobs.read(NS, digest)


def directory_at(lab: Lab, depth: int) -> Path:
    """That of blobs, of its namespace, or of all namespaces."""
    shelves = lab.directory_of(NS) / "blobs"
    return (shelves, *shelves.parents)[depth]


def assert_away(store: Store, digest: Digest, new: Digest, namespace: str = NS) -> None:
    """The disk of the blobs is away: none is read, and none written."""
    with pytest.raises(Unavailable):
        store.blobs.read(NS, digest)
    with pytest.raises(Unavailable) as refused:
        store.blobs.open_writer(namespace, new, BlobKind.MANIFEST)
    assert refused.value.reason == "DISK_FAILED"


def bring_back(disk: Path, place: Path, mounts: set[Path]) -> None:
    """Mount a disk that is away at its place, below which nothing was written meanwhile."""
    assert list(place.iterdir()) == []
    place.rmdir()
    disk.rename(place)
    mounts.add(place)


@of_each_directory
def test_nothing_is_written_where_a_disk_was_mounted_that_is_away(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """It would lie on the disk below, out of sight once the disk is back, and what lies there would be damaged."""
    (digest, data), manifest, away = a_block(), SyntheticAgent(SMALL, 1).turn(30), lab.root.with_name("away")
    place = directory_at(lab, depth)
    mounts, numbered = {place}, (Digest.of(str(number).encode()) for number in range(1 << 14))
    on_shelf = next(each for each in numbered if each.hash[:2] == digest.hash[:2])
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in mounts)
    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
        place.rename(away)
        place.mkdir()
        mounts.clear()
        assert_away(store, digest, on_shelf)
        assert_away(store, digest, manifest.manifest_digest, NS if depth < 2 else "another")
        bring_back(away, place, mounts)
        assert bytes(store.blobs.read(NS, digest)) == data
        write(store, manifest.manifest_digest, manifest.manifest_bytes, BlobKind.MANIFEST)


@of_each_directory
def test_a_store_that_starts_without_its_blobs_disk_waits_for_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], depth: int
) -> None:
    """Its start put all blobs into quarantine, and its first write lay on the disk below."""
    (digest, data), manifest, away = a_block(), SyntheticAgent(SMALL, 1).turn(30), lab.root.with_name("away")
    place, mounts = directory_at(lab, depth), set[Path]()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in mounts)
    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
    place.rename(away)
    place.mkdir()
    capsys.readouterr()
    with lab.open() as store:
        assert capsys.readouterr().out.count("blobs.away") == 1
        assert_away(store, digest, manifest.manifest_digest)
        assert not store.blobs.receive_files(NS)
        bring_back(away, place, mounts)
        assert bytes(store.blobs.read(NS, digest)) == data
        write(store, manifest.manifest_digest, manifest.manifest_bytes, BlobKind.MANIFEST)
    with lab.open() as store:
        assert store.statistics.of(NS).damaged_blob_count == 0


@of_each_directory
def test_a_store_that_wrote_nothing_since_its_start_knows_its_disk_is_away(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Each blob that it read went into quarantine, and its first write lay on the disk below."""
    (digest, data), manifest, away = a_block(), SyntheticAgent(SMALL, 1).turn(30), lab.root.with_name("away")
    place = directory_at(lab, depth)
    mounts = {place}
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in mounts)
    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
    with lab.open() as store:
        place.rename(away)
        place.mkdir()
        mounts.clear()
        assert_away(store, digest, manifest.manifest_digest)
        bring_back(away, place, mounts)
        assert bytes(store.blobs.read(NS, digest)) == data
        assert store.statistics.of(NS).damaged_blob_count == 0


@of_each_directory
def test_a_store_that_starts_without_the_disk_that_a_link_leads_to_waits_for_it(lab: Lab, depth: int) -> None:
    """Its start put all blobs into quarantine, where they stayed when the disk was back."""
    (digest, data), manifest, disk = a_block(), SyntheticAgent(SMALL, 1).turn(30), lab.root.with_name("disk")
    place = directory_at(lab, depth)
    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
    disk.mkdir()
    place.rename(disk / "blobs")
    place.symlink_to(disk / "blobs")
    away = disk.rename(disk.with_name("away"))
    with lab.open() as store:
        assert_away(store, digest, manifest.manifest_digest)
        away.rename(disk)
        assert bytes(store.blobs.read(NS, digest)) == data
        write(store, manifest.manifest_digest, manifest.manifest_bytes, BlobKind.MANIFEST)
        assert store.statistics.of(NS).damaged_blob_count == 0


def test_a_directory_of_blobs_that_somebody_removed_is_made_again_for_the_next_one(lab: Lab) -> None:
    """Every write was a failure of the disk until the store's next start."""
    (digest, data), manifest = a_block(), SyntheticAgent(SMALL, 1).turn(30)
    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
        shutil.rmtree(lab.directory_of(NS) / "blobs")
        with pytest.raises(Unavailable):
            store.blobs.read(NS, digest)
        write(store, manifest.manifest_digest, manifest.manifest_bytes, BlobKind.MANIFEST)
        assert bytes(store.blobs.read(NS, manifest.manifest_digest)) == manifest.manifest_bytes
        with pytest.raises(DataLoss, match="missing"):
            store.blobs.read(NS, digest)
        write(store, digest, data, BlobKind.TENSORS)
        assert bytes(store.blobs.read(NS, digest)) == data


def test_a_blob_that_the_device_lost_is_damaged(lab: Lab) -> None:
    digest, data = a_block()

    class LosingDisk(Disk):
        def read(self, path: Path, max_bytes: int) -> memoryview:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with lab.open() as store:
        write(store, digest, data, BlobKind.TENSORS)
    with lab.open(LosingDisk()) as store:
        with pytest.raises(DataLoss):
            store.blobs.read(NS, digest)
        assert store.statistics.of(NS).damaged_blob_count == 1


@pytest.mark.parametrize("ask", ["read", "read_found", "verify"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_blob_swept_and_written_again_while_it_is_read_is_served(lab: Lab, ask: str, moment: str) -> None:
    """The reader meets no file, or the bytes of the file before; both are of the past."""
    digest, data = a_block()
    disk = ReadingDisk()
    with lab.open(disk, grace_period_s=0.0) as store:
        write(store, digest, data, BlobKind.TENSORS)
        path = lab.blob_files[digest.hash]

        def sweep_and_write_again() -> None:
            store.care.collect_garbage()
            lab.clock.pass_s(1)
            assert store.care.collect_garbage().blobs_swept == 1
            write(store, digest, data, BlobKind.TENSORS)

        def meet_no_file() -> None:
            sweep_and_write_again()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

        if moment == "before":
            disk.before = meet_no_file
        else:
            path.write_bytes(bytes(len(data)))
            disk.after = sweep_and_write_again
        if ask != "verify":
            assert bytes(store.blobs.read(NS, digest, is_found=ask == "read_found")) == data
        else:
            [progress] = store.care.verify(NS)
            assert progress.damaged == ()
        assert store.statistics.of(NS).damaged_blob_count == 0
