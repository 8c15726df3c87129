"""What a loss of power leaves is decided by the system's own calls, which differ."""

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvasir.syncing import sync_directory, sync_disk_of


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
