"""What a start finds in its directory: a lost database, others' files, directories of who died; and what lasts."""

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from kvasir.errors import FailedPrecondition, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.__main__ import collect_own_regularly, collect_regularly
from cachestore_svc.blobs.blob_writer import NewBlob
from cachestore_svc.blobs.disk import Disk, StrPath
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.threads import StoreThreads
from tests.cachestore.core.lab import MIB, NS, Lab, assert_restores, publish, write
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.programs import run

DATABASE = "kvasir.sqlite3"


def a_block(seed: int = 1) -> tuple[Digest, bytes]:
    return next(iter(SyntheticAgent(SMALL, seed).turn(256).new_blobs.items()))


def test_blobs_without_their_database_are_left_alone_until_a_person_decides(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
    before = set(lab.blob_files)
    kept = {path.name: path.read_bytes() for path in lab.root.glob(f"{DATABASE}*")}
    log = (lab.root / "journal").read_bytes()
    for name in kept:
        (lab.root / name).unlink()
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="put the database back") as refused:
            lab.open()
        assert refused.value.reason == "INDEX_MISSING"
        assert set(lab.blob_files) == before
    for name, data in kept.items():
        (lab.root / name).write_bytes(data)
    with lab.open() as store:
        assert_restores(store, store.snapshots.get(NS, "a"), content)
    for name in kept:
        (lab.root / name).unlink()
    # The journal is proof that there was more.
    (lab.root / "namespaces").rename(lab.root / "away")
    with pytest.raises(FailedPrecondition, match="kvasir store recover"):
        lab.open()
    assert (lab.root / "journal").read_bytes() == log
    (lab.root / "journal").unlink()
    with lab.open() as store:
        assert store.care.check().is_clean


