"""A disk that fills at any step: a typed error, nothing acknowledged lost, and the next operation works."""

import errno
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvasir.errors import KvasirError, ResourceExhausted, Unavailable

from cachestore_svc.blobs.blob_writer import NewBlob, PartWriter
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish, upload, write
from tests.made_models.synthetic import SMALL, SyntheticAgent

MIB = 1 << 20


class FilelessDisk(Disk):
    """No file can begin, as on one that Linux made read-only behind an error."""

    def __init__(self, error: int) -> None:
        self._error = error

    def try_file(self, path: Path) -> None:
        raise OSError(self._error, os.strerror(self._error))


class RefusingDisk(Disk):
    """Fails one effect, by number, as a disk without room (or a broken one) does; a write may fail halfway."""

    def __init__(self, error: int = errno.ENOSPC) -> None:
        self.error = error
        self.refuse_at = 0
        self.effects = 0

    def arm(self, refuse_at: int) -> None:
        self.refuse_at, self.effects = refuse_at, 0

    def _effect(self) -> None:
        self.effects += 1
        if self.effects == self.refuse_at:
            raise OSError(self.error, os.strerror(self.error))

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        half = len(data) // 2
        super().write(descriptor, data[:half])
        self._effect()
        super().write(descriptor, data[half:])

    def open_append(self, path: Path) -> int:
        self._effect()
        return super().open_append(path)

    def add_directory(self, path: Path) -> None:
        self._effect()
        super().add_directory(path)

    def fsync(self, descriptor: int) -> None:
        self._effect()
        super().fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._effect()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._effect()
        super().remove(path)

    def reached(self, point: str) -> None:
        if point == "index: before commit":
            try:
                self._effect()
            except OSError as error:
                # SQLite has words of its own for it.
                failed = sqlite3.OperationalError("the disk refused")
                failed.sqlite_errorcode = sqlite3.SQLITE_IOERR if self.error == errno.EIO else sqlite3.SQLITE_FULL
                raise failed from error


def refusal_of(act: Callable[[], object]) -> KvasirError | None:
    try:
        act()
    except KvasirError as refused:
        return refused
    return None


@pytest.mark.long(4)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failure_at_any_step_of_a_turn_is_typed_and_the_next_try_works(lab: Lab, error: int) -> None:
    disk = RefusingDisk(error)
    with lab.open(disk) as store:
        agent = SyntheticAgent(SMALL, 1)
        first = agent.turn(300)
        done = publish(store, "a", first, 0)
        refusals = 0
        for step in range(1, 200):
            content = SyntheticAgent(SMALL, 100 + step).turn(270)
            disk.arm(step)
            refused = refusal_of(lambda name=f"agent-{step}", new=content: publish(store, name, new, 0))  # type: ignore[misc]
            if refused:
                assert isinstance(refused, Unavailable if error == errno.EIO else ResourceExhausted)
                assert refused.retry_after_s
                refusals += 1
            disk.arm(0)
            if disk.effects < step and refusals < step - 1:
                break
            assert_restores(store, publish(store, f"agent-{step}", content, 0), content)
            assert store.care.check().is_clean
            assert store.statistics.of(NS).reserved_bytes == 0
        assert refusals >= 15
        assert_restores(store, done, first)


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.agents.delete(NS, "a"),
        lambda store: store.care.collect_garbage(),
        lambda store: store.agents.fork(NS, "a", "b"),
        lambda store: store.agents.roll_back(NS, "a", 1),
    ],
)
def test_a_failure_at_any_step_of_other_work_is_typed_and_the_next_try_works(
    lab: Lab, act: Callable[[Store], object]
) -> None:
    disk = RefusingDisk()
    with lab.open(disk, grace_period_s=0.0) as store:
        for step in range(1, 30):
            agent = SyntheticAgent(SMALL, step)
            name, content = "a", agent.turn(300)
            publish(store, name, content, 0)
            upload(store, SyntheticAgent(SMALL, 1000 + step).turn(30))
            store.care.collect_garbage()
            disk.arm(step)
            assert isinstance(refusal_of(lambda: act(store)), ResourceExhausted | None)
            is_over = disk.effects < step
            disk.arm(0)
            # A file that could not be removed is nobody's, and repair removes it.
            assert {finding.problem for finding in store.care.check(repair=True).findings} <= {"ORPHAN_FILE"}
            assert store.care.check().is_clean
            for agent_record in store.agents.page(NS).agents:
                store.agents.delete(NS, agent_record.agent_id)
            store.care.collect_garbage()
            if is_over:
                return
        pytest.fail("there was no end of effects")


