"""The database and the one thread with the one connection that owns it: several can corrupt a WAL database (SQLite
before 3.51.3). Waiting operations are committed together, each in a savepoint; no caller gets an answer before the
commit is durable.
"""

import errno
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

from kvasir.errors import Unavailable

from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.database.failures import cannot_write, is_full, translated
from cachestore_svc.index.sqlite.database.migrations import migrate
from cachestore_svc.index.sqlite.journaling.recording import Recorder
from cachestore_svc.index.sqlite.operations import Catalog, Operation
from cachestore_svc.index.sqlite.transaction import CatalogChange
from cachestore_svc.index.values import HOUSE
from cachestore_svc.journal.journal import Journal


class SqliteCatalog(Catalog):
    """A catalog in a file of a data directory."""

    def __init__(self, path: Path, disk: Disk, ballast: Ballast, now_unix_ms: Callable[[], int]) -> None:
        """Open, migrate and start the thread. Raises FailedPrecondition (DATA_TOO_NEW), DataLoss, ResourceExhausted."""
        super().__init__(now_unix_ms, translated)
        self._path = path
        self._disk = disk
        self._ballast = ballast
        self._recorder: Recorder | None = None
        self.is_migrated = False  # whether opening changed the database's form
        opened: Future[None] = Future()
        self._threads = [threading.Thread(target=self._live, args=(opened,), name="kvasir-index", daemon=True)]
        self._threads[0].start()
        opened.result()
        self.place = str(path.stat().st_ino)

    def record_with(self, journal: Journal) -> None:
        """From now on write to the journal what each commit changes of agents and versions, before it commits."""
        recorder = Recorder(journal)

        def begin(transaction: CatalogChange) -> None:
            recorder.begin(transaction)
            self._recorder = recorder

        self._submit(Operation(HOUSE, begin, is_write=False)).result()

    def rebuild_indexes(self) -> None:
        """Rebuild SQLite's own indexes from its tables. Raises DataLoss when these contradict themselves."""
        try:
            self._submit(Operation(HOUSE, lambda rows: rows.run("REINDEX"), is_write=True)).result()
        except sqlite3.IntegrityError as error:
            raise index_damaged(str(error)) from error

    # --- on the index thread ---

    def _live(self, opened: "Future[None]") -> None:
        try:
            connection = self._open()
        except BaseException as error:  # noqa: BLE001  it belongs to the opener of the store
            opened.set_exception(translated(error))
            return
        opened.set_result(None)
        while self._is_wanted(self._writes_came, self._reads, self._writes):
            self._take_reads(connection)
            self._take_writes(connection)
        connection.close()

    def _open(self) -> sqlite3.Connection:
        # SQLite would make it readable for all; the log beside it takes its mode.
        self._disk.close(self._disk.open_append(self._path))
        connection = sqlite3.connect(self._path, isolation_level=None, cached_statements=256)
        try:
            # Exclusive: no shared-memory file, and no second connection by mistake.
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("PRAGMA temp_store=MEMORY")
            if sys.platform == "darwin":
                connection.execute("PRAGMA fullfsync=ON")
                connection.execute("PRAGMA checkpoint_fullfsync=ON")
            self.is_migrated = migrate(connection, self._now_unix_ms())
        except BaseException:
            connection.close()
            raise
        self._disk.fsync_directory(self._path.parent)
        return connection

    def _write(
        self, connection: sqlite3.Connection, operations: list[Operation], more: Iterable[Operation] = ()
    ) -> None:
        try:
            answers = self._commit(connection, chain(tuple(operations), more))
        except (sqlite3.Error, OSError, Unavailable) as error:
            # The transaction sank as a whole. Alone, each gets its own verdict.
            if len(operations) > 1:
                for operation in operations:
                    self._write(connection, [operation])
            else:
                self._write_alone(connection, operations[0], error)
            return
        for answer in answers:
            answer()

    def _write_alone(self, connection: sqlite3.Connection, operation: Operation, error: Exception) -> None:
        if operation.frees_space and is_full(error) and self._ballast.give_up():
            self._write(connection, [operation])
        else:
            operation.answer.set_exception(translated(self._cause(error)))

    def _cause(self, error: Exception) -> Exception:
        """The disk's own error where the system made it read-only: SQLite reports an I/O error without a cause."""
        if isinstance(error, sqlite3.Error) and cannot_write(error):
            try:
                self._disk.try_file(self._path.parent)
            except OSError as failure:
                return failure if failure.errno == errno.EROFS else error
        return error

    def _commit(self, connection: sqlite3.Connection, operations: Iterable[Operation]) -> list[Callable[[], None]]:
        """One transaction; the calls that answer the callers. With any error it is rolled back."""
        answers: list[Callable[[], None]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation in operations:
                answers += self._in_savepoint(connection, operation, sqlite3.OperationalError)
            if self._recorder is not None:
                self._recorder.record(CatalogChange(connection))
            self._disk.reached("index: before commit")
            connection.execute("COMMIT")
        except BaseException:
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            finally:
                if self._recorder is not None:
                    self._recorder.journal.take_back()
            raise
        if self._recorder is not None:
            self._recorder.journal.keep()
        self._disk.reached("index: after commit")
        return answers
