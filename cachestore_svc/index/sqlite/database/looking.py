"""Opens a database for reading alone: nothing of it changes, not even its log."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.database.failures import cannot_write, translated
from cachestore_svc.index.sqlite.transaction import CatalogView


@contextlib.contextmanager
def looking_at(path: Path, disk: Disk) -> Iterator[CatalogView]:
    """A view of a database that is left as it is, its log too. Raises what a catalog raises."""
    try:
        connection = _connect_to_look(path, disk)
        try:
            yield CatalogView(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        translation = translated(error)
        # A table or a column that is not there.
        raise (index_damaged(str(error)) if translation is error else translation) from error
    finally:
        # Readers leave their shared memory, and a log without a byte.
        disk.remove(Path(f"{path}-shm"))
        log = Path(f"{path}-wal")
        if disk.size_bytes(log) == 0:
            disk.remove(log)


def _connect_to_look(path: Path, disk: Disk) -> sqlite3.Connection:
    has_log = bool(disk.size_bytes(Path(f"{path}-wal")))
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        connection.close()
        if not has_log or not cannot_write(error):
            raise
        # Reading a log takes a little room in shared memory, which a full disk has not. Alone one needs none; but then
        # the log is brought in at the end.
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    return connection
