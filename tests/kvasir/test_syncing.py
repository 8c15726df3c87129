"""What a loss of power leaves is decided by the system's own calls, which differ."""

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvasir import syncing
from kvasir.syncing import begin_writing_back, sync_directory, sync_disk_of, try_file


@pytest.mark.parametrize("refusal", [0, 45])
def test_a_mac_waits_for_the_disk_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    called = list[object]()

    def sync_volume_np(path: bytes, flags: int) -> int:
        called.append((path, flags))
        return refusal

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace(sync_volume_np=sync_volume_np))
    monkeypatch.setattr(os, "sync", lambda: called.append("sync"))
    sync_disk_of(tmp_path)
    assert called == [(os.fsencode(tmp_path), 3), *(["sync"] if refusal else [])]


def test_linux_waits_in_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: SimpleNamespace())
    monkeypatch.setattr(os, "sync", lambda: called.append("sync"))
    sync_disk_of(tmp_path)
    assert called == ["sync"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOENT, errno.ENOTSUP, errno.EIO])
def test_a_share_that_cannot_sync_directories_is_no_failing_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=r"Input/output") if number == errno.EIO else contextlib.nullcontext():
        sync_directory(tmp_path)


@pytest.mark.parametrize("can_begin", [True, False])
def test_bytes_are_begun_to_be_written_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_begin: bool
) -> None:
    called = list[object]()
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(b"some bytes")
        begin_writing_back(file.fileno())
        assert (tmp_path / "file").read_bytes() == b"some bytes"
        begin = lambda descriptor, first, count, flags: called.append((descriptor, first.value, count.value, flags))  # noqa: E731
        monkeypatch.setattr(syncing, "_sync_file_range", begin if can_begin else None)
        begin_writing_back(file.fileno())
        assert called == [(file.fileno(), 0, 0, 2)] * can_begin


@pytest.mark.parametrize("refusal", [0, errno.EISDIR, errno.EOPNOTSUPP])
def test_a_disk_is_tried_without_a_name_also_where_each_file_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """As old kernels, macOS and network shares: a kill would leave the file."""
    opened, begin, before = list[str](), os.open, tmp_path.stat().st_mtime_ns

    def watched(path: str | Path, flags: int, *mode: int) -> int:
        opened.append(str(path))
        if refusal:
            raise OSError(refusal, os.strerror(refusal))
        return begin(path, flags, *mode)

    monkeypatch.setattr(os, "open", watched)
    try_file(tmp_path)
    assert opened == [str(tmp_path)]
    assert tmp_path.stat().st_mtime_ns == before
    with pytest.raises(FileNotFoundError):
        try_file(tmp_path / "gone")


@pytest.mark.parametrize("has_nameless", [True, False])
def test_a_disk_that_takes_no_change_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_nameless: bool
) -> None:
    def refused(*_given: object, **_more: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def nameless(*_given: object) -> int:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

    monkeypatch.setattr(os, "open", refused if has_nameless else nameless)
    monkeypatch.setattr(os, "utime", refused)
    with pytest.raises(OSError, match="Read-only"):
        try_file(tmp_path)