# --- a real disk without a byte ---


def mounted(path: Path, size_bytes: int) -> bool:
    """A small file system of its own, where this user may make one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class SmallDisk(Disk):
    """Stands in for a small file system where none can be mounted: counts what lies under a directory."""

    def __init__(self, root: Path, size_bytes: int) -> None:
        self._root, self._size_bytes = root, size_bytes

    def free_bytes(self, path: Path) -> int:
        return max(0, self._size_bytes - sum(each.stat().st_size for each in self._root.rglob("*") if each.is_file()))

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        room = self.free_bytes(self._root)
        super().write(descriptor, data[:room])
        if room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Lab, Disk]]:
    """A store's place of 6 MiB: really, as root on Linux; else as seen through the seam."""
    place = tmp_path / "small"
    is_real = mounted(place, 6 * MIB)
    try:
        yield Lab(place / "data"), Disk() if is_real else SmallDisk(place, 6 * MIB)
    finally:
        if is_real:
            subprocess.run(["umount", str(place)], check=True)


def fill_up(lab: Lab, disk: Disk) -> Path:
    """Somebody else's file takes every byte that is left."""
    path = lab.root.parent / "somebody-elses"
    with path.open("wb", buffering=0) as file:
        while room := disk.free_bytes(lab.root):
            try:
                file.write(bytes(min(room, 64 << 10)))
            except OSError:
                break
    return path


def test_at_zero_free_bytes_reads_and_deletes_work_and_writes_are_refused(small: tuple[Lab, Disk]) -> None:
    lab, disk = small
    with lab.open(disk, grace_period_s=0.0, ballast_bytes=MIB) as store:
        contents = {f"agent-{n}": SyntheticAgent(SMALL, n).turn(300) for n in range(10)}
        for name, content in contents.items():
            publish(store, name, content, 0)
        upload(store, SyntheticAgent(SMALL, 77).turn(600))
        store.care.collect_garbage()
        elsewhere = fill_up(lab, disk)
        assert disk.free_bytes(lab.root) == 0
        for name, content in contents.items():
            assert_restores(store, store.snapshots.get(NS, name), content)
            assert store.blobs.find_missing(NS, content.digests) == []
        with pytest.raises(ResourceExhausted) as refused:
            upload(store, SyntheticAgent(SMALL, 50).turn(300))
        assert refused.value.reason == "DISK_FULL"
        for number in range(5):
            store.agents.delete(NS, f"agent-{number}")
        assert store.care.collect_garbage().blobs_swept >= 15
        assert store.care.check().is_clean
        elsewhere.unlink()
        store.care.collect_garbage()
        publish(store, "after", SyntheticAgent(SMALL, 51).turn(100), 0)
        assert (lab.root / "ballast").stat().st_size == MIB
        for number in range(5, 10):
            assert_restores(store, store.snapshots.get(NS, f"agent-{number}"), contents[f"agent-{number}"])


def test_a_store_opens_and_reads_at_zero_free_bytes(small: tuple[Lab, Disk]) -> None:
    lab, disk = small
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open(disk, ballast_bytes=MIB) as store:
        publish(store, "a", content, 0)
    fill_up(lab, disk)
    with lab.open(disk, ballast_bytes=MIB) as store:
        assert_restores(store, store.snapshots.get(NS, "a"), content)
        store.agents.delete(NS, "a")


def test_a_disk_that_fills_while_a_store_writes_keeps_what_was_acknowledged(small: tuple[Lab, Disk]) -> None:
    lab, disk = small
    kept = {}
    with lab.open(disk, ballast_bytes=MIB) as store:
        for number in range(400):
            content = SyntheticAgent(SMALL, number).turn(280)
            try:
                kept[f"agent-{number}"] = (publish(store, f"agent-{number}", content, 0), content)
            except ResourceExhausted:
                break
        else:
            pytest.fail("the disk never filled")
        assert len(kept) > 20
        for done, content in kept.values():
            assert_restores(store, done, content)
    with lab.open(disk) as store:
        assert store.care.check().is_clean
        for done, content in kept.values():
            assert_restores(store, done, content)


