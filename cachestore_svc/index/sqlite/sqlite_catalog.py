"""The database and the one thread with the one connection that owns it: several can corrupt a WAL database (SQLite
before 3.51.3). Waiting operations are committed together, each in a savepoint; no caller gets an answer before the
commit is durable. Namespaces take turns.
"""

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from kvasir.errors import Unavailable
from kvasir.server.fair_shares import RoundRobin

from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.refusals import index_damaged
from cachestore_svc.index.sqlite.database.failures import is_full, translated
from cachestore_svc.index.sqlite.database.migrations import migrate
from cachestore_svc.index.sqlite.journaling.recording import Recorder
from cachestore_svc.index.sqlite.transaction import CatalogChange, CatalogView
from cachestore_svc.index.values import HOUSE
from cachestore_svc.journal.journal import Journal
from cachestore_svc.sealing.sealed_names import PLAIN_NAMES, PlainNames

_Answer = TypeVar("_Answer")
# One commit holds as many writes as this, or as many as begin within this time. Reads have a turn of the same length
# before it: a newcomer waits for one turn of each kind, not for all that waits.
MAX_WRITES_PER_COMMIT = 256
MAX_TURN_MS = 10


@dataclass
class _Operation:
    namespace: str
    work: Callable[[CatalogChange], Any]
    is_write: bool
    frees_space: bool = False
    answer: Future[Any] = field(default_factory=Future)


