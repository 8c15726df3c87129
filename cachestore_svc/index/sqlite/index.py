"""The database and the one thread that owns it.

Several connections that write and checkpoint can corrupt a WAL database (SQLite before 3.51.3), so there is one
connection, used for reads and writes by one thread. Operations are functions of `Rows`; what is waiting is
committed together, each in a savepoint of its own, and nobody hears of success before the commit is durable. Namespaces
take turns, so that nobody waits behind all that another has asked for.
"""

import contextlib
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvasir.errors import DataLoss, KvasirError, Unavailable
from kvasir.server.fair_shares import RoundRobin
from sqlite_utils import Database

from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.disk import Disk, disk_full, is_no_room, refusal
from cachestore_svc.index.sqlite.migrations import migrate

_Answer = TypeVar("_Answer")
# One commit holds as many writes as this, or as many as begin within this time. Reads have a turn of the same length
# before it: whoever comes waits for one turn of each kind, not for all that waits.
MAX_WRITES_PER_COMMIT = 256
MAX_TURN_MS = 10
# A question about thousands of blobs is asked as operations of this many each (a millisecond or two), so that other
# namespaces' operations come in between.
SLICE = 500
# What the store asks of itself: opening, checking, collecting everywhere. No credential has this namespace.
HOUSE = ""
# What Python says of text that is no UTF-8.
_NO_TEXT = "Could not decode"


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


class Recorder(Protocol):
    """Is told of every commit on the index thread, before it happens."""

    def begin(self, rows: Rows) -> None:
        """From now on it is told."""

    def record(self, rows: Rows) -> None:
        """A transaction is about to be committed. What this raises rolls it back."""

    def keep(self) -> None:
        """It was committed."""

    def take_back(self) -> None:
        """It was not, whether it was recorded or not."""


@dataclass
class _Operation:
    work: Callable[[Rows], Any]
    is_write: bool
    frees_space: bool = False
    answer: Future[Any] = field(default_factory=Future)


