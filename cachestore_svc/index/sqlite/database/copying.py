"""Copies the database of a store that may run: the store holds its lock, so the files are copied and not read.

The database's file changes in checkpoints alone. Between them its log grows; the first commit after one may begin the
log again, over its old frames, with another header. If file and header are the same before and after both were copied,
neither came between: the copies are the database as of a commit.
"""

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvasir.errors import Unavailable
from kvasir.waits import PAUSE_S

from cachestore_svc.index.refusals import index_damaged

_TRIES = 50
_LOG_HEADER_BYTES = 32


class _Seen(NamedTuple):
    inode: int
    size_bytes: int
    changed_ns: int
    log_header: bytes  # its salts are new each time when the log begins


def copy_database(
    path: Path, into: Path, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Write the database as of a commit to a new file. `clock` gives Unix seconds. Raises OSError, Unavailable
    (INDEX_FAILED), and DataLoss (INDEX_DAMAGED)."""
    for _ in range(_TRIES):
        before = _seen(path)
        # A file's time is that of the kernel's last tick: one as new as this may change within the same tick.
        if abs(clock() - before.changed_ns / 1e9) > PAUSE_S:
            shutil.copyfile(path, into)  # a link's bytes: later statements write to the copy
            log = Path(f"{into}-wal")
            log.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}-wal", log)
            if _seen(path) == before:
                return _bring_in_log(into)
        sleep(PAUSE_S)
    raise Unavailable("the index changes too often to be copied; try again", reason="INDEX_FAILED", retry_after_s=5)


def _seen(path: Path) -> _Seen:
    status, header = path.stat(), b""
    with contextlib.suppress(FileNotFoundError), Path(f"{path}-wal").open("rb") as log:
        header = log.read(_LOG_HEADER_BYTES)
    return _Seen(status.st_ino, status.st_size, status.st_mtime_ns, header)


def _bring_in_log(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        try:
            connection.execute("PRAGMA journal_mode=DELETE")
            found = [str(answer) for (answer,) in connection.execute("PRAGMA integrity_check")]
        except sqlite3.DatabaseError as error:
            raise index_damaged(str(error)) from error
    if found != ["ok"]:
        raise index_damaged(found[0])