class SqliteCatalog:
    """Runs operations: namespaces in turn, each one's in order. Its methods from any thread."""

    def __init__(self, path: Path, disk: Disk, ballast: Ballast, now_unix_ms: Callable[[], int]) -> None:
        """Open, migrate and start the thread. Raises FailedPrecondition (DATA_TOO_NEW), DataLoss, ResourceExhausted."""
        self._path = path
        self._disk = disk
        self._ballast = ballast
        self._now_unix_ms = now_unix_ms
        self._gate = threading.Condition()  # guards all four below, and is notified of new operations
        self._reads: RoundRobin[_Operation] = RoundRobin()
        self._writes: RoundRobin[_Operation] = RoundRobin()
        self._is_closed = False
        self._recorder: Recorder | None = None
        self.damage: Mapping[str, str] = {}  # namespaces whose entries are damaged, and how
        self._names_of: Callable[[str], PlainNames] = lambda _: PLAIN_NAMES
        self.is_migrated = False  # whether opening changed the database's form
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(opened,), name="kvasir-index", daemon=True)
        self._thread.start()
        opened.result()

    def read(self, namespace: str, work: Callable[[CatalogView], _Answer]) -> _Answer:
        """The answer of `work` about the namespace (HOUSE: the store itself). It sees every acknowledged write."""
        answer: _Answer = self._submit(_Operation(namespace, work, is_write=False)).result()
        return answer

    def write(self, namespace: str, work: Callable[[CatalogChange], _Answer], *, frees_space: bool = False) -> _Answer:
        """The answer of `work`, once it is durable. All of it took effect, or, when this raises, nothing. `work` may
        run twice, so it touches nothing else. `frees_space` lets it use the ballast of a full disk.
        """
        operation = _Operation(namespace, work, is_write=True, frees_space=frees_space)
        answer: _Answer = self._submit(operation).result()
        return answer

    def write_later(self, namespace: str, work: Callable[[CatalogChange], None]) -> None:
        """Write without waiting and without an answer; for what may be lost, such as times of last use."""
        self._submit(_Operation(namespace, work, is_write=True))

    def record_with(self, journal: Journal) -> None:
        """From now on write to the journal what each commit changes of agents and versions, before it commits."""
        recorder = Recorder(journal)

        def begin(transaction: CatalogChange) -> None:
            recorder.begin(transaction)
            self._recorder = recorder

        self._submit(_Operation(HOUSE, begin, is_write=False)).result()

    def keep_out(self, damage: Mapping[str, str]) -> None:
        """From now on refuse all that these namespaces ask: their entries are damaged, in these words."""
        self.damage = damage

    def seal(self, names_of: Callable[[str], PlainNames]) -> None:
        """From now on what a sealed namespace asks has plain names, and its entries have sealed ones."""
        self._names_of = names_of

    def rebuild_indexes(self) -> None:
        """Rebuild SQLite's own indexes from its tables. Raises DataLoss when these contradict themselves."""
        try:
            self._submit(_Operation(HOUSE, lambda rows: rows.run("REINDEX"), is_write=True)).result()
        except sqlite3.IntegrityError as error:
            raise index_damaged(str(error)) from error

    def close(self) -> bool:
        """Finish the operations that wait. False when it was closed before."""
        with self._gate:
            is_first = not self._is_closed
            self._is_closed = True
            self._gate.notify()
        self._thread.join()
        return is_first

    def _submit(self, operation: _Operation) -> "Future[Any]":
        if words := self.damage.get(operation.namespace):
            raise index_damaged(words)
        with self._gate:
            if self._is_closed:
                raise Unavailable("the store is closed", reason="CLOSED")
            (self._writes if operation.is_write else self._reads).put(operation.namespace, operation)
            self._gate.notify()
        return operation.answer

    # --- on the index thread ---

    def _live(self, opened: "Future[None]") -> None:
        try:
            connection = self._open()
        except BaseException as error:  # noqa: BLE001  it belongs to the opener of the store
            opened.set_exception(translated(error))
            return
        opened.set_result(None)
        while self._is_wanted():
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

    def _is_wanted(self) -> bool:
        """Wait until something waits; False when nothing does and the index closes."""
        with self._gate:
            self._gate.wait_for(lambda: self._is_closed or len(self._reads) or len(self._writes))
            return len(self._reads) > 0 or len(self._writes) > 0

    def _next(self, waiting: RoundRobin[_Operation]) -> _Operation | None:
        with self._gate:
            taken = waiting.take()
        return taken[1] if taken else None

    def _is_over(self, began_ms: int) -> bool:
        """Whether a turn that began then has had its time. A clock that steps ends it early, never late."""
        return not 0 <= self._now_unix_ms() - began_ms < MAX_TURN_MS

    def _take_reads(self, connection: sqlite3.Connection) -> None:
        began_ms = self._now_unix_ms()
        while operation := self._next(self._reads):
            self._read(connection, operation)
            if self._is_over(began_ms):
                return

    def _take_writes(self, connection: sqlite3.Connection) -> None:
        began_ms = self._now_unix_ms()
        first = self._next(self._writes)
        if first is None:
            return
        taken = [first]
        try:
            self._write(connection, taken, self._more_writes(taken, began_ms))
        except BaseException as error:  # noqa: BLE001  a caller that waits for ever would be worse
            for operation in taken:
                if not operation.answer.done():
                    operation.answer.set_exception(error)

    def _more_writes(self, taken: list[_Operation], began_ms: int) -> Iterator[_Operation]:
        """Further writes for the commit of those `taken`, each asked for when the one before it has run."""
        while len(taken) < MAX_WRITES_PER_COMMIT and not self._is_over(began_ms):
            operation = self._next(self._writes)
            if operation is None:
                return
            taken.append(operation)
            yield operation

    def _read(self, connection: sqlite3.Connection, operation: _Operation) -> None:
        rows = self._rows_of(connection, operation)
        try:
            operation.answer.set_result(operation.work(rows))
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            operation.answer.set_exception(translated(error))

    def _rows_of(self, connection: sqlite3.Connection, operation: _Operation) -> CatalogChange:
        return CatalogChange(connection, operation.namespace, self._names_of(operation.namespace))

    def _write(
        self, connection: sqlite3.Connection, operations: list[_Operation], more: Iterable[_Operation] = ()
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

    def _write_alone(self, connection: sqlite3.Connection, operation: _Operation, error: Exception) -> None:
        if operation.frees_space and is_full(error) and self._ballast.give_up():
            self._write(connection, [operation])
        else:
            operation.answer.set_exception(translated(error))

    def _commit(self, connection: sqlite3.Connection, operations: Iterable[_Operation]) -> list[Callable[[], None]]:
        """One transaction; the calls that answer the callers. Whatever it raises, it is rolled back."""
        answers: list[Callable[[], None]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation in operations:
                answers += self._in_savepoint(connection, operation)
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

    def _in_savepoint(self, connection: sqlite3.Connection, operation: _Operation) -> list[Callable[[], None]]:
        """Run one operation so that its failure undoes only itself. What to do after the commit."""
        rows = self._rows_of(connection, operation)
        connection.execute("SAVEPOINT operation")
        try:
            result = operation.work(rows)
        except sqlite3.OperationalError:
            # A full disk or a failing one may already have ended the transaction: no savepoint is left to go back to.
            raise
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            connection.execute("ROLLBACK TO operation")
            connection.execute("RELEASE operation")
            failure = translated(error)
            return [lambda: operation.answer.set_exception(failure)]
        connection.execute("RELEASE operation")
        return [*rows.after_commit_actions, lambda: operation.answer.set_result(result)]