class Index:
    """Runs operations against the database: namespaces in turn, and the reads and the writes of each in the order they
    came. A read sees every write that was acknowledged before it was asked, and no write that is not durable.
    """

    def __init__(self, path: Path, disk: Disk, ballast: Ballast, now_unix_ms: Callable[[], int]) -> None:
        """Open, migrate and start the thread. Raises FailedPrecondition (DATA_TOO_NEW), DataLoss, ResourceExhausted."""
        self._path = path
        self._disk = disk
        self._ballast = ballast
        self._now_unix_ms = now_unix_ms
        # Guards all four below, and is notified of new operations.
        self._gate = threading.Condition()
        self._reads: RoundRobin[_Operation] = RoundRobin()
        self._writes: RoundRobin[_Operation] = RoundRobin()
        self._is_closed = False
        self._recorder: Recorder | None = None
        self._damage: Mapping[str, str] = {}
        # Whether opening changed the database's form.
        self.is_migrated = False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(opened,), name="kvasir-index", daemon=True)
        self._thread.start()
        opened.result()

    def read(self, namespace: str, work: Callable[[Rows], _Answer]) -> _Answer:
        """What `work` answers, asked for by the namespace (HOUSE: by the store itself). It must not write."""
        answer: _Answer = self._submit(namespace, _Operation(work, is_write=False)).result()
        return answer

    def write(self, namespace: str, work: Callable[[Rows], _Answer], *, frees_space: bool = False) -> _Answer:
        """What `work` answers, once it is durable. All of it took effect, or, when this raises, nothing.

        `work` may run twice, so it touches nothing but rows. `frees_space` lets it use the ballast of a full disk.
        """
        operation = _Operation(work, is_write=True, frees_space=frees_space)
        answer: _Answer = self._submit(namespace, operation).result()
        return answer

    def write_later(self, namespace: str, work: Callable[[Rows], None]) -> None:
        """Write without waiting and without telling; for what may be lost, such as times of last use."""
        self._submit(namespace, _Operation(work, is_write=True))

    def record_with(self, recorder: Recorder) -> None:
        """Tell this one of every commit from now on."""

        def begin(rows: Rows) -> None:
            recorder.begin(rows)
            self._recorder = recorder

        self.read(HOUSE, begin)

    def keep_out(self, damage: Mapping[str, str]) -> None:
        """From now on refuse all that these namespaces ask: their rows are damaged, in these words."""
        self._damage = damage

    def rebuild_indexes(self) -> None:
        """Make SQLite's own indexes anew from its tables. Raises DataLoss when these contradict themselves."""
        try:
            self.write(HOUSE, lambda rows: rows.run("REINDEX"))
        except sqlite3.IntegrityError as error:
            raise index_damaged(str(error)) from error

    @property
    def damage(self) -> Mapping[str, str]:
        """Namespaces whose rows are damaged, and how."""
        return self._damage

    def close(self) -> bool:
        """Finish what waits, and end the thread. False when that was asked before."""
        with self._gate:
            is_first = not self._is_closed
            self._is_closed = True
            self._gate.notify()
        self._thread.join()
        return is_first

    def _submit(self, namespace: str, operation: _Operation) -> "Future[Any]":
        if words := self._damage.get(namespace):
            raise index_damaged(words)
        with self._gate:
            if self._is_closed:
                raise Unavailable("the store is closed", reason="CLOSED")
            (self._writes if operation.is_write else self._reads).put(namespace, operation)
            self._gate.notify()
        return operation.answer

    # --- on the index thread ---

    def _live(self, opened: "Future[None]") -> None:
        try:
            connection = self._open()
        except BaseException as error:  # noqa: BLE001  it belongs to whoever opens the store
            opened.set_exception(_translated(error))
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
            self.is_migrated = migrate(Database(connection), self._now_unix_ms())
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
        try:
            operation.answer.set_result(operation.work(Rows(connection)))
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            operation.answer.set_exception(_translated(error))

    def _write(
        self, connection: sqlite3.Connection, operations: list[_Operation], more: Iterable[_Operation] = ()
    ) -> None:
        """Commit operations together, and `more`, which adds itself to them."""
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
        if operation.frees_space and _is_full(error) and self._ballast.give_up():
            self._write(connection, [operation])
        else:
            operation.answer.set_exception(_translated(error))

    def _commit(self, connection: sqlite3.Connection, operations: Iterable[_Operation]) -> list[Callable[[], None]]:
        """One transaction; what tells the callers. Raises sqlite3.Error, OSError or, of a journal that
        takes nothing more, Unavailable when it is rolled back."""
        answers: list[Callable[[], None]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for operation in operations:
                answers += self._in_savepoint(connection, operation)
            if self._recorder is not None:
                self._recorder.record(Rows(connection))
            self._disk.reached("index: before commit")
            connection.execute("COMMIT")
        except BaseException:
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            finally:
                if self._recorder is not None:
                    self._recorder.take_back()
            raise
        if self._recorder is not None:
            self._recorder.keep()
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


@contextlib.contextmanager
def looking_at(path: Path, disk: Disk) -> Iterator[Rows]:
    """Rows of a database that is left as it is: an ordinary connection would bring its log in, or throw it away.

    Raises what an index raises.
    """
    try:
        connection = _connect_to_look(path, disk)
        try:
            yield Rows(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        told = _translated(error)
        # A table or a column that is not there.
        raise (index_damaged(str(error)) if told is error else told) from error
    finally:
        # Readers leave their shared memory, and a log without a byte.
        disk.remove(Path(f"{path}-shm"))
        log = Path(f"{path}-wal")
        if disk.size_bytes(log) == 0:
            disk.remove(log)


def read_anyway(rows: Rows, work: Callable[[Rows], _Answer]) -> _Answer:
    """What `work` answers, also where text is no UTF-8: it is then read as what it resembles, which is slower."""
    connection = rows._connection
    try:
        return work(rows)
    except sqlite3.OperationalError as error:
        if not str(error).startswith(_NO_TEXT):
            raise
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        return work(rows)
    finally:
        connection.text_factory = str


def _connect_to_look(path: Path, disk: Disk) -> sqlite3.Connection:
    has_log = bool(disk.size_bytes(Path(f"{path}-wal")))
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError as error:
        connection.close()
        if not has_log or not _cannot_write(error):
            raise
        # Reading a log takes a little room in shared memory, which a full disk has not. Alone one needs none; but then
        # the log is brought in at the end.
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    return connection


@contextlib.contextmanager
def reading_damage() -> Iterator[None]:
    """What rows that nobody wrote make of a reader is told as damage: at a start, and when a store is checked."""
    try:
        yield
    except (ValueError, TypeError, AssertionError) as error:
        raise index_damaged(f"it holds what nobody wrote ({type(error).__name__}: {error})") from error


def index_damaged(words: str) -> DataLoss:
    """The refusal of what a damaged index would have to answer."""
    return DataLoss(
        f"the index is damaged: {words}; stop the store and run: kvasir store recover", reason="INDEX_DAMAGED"
    )


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return is_no_room(error)
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL


def _cannot_write(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _translated(error: BaseException) -> BaseException:
    """The error in words that a caller can act on. What is a bug of ours stays what it is."""
    if isinstance(error, OSError):
        return refusal(error, "the index")
    if isinstance(error, KvasirError) or not isinstance(error, sqlite3.Error):
        return error
    if _is_full(error):
        return disk_full("the index")
    code = _code(error)
    # "Could not decode to UTF-8" has no code of SQLite's: Python found it. Everything stored once was UTF-8.
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(error).startswith(_NO_TEXT):
        return index_damaged(str(error))
    if _cannot_write(error) or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY):
        return Unavailable(f"the index cannot be used: {error}", reason="INDEX_FAILED", retry_after_s=1.0)
    return error
