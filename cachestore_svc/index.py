"""The database and the one thread that owns it.

Several connections that write and checkpoint can corrupt a WAL database (SQLite before 3.51.3), so there is one
connection, used for reads and writes by one thread. Operations are functions of `Rows`; what is waiting is
committed together, each in a savepoint of its own, and nobody hears of success before the commit is durable.
"""

import queue
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvasir.errors import DataLoss, KvasirError, Unavailable
from sqlite_utils import Database

from cachestore_svc.ballast import Ballast
from cachestore_svc.disk import Disk, disk_full
from cachestore_svc.migrations import migrate

_Answer = TypeVar("_Answer")
_MOST_PER_COMMIT = 256


class Rows:
    """What an operation may do: run statements, and name what to do once they are durable."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._after_commit: list[Callable[[], None]] = []

    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters).fetchall()

    def one(self, sql: str, *parameters: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(sql, parameters).fetchone()
        return row

    def run(self, sql: str, *parameters: object) -> int:
        """Run a statement that writes; how many rows it touched."""
        return self._connection.execute(sql, parameters).rowcount

    def insert(self, sql: str, *parameters: object) -> int:
        """Run an INSERT; the new row's id."""
        return int(self._connection.execute(sql, parameters).lastrowid or 0)

    def many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        self._connection.executemany(sql, parameters)

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do this on the index thread once the operation is durable; it must be quick and must not raise."""
        self._after_commit.append(action)


@dataclass
class _Operation:
    work: Callable[[Rows], Any]
    is_write: bool
    frees_space: bool = False
    answer: Future[Any] = field(default_factory=Future)


class Index:
    """Runs operations against the database, in the order they came, reads before the writes they wait with."""

    def __init__(self, path: Path, disk: Disk, ballast: Ballast, now_unix_ms: Callable[[], int]) -> None:
        """Open, migrate and start the thread. Raises FailedPrecondition (DATA_TOO_NEW), DataLoss, ResourceExhausted."""
        self._path = path
        self._disk = disk
        self._ballast = ballast
        self._now_unix_ms = now_unix_ms
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_closed = False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(opened,), name="kvasir-index", daemon=True)
        self._thread.start()
        opened.result()

    def read(self, work: Callable[[Rows], _Answer]) -> _Answer:
        """What `work` answers. It must not write."""
        answer: _Answer = self._submit(_Operation(work, is_write=False)).result()
        return answer

    def write(self, work: Callable[[Rows], _Answer], *, frees_space: bool = False) -> _Answer:
        """What `work` answers, once it is durable. All of it took effect, or, when this raises, nothing.

        `work` may run twice, so it touches nothing but rows. `frees_space` lets it use the ballast of a full disk.
        """
        answer: _Answer = self._submit(_Operation(work, is_write=True, frees_space=frees_space)).result()
        return answer

    def write_later(self, work: Callable[[Rows], None]) -> None:
        """Write without waiting and without telling; for what may be lost, such as times of last use."""
        self._submit(_Operation(work, is_write=True))

    def close(self) -> bool:
        """Finish what waits, and end the thread. False when that was asked before."""
        with self._gate:
            is_first = not self._is_closed
            self._is_closed = True
            if is_first:
                self._queue.put(None)
        self._thread.join()
        return is_first

    def _submit(self, operation: _Operation) -> "Future[Any]":
        with self._gate:
            if self._is_closed:
                raise Unavailable("the store is closed", reason="CLOSED")
            self._queue.put(operation)
        return operation.answer

    # --- on the index thread ---

    def _live(self, opened: "Future[None]") -> None:
        try:
            connection = self._open()
        except BaseException as error:  # noqa: BLE001  it belongs to whoever opens the store
            opened.set_exception(_translated(error))
            return
        opened.set_result(None)
        while batch := self._next_batch():
            try:
                for operation in batch:
                    if not operation.is_write:
                        self._read(connection, operation)
                self._write(connection, [operation for operation in batch if operation.is_write])
            except BaseException as error:  # noqa: BLE001  a caller that waits for ever would be worse
                for operation in batch:
                    if not operation.answer.done():
                        operation.answer.set_exception(error)
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
            migrate(Database(connection), self._now_unix_ms())
        except BaseException:
            connection.close()
            raise
        self._disk.fsync_directory(self._path.parent)
        return connection

    def _next_batch(self) -> list[_Operation]:
        """At least one operation, or none when the index closes."""
        batch: list[_Operation] = []
        operation = self._queue.get()
        while operation is not None:
            batch.append(operation)
            if len(batch) == _MOST_PER_COMMIT or self._queue.empty():
                return batch
            operation = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch

    def _read(self, connection: sqlite3.Connection, operation: _Operation) -> None:
        try:
            operation.answer.set_result(operation.work(Rows(connection)))
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            operation.answer.set_exception(_translated(error))

    def _write(self, connection: sqlite3.Connection, operations: list[_Operation]) -> None:
        if not operations:
            return
        try:
            answers = self._commit(connection, operations)
        except sqlite3.Error as error:
            # The transaction sank as a whole. Alone, each gets its own verdict.
            if len(operations) > 1:
                for operation in operations:
                    self._write(connection, [operation])
            else:
                self._write_alone(connection, operations[0], error)
            return
        for answer in answers:
            answer()

    def _write_alone(self, connection: sqlite3.Connection, operation: _Operation, error: sqlite3.Error) -> None:
        if operation.frees_space and _is_full(error) and self._ballast.give_up():
            self._write(connection, [operation])
        else:
            operation.answer.set_exception(_translated(error))

    def _commit(self, connection: sqlite3.Connection, operations: list[_Operation]) -> list[Callable[[], None]]:
        """One transaction. Raises sqlite3.Error when it is rolled back; else answers what tells the callers."""
        answers: list[Callable[[], None]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation in operations:
                answers += self._in_savepoint(connection, operation)
            self._disk.reached("index: before commit")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._disk.reached("index: after commit")
        return answers

    def _in_savepoint(self, connection: sqlite3.Connection, operation: _Operation) -> list[Callable[[], None]]:
        """Run one operation so that its failure undoes only itself. What to do after the commit."""
        rows = Rows(connection)
        connection.execute("SAVEPOINT operation")
        try:
            result = operation.work(rows)
        except sqlite3.OperationalError:
            # A full disk or a failing one may already have ended the transaction: no savepoint is left to go back to.
            raise
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            connection.execute("ROLLBACK TO operation")
            connection.execute("RELEASE operation")
            failure = _translated(error)
            return [lambda: operation.answer.set_exception(failure)]
        connection.execute("RELEASE operation")
        return [*rows._after_commit, lambda: operation.answer.set_result(result)]


def _is_full(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _translated(error: BaseException) -> BaseException:
    """The error in words that a caller can act on. What is a bug of ours stays what it is."""
    if isinstance(error, KvasirError) or not isinstance(error, sqlite3.Error):
        return error
    if _is_full(error):
        return disk_full("the index")
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DataLoss(f"the index is damaged: {error}", reason="INDEX_DAMAGED")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY):
        return Unavailable(f"the index cannot be used: {error}", reason="INDEX_FAILED", retry_after_s=1.0)
    return error