def test_others_files_among_the_namespaces_are_no_concern_of_the_store(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
    others = [lab.root / "namespaces" / name for name in (".DS_Store", "notes", "f" * 32)]
    for path in others:
        path.write_bytes(b"theirs")
    inside = lab.root / "namespaces" / "lost+found" / "blobs" / "ab" / ("ab" * 32)
    inside.parent.mkdir(parents=True)
    inside.write_bytes(b"theirs")
    with lab.open() as store:
        assert store.care.check(repair=True).is_clean
        assert_restores(store, store.snapshots.get(NS, "a"), content)
    assert all(path.read_bytes() == b"theirs" for path in (*others, inside))


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_directory_of_another_user_is_no_place_for_memories(
    lab: Lab, is_linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could read and change all that the store writes there."""
    if is_linked:
        lab.root.with_name("theirs").mkdir()
        lab.root.symlink_to(lab.root.with_name("theirs"))
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: 54_321)
        with pytest.raises(FailedPrecondition, match="another user"):
            lab.open()
    lab.root.chmod(0o777)
    with pytest.raises(FailedPrecondition, match="others can write there"):
        lab.open()
    lab.root.chmod(0o755)
    lab.open().close()


@pytest.mark.parametrize("command", [["check"], ["gc", "--dry-run"]])
def test_who_only_looks_at_a_directory_changes_no_file_of_it(lab: Lab, command: list[str]) -> None:
    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(300), 0)
    orphan = lab.directory_of(NS) / "blobs" / "ab" / ("ab" * 32)
    part = orphan.with_name("ab" * 32 + ".part")
    orphan.parent.mkdir(exist_ok=True)
    for path in (orphan, part):
        path.write_bytes(b"left by a crash")

    def answer_of(*arguments: str) -> dict[str, object]:
        done = run("cachestore_svc", *arguments, "--json", "--data-dir", str(lab.root))
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    answer = answer_of(*command)
    assert orphan.exists()
    assert part.exists()
    if command == ["check"]:
        assert [(each["problem"], each["detail"]) for each in answer["findings"]] == [("ORPHAN_FILE", orphan.name)]  # type: ignore[attr-defined]
        answer_of("check", "--repair")
        assert not orphan.exists()
        assert not part.exists()


class SyncingDisk(Disk):
    """Notes which directories were synced, and may die instead."""

    def __init__(self) -> None:
        self.synced: list[Path] = []
        self.is_dying = False

    def fsync_directory(self, path: StrPath) -> None:
        if self.is_dying:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync_directory(path)
        self.synced.append(Path(path))


def test_a_directory_whose_maker_failed_to_sync_its_name_is_synced_by_who_uses_it_next(lab: Lab) -> None:
    digest, data = a_block()
    disk = SyncingDisk()
    with lab.open(disk) as store:
        disk.is_dying = True
        with pytest.raises(Exception, match="disk failed"):
            write(store, digest, data, BlobKind.TENSORS)
    # As an earlier process left them that died between making and syncing.
    blobs = lab.directory_of(NS) / "blobs"
    for shelf in range(256):
        (blobs / f"{shelf:02x}").mkdir(parents=True, exist_ok=True)
    disk = SyncingDisk()
    with lab.open(disk) as store:
        disk.synced.clear()
        write(store, digest, data, BlobKind.TENSORS)
        shelf_path = blobs / digest.hash[:2]
        assert disk.synced == [lab.root, lab.root / "namespaces", blobs.parent, blobs, shelf_path]
        disk.synced.clear()
        store.care.collect_garbage()
        other = next(block for block in map(a_block, range(2, 4_000)) if block[0].hash[:2] == digest.hash[:2])
        write(store, *other, BlobKind.TENSORS)
        assert disk.synced == [shelf_path]


def test_the_directories_of_blobs_that_are_begun_together_are_made_durable_by_one_sync(lab: Lab) -> None:
    blobs = SyntheticAgent(SMALL, 1).turn(256 * 12).new_blobs
    disk = SyncingDisk()
    with lab.open(disk) as store:
        write(store, *a_block(), BlobKind.TENSORS)
        disk.synced.clear()
        writers = store.blobs.open_writers(NS, [NewBlob(digest, BlobKind.TENSORS) for digest in blobs])
        assert disk.synced == [lab.directory_of(NS) / "blobs"]
        disk.is_dying = True
        others = SyntheticAgent(SMALL, 2).turn(256 * 12).new_blobs
        refused = store.blobs.open_writers(NS, [NewBlob(digest, BlobKind.TENSORS) for digest in others])
        assert [each.reason for each in refused if isinstance(each, Unavailable)] == ["DISK_FAILED"] * 12
        for each in writers:
            assert not isinstance(each, Exception)
            each.abandon()
        assert store.statistics.of(NS).reserved_bytes == 0


def test_a_file_where_a_directory_of_blobs_should_be_hinders_no_other_blob_of_its_group(lab: Lab) -> None:
    blobs = SyntheticAgent(SMALL, 1).turn(256 * 4).new_blobs
    first, *others = blobs
    with lab.open() as store:
        shelves = lab.directory_of(NS) / "blobs"
        shelves.mkdir(parents=True)
        (shelves / first.hash[:2]).touch()
        refused, *opened = store.blobs.open_writers(NS, [NewBlob(digest, BlobKind.TENSORS) for digest in blobs])
        assert isinstance(refused, Unavailable)
        writers = [each for each in opened if not isinstance(each, Exception)]
        for digest, writer in zip(others, writers, strict=True):
            writer.write(0, blobs[digest])
            writer.finish()
        assert store.blobs.find_missing(NS, list(blobs)) == [first]
        assert store.statistics.of(NS).reserved_bytes == 0


class StumblingDisk(Disk):
    """Once does not know its free space: when it is asked for the `fails_at`th time from then on."""

    def __init__(self) -> None:
        self.fails_at = 0
        self.recovered = threading.Event()

    def free_bytes(self, path: Path) -> int:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.recovered.set()
        return super().free_bytes(path)


def test_where_the_disk_fails_at_one_of_several_blobs_nothing_of_them_stays_reserved(lab: Lab) -> None:
    """The quota has no room for all, so that they are begun one after the other."""
    blobs = dict(a_block(seed) for seed in range(3))
    disk = StumblingDisk()
    with lab.open(disk, quota_bytes=2 * next(iter(blobs)).size_bytes) as store:
        disk.fails_at = 2
        with pytest.raises(Unavailable, match="the disk failed with EIO"):
            store.blobs.open_writers(NS, [NewBlob(digest, BlobKind.TENSORS) for digest in blobs])
        assert store.statistics.of(NS).reserved_bytes == 0
        write(store, *next(iter(blobs.items())), BlobKind.TENSORS)


def test_a_disk_that_fails_once_does_not_end_collection(lab: Lab) -> None:
    digest, data = a_block()
    disk = StumblingDisk()

    async def collect_twice() -> None:
        threads = StoreThreads(2)
        task = asyncio.create_task(collect_regularly(store, threads, 0.01))
        assert await asyncio.to_thread(disk.recovered.wait, 20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        threads.close()

    with lab.open(disk, grace_period_s=0.0, ballast_bytes=MIB) as store:
        write(store, digest, data, BlobKind.TENSORS)
        (lab.root / "ballast").unlink(missing_ok=True)
        disk.recovered.clear()
        disk.fails_at = 1
        asyncio.run(collect_twice())
        assert store.statistics.of(NS).blob_count == 0


async def test_a_database_that_is_away_ends_no_collection_of_a_stores_own_and_is_no_fault_of_it() -> None:
    """It may be away for hours: then the log would have a traceback each time."""
    tries: list[int] = []

    def away() -> None:
        tries.append(1)
        raise Unavailable("the database is away", reason="INDEX_UNREACHABLE")

    store: Any = SimpleNamespace(care=SimpleNamespace(collect_own=away))
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(20):
            threads = StoreThreads(2)
            task = asyncio.create_task(collect_own_regularly(store, threads, 0.01))
            while len(tries) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            threads.close()
    assert logs[0] == {"event": "gc.failed", "log_level": "warning", "reason": "INDEX_UNREACHABLE"}
