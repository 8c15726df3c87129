"""Directories of one program: what remains of them when the program ends, however it ends."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvasir.syncing import Scratch

_PROGRAM = """
import sys
from pathlib import Path
from kvasir.syncing import Scratch
scratch = Scratch("x-", Path(sys.argv[1]))
(scratch.path / "secret").write_text("KV")
print(scratch.path, flush=True)
sys.stdin.read()
if "keep" in sys.argv:
    scratch.keep()
"""


def _begun(root: Path, *words: str) -> tuple["subprocess.Popen[str]", Path]:
    argv, pipe = [sys.executable, "-c", _PROGRAM, str(root), *words], subprocess.PIPE
    program = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)
    assert program.stdout is not None
    return program, Path(program.stdout.readline().strip())


def test_a_killed_programs_directory_goes_with_the_next_program_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed, left = _begun(tmp_path)
    living, in_use = _begun(tmp_path)
    with killed, living:
        with Scratch("x-", tmp_path):
            assert (left / "secret").exists()
        killed.kill()
        killed.wait()
        for other in ("x", "y-1", "x-file"):  # not of the prefix; no directory
            (tmp_path / other).touch()
        with Scratch("x-", tmp_path) as new:
            assert set(tmp_path.iterdir()) == {in_use, new, *(tmp_path / each for each in ("x", "y-1", "x-file"))}
        living.communicate("")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x", "x-file", "y-1"]


def test_a_directory_that_is_kept_stays_when_the_next_program_begins(tmp_path: Path) -> None:
    program, kept = _begun(tmp_path, "keep")
    program.communicate("")
    with Scratch("x-", tmp_path):
        assert (kept / "secret").read_text() == "KV"


def test_a_directory_is_kept_on_a_disk_without_room_for_one_more_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the full disk ended the program, and its logs show that."""
    opened = os.open

    def full(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *more, **named)

    scratch = Scratch("x-", tmp_path)
    (scratch.path / "log").write_text("full")
    with monkeypatch.context() as without_room:
        without_room.setattr(os, "open", full)
        scratch.keep()
    with Scratch("x-", tmp_path):
        assert (scratch.path / "log").read_text() == "full"


def test_a_block_that_fails_leaves_nothing_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "x-link").symlink_to(tmp_path / "other")
    with pytest.raises(FileNotFoundError), Scratch("x-", tmp_path) as made:
        (made / "folder" / "file").touch()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "x-link"]


@pytest.mark.parametrize("chosen", ["x-results", "x-20261130"])
def test_a_directory_that_a_user_named_alike_stays(tmp_path: Path, chosen: str) -> None:
    (tmp_path / chosen).mkdir()
    with Scratch("x-", tmp_path):
        assert (tmp_path / chosen).exists()


def test_a_disk_without_locks_or_with_another_owner_has_directories_which_nobody_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "as NFS does for a directory")

    owner = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: owner)
    with Scratch("x-", tmp_path) as of_other:
        pass
    assert not of_other.exists()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with Scratch("x-", tmp_path) as first, Scratch("x-", tmp_path):
        assert first.exists()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_opened_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="too many"):
        Scratch("x-", tmp_path)
