"""A note outside the data directory of how far a store's journal came: it shows that an older copy was put back.
Written after each commit, it may lag behind the journal, never run ahead of it. It counts for one store at one path,
and in one file, whose inode it names.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from cachestore_svc.journal.journal_lines import Position, checksum

Clock = Callable[[], int]
_SLOTS = 2  # two are written in turn, so that a torn write spoils one
_SLOT_BYTES = 4096


class Noted(NamedTuple):
    """How far a journal had come, and when. `writes`: of this file so far; the larger is the newer."""

    writes: int
    sequence: int
    chain: str
    unix_ms: int
    inode: int

    @property
    def position(self) -> Position:
        return Position(self.sequence, self.chain)


class LastRun:
    def __init__(self, notes: Path, data_dir: Path, store: str, now_unix_ms: Clock) -> None:
        path = place(notes, data_dir, store)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._now_unix_ms = now_unix_ms
        before = read(path)
        self._writes = before.writes if before else 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._inode = os.fstat(self._descriptor).st_ino

    def note(self, position: Position) -> None:
        """The journal has come so far, durably. Where that cannot be noted, a later start misses an older copy."""
        self._writes += 1
        noted = Noted(self._writes, *position, self._now_unix_ms(), self._inode)
        data = json.dumps(noted._asdict()).encode()
        with contextlib.suppress(OSError):
            line = f"{checksum('', data)} ".encode() + data + b"\n"
            os.pwrite(self._descriptor, line, self._writes % _SLOTS * _SLOT_BYTES)

    def begin(self, position: Position) -> None:
        """Whatever was noted before, the journal is there now."""
        for _ in range(_SLOTS):
            self.note(position)
        self._sync()

    def close(self) -> None:
        self._sync()
        os.close(self._descriptor)

    def _sync(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)


def place(notes: Path, data_dir: Path, store: str) -> Path:
    """Where the note of a store at a path lies. Raises OSError: this user has no home."""
    try:
        directory = notes.expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return directory / blake3(os.fsencode(data_dir.resolve()) + b"\n" + store.encode()).hexdigest()[:32]


def read(path: Path) -> Noted | None:
    """The newest note of a file; None if none is whole, or it is a copy."""
    found = []
    try:
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            for slot in range(_SLOTS):
                file.seek(slot * _SLOT_BYTES)
                proof, _, data = file.readline(_SLOT_BYTES).rstrip(b"\n").partition(b" ")
                if data and proof.decode("ascii", "replace") == checksum("", data):
                    found.append(Noted(**json.loads(data)))
    except OSError:
        return None
    newest = max(found, default=None)
    return newest if newest and newest.inode == inode else None
