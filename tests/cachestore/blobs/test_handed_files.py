"""A file that a caller on this host wrote becomes a blob: verified like any other, or refused and gone."""

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvasir.clients import handed_files
from kvasir.clients.handed_files import HandedFiles
from kvasir.errors import InvalidArgument, KvasirError, ResourceExhausted, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import Disk, StrPath
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.blobs import Blobs, NewBlob, finish_all
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, hand, write
from tests.made_models.synthetic import SMALL, SyntheticAgent

TENSORS = BlobKind.TENSORS
TURN = SyntheticAgent(SMALL, 1).turn(256)
[(DIGEST, DATA)] = TURN.new_blobs.items()
MANIFEST, ITS_DIGEST = TURN.manifest_bytes, TURN.manifest_digest
WITH_FILE = NewBlob(ITS_DIGEST, BlobKind.MANIFEST, comes_whole=True, data=MANIFEST)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "data")


def handed_file(lab: Lab, data: bytes = DATA) -> tuple[Path, str]:
    """A file as an engine writes it."""
    files = HandedFiles(lab.root, NS)
    token = files.new_token()
    assert files.write(token, data)
    return lab.directory_of(NS) / "handed" / token, token


def test_a_handed_file_becomes_the_blob_and_is_not_copied(lab: Lab) -> None:
    with lab.open() as store:
        assert store.blobs.receive_files(NS)
        path, token = handed_file(lab)
        inode = path.stat().st_ino
        hand(store, DIGEST, token)
        assert bytes(store.blobs.read(NS, DIGEST)) == DATA
        assert lab.file_of(DIGEST).stat().st_ino == inode
        assert not path.exists()
        stats = store.statistics.of(NS)
        assert (stats.blob_bytes, stats.reserved_bytes) == (DIGEST.size_bytes, 0)


def _shorter(path: Path) -> None:
    os.truncate(path, len(DATA) - 1)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


UNFIT: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "shorter": _shorter,
    "a link": _link,
    "with another name": lambda path: os.link(path, path.with_name("other")),
    "open to others": lambda path: path.chmod(0o644),
    "a directory": lambda path: (path.unlink(), path.mkdir())[0],
    "a pipe": _pipe,
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_what_is_not_the_callers_own_whole_file_is_refused(lab: Lab, unfit: str) -> None:
    with lab.open() as store:
        store.blobs.receive_files(NS)
        path, token = handed_file(lab)
        UNFIT[unfit](path)
        with pytest.raises(InvalidArgument) as refused:
            hand(store, DIGEST, token)
        assert refused.value.field == "handed"
        assert (store.statistics.of(NS).reserved_bytes, lab.part_hashes, lab.stored_hashes) == (0, [], [])
        write(store, DIGEST, DATA, TENSORS)
        assert bytes(store.blobs.read(NS, DIGEST)) == DATA


@pytest.mark.parametrize("data", [DATA[:-1] + bytes((DATA[-1] ^ 1,)), bytes(len(DATA))])
def test_other_bytes_than_the_digests_are_refused_and_gone(lab: Lab, data: bytes) -> None:
    with lab.open() as store:
        store.blobs.receive_files(NS)
        path, token = handed_file(lab, data)
        with pytest.raises(InvalidArgument) as refused:
            hand(store, DIGEST, token)
        assert refused.value.reason in ("DIGEST_MISMATCH", "HEADER_REFUSED")
        assert not path.exists()
        assert (lab.part_hashes, lab.stored_hashes, store.statistics.of(NS).reserved_bytes) == ([], [], 0)


def test_a_handed_file_takes_the_place_of_an_interrupted_part(lab: Lab) -> None:
    with lab.open() as store:
        with store.blobs.open_writer(NS, DIGEST, TENSORS) as writer:
            writer.write(0, DATA[:1000])
        store.blobs.receive_files(NS)
        hand(store, DIGEST, handed_file(lab)[1])
        assert bytes(store.blobs.read(NS, DIGEST)) == DATA
        assert store.statistics.of(NS).reserved_bytes == 0


