"""A copy of an index whose store runs is the index as of a commit, whatever the store writes meanwhile."""

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from cachestore_svc.index.sqlite.database.copying import copy_database

_ROWS = 40


def test_a_log_that_begins_again_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy, copyfile = tmp_path / "index", tmp_path / "copy", shutil.copyfile
    copied: list[Path] = []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as index:
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "wal_autocheckpoint=0"):
            index.execute(f"PRAGMA {pragma}")
        index.execute("CREATE TABLE pages (id INTEGER PRIMARY KEY, number, padding)")
        # A row a page, in all of which a reader finds one number.
        index.executemany("INSERT INTO pages VALUES (?, 0, zeroblob(3900))", [(each,) for each in range(_ROWS)])
        index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        index.execute("UPDATE pages SET number = 1 WHERE id < ?", [_ROWS // 2])
        first_bytes = Path(f"{path}-wal").stat().st_size
        for number in (2, 3):
            index.execute("UPDATE pages SET number = ?", [number])
        index.execute("PRAGMA wal_checkpoint(PASSIVE)")
        os.utime(path, (1, 1))

        def copy_slowly(source: str | Path, into: Path) -> None:
            if not str(source).endswith("-wal") or copied:
                copyfile(source, into)
                return
            copied.append(into)
            with Path(source).open("rb", buffering=0) as log, into.open("wb") as out:
                out.write(log.read(first_bytes + 4096))
                for number in (4, 5):
                    index.execute("UPDATE pages SET number = ?", [number])
                out.write(log.read())

        monkeypatch.setattr(shutil, "copyfile", copy_slowly)
        copy_database(path, copy, sleep=lambda _: None)
    assert copied
    with contextlib.closing(sqlite3.connect(copy)) as found:
        assert found.execute("SELECT number, count(*) FROM pages GROUP BY number").fetchall() == [(5, _ROWS)]


def test_a_copy_of_an_index_that_is_a_link_is_no_link(tmp_path: Path) -> None:
    real, link, copy = tmp_path / "real", tmp_path / "index", tmp_path / "copy"
    with contextlib.closing(sqlite3.connect(real, isolation_level=None)) as index:
        index.execute("PRAGMA journal_mode=WAL")
    os.utime(real, (1, 1))
    link.symlink_to(real)
    before = real.read_bytes()
    copy_database(link, copy)
    assert (copy.is_symlink(), real.read_bytes() == before) == (False, True)
