"""Opening a data directory: lock it, open its index, count what is stored, sweep what a crash left; and letting go."""

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.errors import FailedPrecondition, Unavailable

from cachestore_svc import check
from cachestore_svc.ballast import Ballast
from cachestore_svc.blob_writer import Writers
from cachestore_svc.blobs import BlobFiles
from cachestore_svc.core import Core
from cachestore_svc.disk import Disk
from cachestore_svc.events import History
from cachestore_svc.index import Index, Rows
from cachestore_svc.records import StoreConfig
from cachestore_svc.space import Space

_DATABASE = "kvasir.sqlite3"


@dataclass(frozen=True)
class Opened:
    """An open data directory."""

    core: Core
    lock: int  # descriptor whose lock says that the directory is ours

    def close(self) -> None:
        """Finish what the index has, then unlock. A second time does nothing."""
        if self.core.index.close():
            os.close(self.lock)


def open_directory(
    config: StoreConfig, clock: Callable[[], float], token_hex: Callable[[int], str], disk: Disk, *, sweeps: bool
) -> Opened:
    """See cachestore_svc.store.Store.open."""
    disk.make_directory(config.data_dir)
    lock = _lock(config.data_dir / "lock")
    try:
        core = _open(config, clock, token_hex, disk)
        try:
            if sweeps:
                check.sweep_at_start(core)
            core.ballast.fill(config.free_disk_reserve_bytes)
        except BaseException:
            core.index.close()
            raise
        return Opened(core, lock)
    except BaseException:
        os.close(lock)
        raise


def _open(config: StoreConfig, clock: Callable[[], float], token_hex: Callable[[int], str], disk: Disk) -> Core:
    def now_unix_ms() -> int:
        return int(clock() * 1000)

    ballast = Ballast(config.data_dir / "ballast", config.ballast_bytes, disk)
    path = config.data_dir / _DATABASE
    files = BlobFiles(config.data_dir / "namespaces", disk)
    _check_database_is_there(path, files, disk)
    index = Index(path, disk, ballast, now_unix_ms)
    try:
        incarnation = _incarnation(index, path, token_hex)
        space = Space(config, disk, ballast, index.read(_stored_bytes))
        writers = Writers(files, disk, space, now_unix_ms)
        history = History(incarnation, config.event_history)
        return Core(config, disk, ballast, index, files, space, writers, history, now_unix_ms)
    except BaseException:
        index.close()
        raise


def _check_database_is_there(path: Path, files: BlobFiles, disk: Disk) -> None:
    """To a new database every blob would be one that nobody names: the start would remove them all."""
    if not disk.size_bytes(path) and files.has_any():
        raise FailedPrecondition(
            f"the database {path} is missing, but {files.root} holds blobs: put the database back, or, to begin anew, "
            f"move {files.root} away",
            reason="INDEX_MISSING",
        )


def _lock(path: Path) -> int:
    """Take the directory for this process. The lock ends with the process, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "another process"
        os.close(descriptor)
        raise Unavailable(
            f"the data directory {path.parent} is in use by process {holder}", reason="LOCKED", metadata={"pid": holder}
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _incarnation(index: Index, database: Path, token_hex: Callable[[int], str]) -> str:
    """The name of this history. A database copied back lies in another inode: its history went on without it."""
    inode = str(database.stat().st_ino)

    def find(rows: Rows) -> str | None:
        facts = dict(rows.all("SELECT name, value FROM facts"))
        return facts.get("incarnation") if facts.get("inode") == inode else None

    def begin(rows: Rows) -> str:
        name = token_hex(8)
        rows.many("INSERT OR REPLACE INTO facts VALUES (?, ?)", [("incarnation", name), ("inode", inode)])
        return name

    return index.read(find) or index.write(begin)


def _stored_bytes(rows: Rows) -> dict[str, int]:
    return dict(
        rows.all(
            """SELECT namespaces.name, SUM(blobs.size_bytes)
                FROM blobs JOIN namespaces ON namespaces.id = blobs.namespace_id GROUP BY namespaces.id"""
        )
    )