def test_bytes_and_names_are_synced_at_once_and_once_before_they_are_listed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a handed file, and of the manifest that came with it: each sync lasts until all have begun."""
    steps, all_began, sync = list[str](), threading.Barrier(3, timeout=10), Disk.fsync

    def noting(disk: Disk, descriptor: int) -> None:
        status = os.fstat(descriptor)
        sizes = {DIGEST.size_bytes: "file", ITS_DIGEST.size_bytes: "manifest"}
        what = "names" if stat.S_ISDIR(status.st_mode) else sizes.get(status.st_size)
        if what and what not in steps:  # the second directory's is behind the first one's
            all_began.wait()
            time.sleep(0.0 if what == "names" else 0.05)
            steps.append(what)
        sync(disk, descriptor)

    with lab.open() as store:
        store.blobs.receive_files(NS)
        _, token = handed_file(lab)
        monkeypatch.setattr(Disk, "fsync", noting)
        monkeypatch.setattr(Disk, "reached", lambda _, point: steps.append(point))
        assert _stored(store, [WITH_FILE, NewBlob(DIGEST, TENSORS, token)]) == [None, None]
        assert sorted(steps[:3]) == ["file", "manifest", "names"]
        assert steps[3:] == ["index: before commit", "index: after commit"]
        assert [bytes(store.blobs.read(NS, each)) for each in (DIGEST, ITS_DIGEST)] == [DATA, MANIFEST]


def test_where_files_are_handed_over_no_blob_waits_for_a_new_directory(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    with lab.open() as store:
        store.blobs.receive_files(NS)
        _, token = handed_file(lab)
        monkeypatch.setattr(Disk, "fsync_directory", lambda _, path: synced.append(Path(path)))
        hand(store, DIGEST, token)
        assert synced == [lab.file_of(DIGEST).parent]


@pytest.mark.parametrize("alone", [True, False])
def test_a_handed_file_that_cannot_be_synced_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """With the manifest that came with it, though both have their names by then."""
    sync, failing = Disk.fsync, threading.Event()

    def fails(disk: Disk, descriptor: int) -> None:
        if failing.is_set() and os.fstat(descriptor).st_size == DIGEST.size_bytes:
            raise OSError(errno.EIO, "the device failed")
        sync(disk, descriptor)

    with lab.open() as store:
        store.blobs.receive_files(NS)
        _, token = handed_file(lab)
        monkeypatch.setattr(Disk, "fsync", fails)
        failing.set()
        problems = _stored(store, [*([] if alone else [WITH_FILE]), NewBlob(DIGEST, TENSORS, token)])
        assert [type(problem) for problem in problems] == [Unavailable] * (1 if alone else 2)
        assert store.blobs.find_missing(NS, [DIGEST, ITS_DIGEST]) == [DIGEST, ITS_DIGEST]
        assert (store.statistics.of(NS).reserved_bytes, lab.part_hashes, lab.stored_hashes) == (0, [], [])
        failing.clear()
        _, token = handed_file(lab)
        hand(store, DIGEST, token)
        assert bytes(store.blobs.read(NS, DIGEST)) == DATA


def test_of_a_group_that_is_not_listed_no_file_stays_but_one_that_cannot_go(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reported is the failure before, not that of the removal."""
    turn = SyntheticAgent(SMALL, 2).turn(700)
    first, *_ = new = [NewBlob(digest, TENSORS, data=data) for digest, data in turn.new_blobs.items()]

    def remove(disk: Disk, path: StrPath) -> None:
        if Path(path).name == first.digest.hash:
            raise OSError(errno.EIO, "it stays")
        Path(path).unlink(missing_ok=True)

    def fail(_disk: Disk, _path: StrPath) -> None:
        raise OSError(errno.ENOSPC, "no room for names")

    with lab.open() as store:
        store.blobs.receive_files(NS)
        monkeypatch.setattr(Disk, "remove", remove)
        monkeypatch.setattr(Disk, "fsync_directory", fail)
        problems = _stored(store, new)
        monkeypatch.undo()
        assert {problem.reason for problem in problems if isinstance(problem, KvasirError)} == {"DISK_FULL"}
        assert lab.stored_hashes == [first.digest.hash]