def test_a_blob_that_another_writer_listed_first_survives_our_failure_to_list_it(lab: Lab) -> None:
    """Both were told that it was missing; the first made it durable; the second replaces its file and then finds no
    room for a row. The file is the first one's, too."""
    disk = RefusingDisk()
    content = SyntheticAgent(SMALL, 1).turn(256)
    [(digest, data)] = content.new_blobs.items()
    with lab.open(disk) as store:
        stale = store.blobs.open_writer(NS, digest, BlobKind.TENSORS)
        catalog = stale._register  # type: ignore[attr-defined]
        with stale:
            pass
        done = publish(store, "a", content, 0)
        [late] = store._core.writers.begin(NS, [NewBlob(digest, BlobKind.TENSORS)], catalog)
        assert isinstance(late, PartWriter)
        with late:
            late.write(0, data)
            disk.arm(4)  # sync, rename, sync of the directory, commit
            with pytest.raises(ResourceExhausted):
                late.finish()
        disk.arm(0)
        assert_restores(store, done, content)
        assert store.care.check().is_clean
        assert store.statistics.of(NS).reserved_bytes == 0


def test_a_write_that_found_no_room_goes_on_where_it_stopped(lab: Lab) -> None:
    disk = RefusingDisk()
    [(digest, data)] = SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()
    with lab.open(disk) as store:
        with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
            writer.write(0, data[:8000])
            disk.arm(1)
            with pytest.raises(ResourceExhausted):
                writer.write(8000, data[8000:])
        disk.arm(0)
        # As many bytes lie there as are counted.
        assert store.blobs.write_status(NS, digest).received_bytes == 8000 == store.statistics.of(NS).reserved_bytes
        assert [path.stat().st_size for path in lab.root.rglob("*.part")] == [8000]
        write(store, digest, data, BlobKind.TENSORS)
        assert bytes(store.blobs.read(NS, digest)) == data


@pytest.mark.parametrize("refuse_at", [1, 2, 3])
def test_a_deletion_that_the_ballast_makes_room_for_waits_for_no_lease_that_has_ended(lab: Lab, refuse_at: int) -> None:
    """The deletion runs twice: the try that found no room has fenced nobody, and has forgotten nothing."""
    disk, agent = RefusingDisk(), SyntheticAgent(SMALL, 1)
    with lab.open(disk) as store:
        done = publish(store, "a", agent.turn(30), 0)
        store.leases.acquire(NS, "a", done.kv_identity_hash, "engine-1", 10)
        lab.clock.pass_s(10)
        disk.arm(refuse_at)
        store.agents.delete(NS, "a")
        assert disk.effects > refuse_at


@pytest.mark.parametrize(
    ("disk", "reasons"),
    [(Disk(), []), (FilelessDisk(errno.EROFS), ["DISK_FAILED"]), (FilelessDisk(errno.EMFILE), [])],
    ids=["well", "failed", "no descriptor free"],
)
def test_a_disk_that_takes_no_file_is_a_problem_of_the_store(disk: Disk, reasons: list[str], tmp_path: Path) -> None:
    with Lab(tmp_path / "data").open(disk=disk) as store:
        assert [each.reason for each in store.statistics.ailments()] == reasons


@pytest.mark.parametrize(
    ("error", "reason", "retry_after_s"), [(errno.EROFS, "DISK_FAILED", 60), (errno.ENOSPC, "INDEX_FAILED", 1)]
)
def test_an_index_that_cannot_be_written_because_the_disk_is_read_only_has_that_reason(
    error: int, reason: str, retry_after_s: float, tmp_path: Path
) -> None:
    """SQLite calls each failure an I/O error. Nobody need try again before a person has mounted the disk."""

    class Failed(FilelessDisk):
        def reached(self, point: str) -> None:
            if point == "index: before commit" and is_failed:
                failed = sqlite3.OperationalError("disk I/O error")
                failed.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise failed

    is_failed = False
    with Lab(tmp_path / "data").open(disk=Failed(error)) as store:
        is_failed = True
        refused = refusal_of(lambda: store.leases.acquire(NS, "a", "ab" * 32, "engine-1", 10))
        is_failed = False
    assert refused is not None
    assert (refused.reason, refused.retry_after_s) == (reason, retry_after_s)
