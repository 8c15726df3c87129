"""The seam to the file system: what a sync is where fsync alone does not persist."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from kvasir.clients.archive_file import new_file
from kvasir.credentials import replace_private_text
from kvasir_orchestrator.journal import Journal
from kvasir_orchestrator.scenario import Scenario

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.local_directory import LocalDirectory

F_FULLFSYNC = 51  # its number on macOS


@pytest.mark.parametrize(
    ("error", "falls_back"),
    [(None, False), (errno.ENOTSUP, True), (errno.EINVAL, True), (errno.ENOTTY, True)],
)
def test_a_sync_is_f_fullfsync_where_it_exists_and_fsync_where_a_file_system_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None, falls_back: bool
) -> None:
    asked: list[str] = []

    def full_sync(descriptor: int, command: int) -> int:
        asked.append(f"fcntl {command}")
        if error:
            raise OSError(error, os.strerror(error))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    Disk().fsync_directory(tmp_path)
    assert asked == [f"fcntl {F_FULLFSYNC}", *(["fsync"] if falls_back else [])]


def test_a_full_sync_that_fails_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_sync(descriptor: int, command: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Disk().fsync_directory(tmp_path)


def test_keys_exports_and_journals_are_synced_as_blobs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master key that a loss of power takes opens nothing of what is sealed; what was exported may be deleted; a turn
    that a journal has lost is made twice."""
    asked: list[str] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: asked.append(f"fcntl {command}"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    replace_private_text(tmp_path / "master.key", "key")
    with new_file(tmp_path / "ada.kvasir") as file:
        file.write(b"archive")
    assert asked == [f"fcntl {F_FULLFSYNC}"] * 4  # the key, its name; the archive, its name
    with Journal.begin(tmp_path / "gossip.jsonl", Scenario.shipped("gossip"), "1") as journal:
        journal.finish()
    assert asked[4:] == [f"fcntl {F_FULLFSYNC}"] * 3  # its first line, its name, its last line


def test_no_symbolic_link_is_followed_at_the_end_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "secret")
    for act in (lambda: Disk().read(link, 10), lambda: Disk().open_append(link)):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            act()


def test_the_disk_has_begun_with_all_bytes_of_a_part_when_its_sync_comes(tmp_path: Path) -> None:
    """Else the files of a group are written one after the other, each when its own sync waits for it."""
    done = list[str]()

    class Noting(Disk):
        def write(self, descriptor: int, data: bytes | memoryview) -> None:
            done.append("write")
            super().write(descriptor, data)

        def begin_writing_back(self, descriptor: int) -> None:
            done.append("begin")
            super().begin_writing_back(descriptor)

        def fsync(self, descriptor: int) -> None:
            done.append("sync")
            super().fsync(descriptor)

    part = LocalDirectory(tmp_path, Noting()).of("default").begin("ab" * 32)
    done.clear()  # of its directories
    for piece in (b"first", b"second"):
        part.append(piece)
    part.sync()
    part.close()
    assert done == ["write", "begin", "write", "begin", "sync"]