def test_a_token_without_a_file_leaves_an_interrupted_part_as_it_is(lab: Lab) -> None:
    with lab.open() as store:
        with store.blobs.open_writer(NS, DIGEST, TENSORS) as writer:
            writer.write(0, DATA[:1000])
        store.blobs.receive_files(NS)
        for token in ("0" * 32, "1" * 32):
            with pytest.raises(InvalidArgument) as refused:
                hand(store, DIGEST, token)
            assert refused.value.field == "handed"
        assert store.blobs.write_status(NS, DIGEST).received_bytes == store.statistics.of(NS).reserved_bytes == 1000
        with store.blobs.open_writer(NS, DIGEST, TENSORS) as writer:
            writer.write(1000, DATA[1000:])
            writer.finish()
        assert bytes(store.blobs.read(NS, DIGEST)) == DATA


def test_the_quota_holds_for_a_handed_file(lab: Lab) -> None:
    with lab.open(quota_bytes=DIGEST.size_bytes - 1) as store:
        store.blobs.receive_files(NS)
        path, token = handed_file(lab)
        with pytest.raises(ResourceExhausted) as refused:
            hand(store, DIGEST, token)
        assert refused.value.reason == "QUOTA_FULL"
        assert path.exists(), "the caller removes what was not taken"


def test_no_file_is_handed_over_where_the_disk_is_nearly_full(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.open() as store:
        store.blobs.receive_files(NS)
        files = HandedFiles(lab.root, NS)
        monkeypatch.setattr(handed_files, "LEFT_FREE_BYTES", shutil.disk_usage(lab.root).total)
        assert not files.write(files.new_token(), DATA)
        assert list((lab.directory_of(NS) / "handed").iterdir()) == []


def test_the_disk_begins_to_write_each_piece_of_a_large_file(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of a piece one call takes."""
    data, begun, write_some = os.urandom((2 << 20) + 99), list[tuple[int, int]](), os.write
    monkeypatch.setattr(handed_files, "_begin_writeback", lambda _, first, count: begun.append((first, count)))
    monkeypatch.setattr(os, "write", lambda descriptor, view: write_some(descriptor, view[:700_000]))
    with lab.open() as store:
        store.blobs.receive_files(NS)
        path, _ = handed_file(lab, data)
    assert path.read_bytes() == data
    assert [first for first, _ in begun] == [sum(count for _, count in begun[:place]) for place in range(len(begun))]
    assert sum(count for _, count in begun) == len(data)


def test_a_sealed_namespace_has_no_place_for_files(lab: Lab) -> None:
    with lab.seal(NS).open() as store:
        assert not store.blobs.receive_files(NS)
        files = HandedFiles(lab.root, NS)
        assert not files.write(files.new_token(), DATA)
        (lab.directory_of(NS) / "handed").mkdir(parents=True)
        with pytest.raises(InvalidArgument) as refused:
            hand(store, DIGEST, handed_file(lab)[1])
        assert refused.value.field == "handed"


def test_what_a_dead_engine_left_goes_at_the_start(lab: Lab) -> None:
    with lab.open() as store:
        store.blobs.receive_files(NS)
        path, _ = handed_file(lab)
    lab.open().close()
    assert not path.exists()


def test_what_a_dead_engine_left_goes_with_the_second_collection(lab: Lab) -> None:
    with lab.open() as store:
        write(store, DIGEST, DATA, TENSORS)
        store.blobs.receive_files(NS)
        path, _ = handed_file(lab)
        store.care.collect_garbage()
        assert path.exists(), "its engine may be about to name it"
        store.care.collect_garbage()
        assert not path.exists()


def test_one_of_a_group_that_is_refused_hinders_no_other(lab: Lab) -> None:
    blobs = SyntheticAgent(SMALL, 2).turn(256 * 3).new_blobs
    with lab.open() as store:
        store.blobs.receive_files(NS)
        tokens = [handed_file(lab, data)[1] for data in blobs.values()]
        files = [NewBlob(digest, TENSORS, token) for digest, token in zip(blobs, tokens, strict=True)]
        bad = NewBlob(DIGEST, TENSORS, handed_file(lab, DATA[:-1] + b"!")[1])
        problems = _stored(store, [files[0], bad, *files[1:]])
        assert [type(problem) for problem in problems] == [type(None), InvalidArgument, type(None), type(None)]
        assert [bytes(store.blobs.read(NS, digest)) for digest in blobs] == list(blobs.values())
        assert lab.part_hashes == []


def _stored(store: Store, blobs: list[NewBlob]) -> list[Exception | None]:
    opened = store.blobs.open_writers(NS, blobs)
    assert not any(isinstance(each, KvasirError) for each in opened)
    return finish_all([each for each in opened if not isinstance(each, KvasirError)])


def test_only_a_blob_that_has_a_file_is_looked_up_before_it_is_written(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is listed without one, and the index has one thread."""
    with lab.open() as store:
        store.blobs.receive_files(NS)
        token, read = handed_file(lab)[1], type(store._core.catalog).read
        looked_up: list[object] = []
        monkeypatch.setattr(
            type(store._core.catalog),
            "read",
            lambda *given: looked_up.append(given) or read(*given),  # type: ignore[func-returns-value]
        )
        assert _stored(store, [WITH_FILE, NewBlob(DIGEST, TENSORS, token)]) == [None, None]
        assert looked_up == []
        [again] = store.blobs.open_writers(NS, [WITH_FILE])
        assert not isinstance(again, KvasirError)
        assert (again.is_stored, len(looked_up)) == (True, 1)


def test_a_blob_whose_file_is_gone_is_written_again(lab: Lab) -> None:
    with lab.open() as store:
        write(store, DIGEST, DATA, TENSORS)
        lab.file_of(DIGEST).unlink()
        write(store, DIGEST, DATA, TENSORS)
        assert bytes(store.blobs.read(NS, DIGEST)) == DATA
        assert store.statistics.of(NS).blob_bytes == DIGEST.size_bytes


def test_a_file_that_changes_after_it_was_taken_is_damage_that_a_reader_finds(lab: Lab) -> None:
    with lab.open() as store:
        store.blobs.receive_files(NS)
        path, token = handed_file(lab)
        with path.open("r+b") as still_open:
            hand(store, DIGEST, token)
            still_open.seek(len(DATA) - 1)
            still_open.write(bytes((DATA[-1] ^ 1,)))
        with pytest.raises(KvasirError, match="damaged"):
            store.blobs.read(NS, DIGEST)
        assert store.blobs.find_missing(NS, [DIGEST]) == [DIGEST]
        hand(store, DIGEST, handed_file(lab)[1])
        assert Digest.of(store.blobs.read(NS, DIGEST)) == DIGEST


@pytest.mark.parametrize(
    "blob", [WITH_FILE, NewBlob(DIGEST, TENSORS, handed="its token")], ids=["with bytes", "handed"]
)
def test_a_blob_that_another_writer_listed_meanwhile_keeps_its_file(
    lab: Lab, blob: NewBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name would go to a file whose sync has only begun."""
    with lab.open() as store:
        store.blobs.receive_files(NS)
        if blob.handed:
            blob = replace(blob, handed=handed_file(lab)[1])
        begin, inodes = Blobs._begin, list[int]()

        def late(blobs: Blobs, *given: Any) -> None:
            if not inodes:
                inodes.append(0)
                write(store, blob.digest, MANIFEST if blob.data else DATA, blob.kind)
                inodes[0] = lab.file_of(blob.digest).stat().st_ino
            begin(blobs, *given)

        monkeypatch.setattr(Blobs, "_begin", late)
        [writer] = store.blobs.open_writers(NS, [blob])
        assert not isinstance(writer, KvasirError)
        finish_all([writer])
        assert lab.file_of(blob.digest).stat().st_ino == inodes[0]
        assert store.statistics.of(NS).reserved_bytes == 0
