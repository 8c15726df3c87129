"""The catalog in a database of a PostgreSQL server. One thread writes, in groups; a few read, each by a connection of
its own. Groups of all stores that have the database follow each other; one of a store that has it alone commits only
while no other has opened it since.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import InvalidStateError
from functools import partial
from itertools import chain
from typing import Any

import psycopg
from kvasir.errors import FailedPrecondition, KvasirError, Unavailable
from kvasir.waits import PAUSE_S, RETRY_S

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.postgres.clock_steps import ClockSteps, now_of
from cachestore_svc.index.postgres.lease_rows import SharedLeases, correct_ends
from cachestore_svc.index.postgres.replicas import (
    GROUPS,
    OWN_SESSION,
    TRIES_TO_LOCK,
    Listener,
    check_alike,
    leave_jobs,
    take_job,
    take_lock,
)
from cachestore_svc.index.postgres.schema import STEPS, migrate
from cachestore_svc.index.postgres.servers import Servers, ServerSilent
from cachestore_svc.index.postgres.session import EarlierFailed, Session, is_again, is_cut, refused_at_start, translated
from cachestore_svc.index.sqlite.operations import Catalog, Operation
from cachestore_svc.index.sqlite.transaction import CatalogChange
from cachestore_svc.index.values import HOUSE

READERS = 4
_TRIES = 40  # of a group that other transactions disturb, or a server that restarts
_OWN_ROW = "SELECT groups, is_superseded FROM writers WHERE epoch ="
# A store that stops in the middle of a group makes the groups of the others wait.
_MOST_STILL = "SET idle_in_transaction_session_timeout = '5s'"


class PostgresCatalog(Catalog):
    """A catalog in PostgreSQL, which outlives its server's restarts."""

    # A commit waits for those of other stores, and for the standby: one for each write would be most of the time.
    max_turn_ms = 50
    waits_for_other_stores = True

    def __init__(
        self, url: str, disk: Disk, now_unix_ms: Callable[[], int], shared_as: Mapping[str, str] | None = None
    ) -> None:
        """Connect, migrate, take the database, start the threads. `shared_as`: facts that all stores have in common
        which may have it at the same time; None: no other may. Raises Unavailable (LOCKED: another store has it;
        INDEX_FAILED), FailedPrecondition (DATA_TOO_NEW, REPLICA_UNLIKE).
        """
        super().__init__(now_unix_ms, translated)
        self._reads_came = threading.Condition(self._guard)
        self._disk = disk
        self._ending = threading.Event()
        self._groups = 0  # that this store tried to commit
        self._acknowledged = 0  # the last of them that took effect
        self._under_way: list[Operation] = []
        self._is_down = False  # the last group waited in vain for the server: the next one does not wait
        self._session = ""
        self._backend: tuple[object, ...] = ()  # the server's process of the last writer's session
        self._servers = Servers(url)
        self._shared_as = None if shared_as is None else {**shared_as, "format": str(len(STEPS))}
        self.is_shared = shared_as is not None
        self._begins: Callable[[CatalogChange], None] | None = None  # where the database may be in another place
        self._is_new_session = False
        self._steps: ClockSteps | None = None
        self._writer = Session(self._servers)
        try:
            self._writer.connect()
            self._lock()
            self._open()
        except BaseException as error:  # noqa: BLE001  it belongs to the opener of the store
            self._writer.close()
            raise refused_at_start(error) from None
        self._threads = [threading.Thread(target=self._live, name="kvasir-index", daemon=True)]
        self._threads += [
            threading.Thread(
                target=self._live_reading, args=(Session(self._servers),), name=f"kvasir-index-{number}", daemon=True
            )
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> bool:
        self._ending.set()
        if self._shared_as is not None:
            with contextlib.suppress(KvasirError):  # then another store has them a little later
                self.write(HOUSE, lambda change: leave_jobs(change.connection, self._epoch))
        return super().close()

    def lease_ends(self, steady: Callable[[], float]) -> SharedLeases:
        self._steps = ClockSteps(steady)
        return SharedLeases(self._steps)

    def attend(self, begin: Callable[[CatalogChange], None], wake: Callable[[str], None]) -> None:
        if self._shared_as is None:
            return
        self._begins = begin
        listener = Listener(self._servers, wake, self._ending)
        thread = threading.Thread(target=listener.run, name="kvasir-events", daemon=True)
        self._threads.append(thread)
        thread.start()

    def has_job(self, name: str) -> bool:
        if self._shared_as is None:
            return True
        return self.write(HOUSE, lambda change: take_job(change.connection, name, self._epoch))

    def check_ours(self) -> None:
        self.read(HOUSE, lambda _: None)

    def _open(self) -> None:
        self._begin_group(self._writer)
        migrate(self._writer, self._now_unix_ms())
        # Waits for the last group of the store before, and lets no other of it follow.
        supersede = "UPDATE writers SET is_superseded = TRUE WHERE NOT is_superseded"
        shared_as = None
        if self._shared_as is not None:
            check_alike(self._writer, self._shared_as, self._ending.wait)
            supersede += " AND shared_as IS NULL"
            shared_as = json.dumps(self._shared_as, sort_keys=True)
        self._writer.execute(supersede)
        # By chance, too: a standby that lacks this row gives the next store another number.
        [[self._epoch]] = self._writer.execute(
            """INSERT INTO writers (epoch, shared_as, name, session, seen_ms)
                SELECT COALESCE(MAX(epoch), 0) + 1 + (random() * 1000000)::bigint, :shared_as, :name, :session, now_ms()
                FROM writers RETURNING epoch""",
            {"shared_as": shared_as, "name": socket.gethostname(), "session": self._session},
        ).fetchall()
        self._look_where()
        self._writer.execute("COMMIT")

    def _look_where(self) -> None:
        """After a restore or a failover the history of events has another name."""
        [[timeline, database, server]] = self._writer.execute(
            """SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8), oid, system_identifier
                FROM pg_database, pg_control_system() WHERE datname = current_database()"""
        ).fetchall()
        self.place, self.home = f"{timeline} {database}", (f"{server}.{database}", timeline)

    def _begin_group(self, session: Session) -> None:
        """Begin a transaction that sees all that other stores' groups did, and that no other group comes between."""
        session.execute_later("BEGIN ISOLATION LEVEL READ COMMITTED")
        session.execute_later(f"SELECT pg_advisory_xact_lock({GROUPS})")

    def _lock(self) -> None:
        """Take the server's lock of this database, which the store has as long as its session lasts."""
        self._end_last_session()
        for _ in range(TRIES_TO_LOCK):
            if take_lock(self._writer, is_shared=self._shared_as is not None):
                if self._shared_as is not None:
                    self._writer.execute(_MOST_STILL)
                [[self._session]] = self._writer.execute(OWN_SESSION).fetchall()
                [self._backend] = self._writer.execute(
                    "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
                ).fetchall()
                return
            self._ending.wait(PAUSE_S)
        self._writer.close()  # or the next group would go on without the lock
        raise Unavailable("another store has this database open", reason="LOCKED", retry_after_s=5)

    def _end_last_session(self) -> None:
        """End the server's side of a session that was cut: nobody else may end it for us."""
        if self._backend:
            self._writer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND backend_start = :start",
                dict(zip(("pid", "start"), self._backend, strict=True)),
            )

    # --- on the threads that read ---

    def _live_reading(self, session: Session) -> None:
        while self._is_wanted(self._reads_came, self._reads):
            self._take_reads(session)
        session.close()

    def _read(self, connection: Session, operation: Operation) -> None:  # type: ignore[override]
        """In a snapshot of the database: it sees every acknowledged write, and no half of one."""
        for is_last in (False, True):
            try:
                if connection.is_lost:
                    connection.connect()
                rows = self._rows_of(connection, operation)
                result = self._found_by(operation, connection, rows)
            except BaseException as error:  # noqa: BLE001  it belongs to the caller
                connection.roll_back()
                is_refused = isinstance(error, KvasirError | ServerSilent)
                if is_last or is_refused or not (connection.is_lost or is_again(error)):
                    operation.answer.set_exception(translated(error))
                    return
            else:
                _keep_number(connection, rows)
                operation.answer.set_result(result)  # the end of a snapshot changes nothing: its caller does not wait
                _end_to_read(connection)
                return

    def _rows_of(self, connection: Session, operation: Operation) -> CatalogChange:  # type: ignore[override]
        rows = super()._rows_of(connection, operation)
        rows.known_number = connection.numbers.get(operation.namespace, 0)
        rows.after_commit_actions.append(partial(_keep_number, connection, rows))
        return rows

    def _found_by(self, operation: Operation, connection: Session, rows: CatalogChange) -> Any:
        """Its answer in a new snapshot, which must hold all that was acknowledged before: the session's server may
        be an old primary. The snapshot's begin and the check of it go to the server with the first statement.
        """
        acknowledged, own_row = self._acknowledged, (f"{_OWN_ROW} :epoch", {"epoch": self._epoch})
        connection.execute_later("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute_ahead(*own_row)
        refusal: KvasirError | None = None
        try:
            found = operation.work(rows)
        except KvasirError as error:
            refusal = error
        _check_ours(connection, connection.execute(*own_row).fetchall(), acknowledged)
        if refusal:
            raise refusal
        return found

    # --- on the thread that writes ---

    def _live(self) -> None:
        while self._is_wanted(self._writes_came, self._writes):
            self._take_writes(self._writer)
        self._writer.close()

    def _write(self, connection: Session, operations: list[Operation], more: Iterable[Operation] = ()) -> None:
        """As a group; alone where the group sank for a reason that is not the server's or another transaction's."""
        failure: BaseException
        if not _unanswered(self._under_way):  # or they are some of a group that sank
            self._under_way = operations
        tries_left = 1 if self._is_down else _TRIES
        while tries_left > 0:
            try:
                if connection.is_lost:
                    connection.connect()
                    self._lock()
                    self._look_where()
                    self._is_new_session = True
                answers = self._commit(connection, chain(_unanswered(operations), more))
            except KvasirError as error:  # another try would be refused, too, or do it twice
                failure = error
                break
            except (psycopg.Error, OSError) as error:
                failure = error
                tries_left -= _taken_by(error)
                if connection.is_lost or is_again(error):
                    if self._ending.wait(PAUSE_S) and connection.is_lost:
                        break
                    continue
                if len(operations) > 1:
                    while left := _unanswered(operations):
                        self._write(connection, left[:1])
                    return
                break
            self._is_down = False
            for answer in answers:
                with contextlib.suppress(InvalidStateError):  # its caller got the refusal
                    answer()
            return
        self._is_down = connection.is_lost
        for operation in _unanswered(operations):
            operation.answer.set_exception(translated(failure))

    def _commit(self, connection: Session, operations: Iterable[Operation]) -> list[Callable[[], None]]:
        """One transaction; the calls that answer the callers. When it raises, nothing of it took effect."""
        self._groups += 1
        mark = """UPDATE writers SET groups = :groups, session = :session, seen_ms = now_ms()
            WHERE epoch = :epoch AND groups >= :acknowledged AND NOT is_superseded RETURNING seen_ms"""
        numbers = {
            "groups": self._groups,
            "epoch": self._epoch,
            "acknowledged": self._acknowledged,
            "session": self._session,
        }
        answers: list[Callable[[], None]] = []
        try:
            self._begin_group(connection)
            self._mark(connection, mark, numbers)
            if self._is_new_session and self._shared_as is not None:
                check_alike(connection, self._shared_as, self._ending.wait)
                if self._begins:
                    self._begins(CatalogChange(connection, HOUSE))
            for operation in operations:
                answers += self._in_savepoint(connection, operation, psycopg.OperationalError, EarlierFailed)
            self._disk.reached("index: before commit")
            self._end(connection)
        except BaseException:
            connection.roll_back()
            raise
        self._is_new_session = False
        if self._steps:
            self._steps.keep()
        self._disk.reached("index: after commit")
        return answers

    def _mark(self, connection: Session, mark: str, numbers: Mapping[str, Any]) -> None:
        """Write the group's number where this store may still write. Raises as `_check_ours`."""
        if self._steps:
            self._steps.begin()
        marked = connection.execute(mark, numbers).fetchall()
        if not marked:
            _check_ours(connection, self._own_row(connection), self._acknowledged)
        elif self._steps and (step_ms := self._steps.step_ms(marked[0][0], partial(now_of, connection))) is not None:
            correct_ends(connection, self._steps, step_ms)

    def _end(self, connection: Session) -> None:
        """Commit. Where the answer is lost with the connection, the database says whether it took effect."""
        try:
            answer = connection.execute("COMMIT").statusmessage
        except psycopg.Error as error:
            if not (connection.is_lost or is_cut(error)) or not self._took_effect():
                raise
        else:
            if answer != "COMMIT":
                raise psycopg.OperationalError("the transaction was rolled back")
        self._acknowledged = self._groups

    def _took_effect(self) -> bool:
        """Whether the last group is durable. Waits for the database as long as the store is open; callers are refused
        after a while, and what they wanted is not done again. Raises Unavailable (CLOSED), FailedPrecondition.
        """
        tries_left = _TRIES
        while not self._ending.is_set():
            try:
                self._writer.connect()
                self._end_last_session()
                found = self._own_row(self._writer)
                _check_not_behind(self._writer, found, self._acknowledged)
                return bool(found[0][0] == self._groups)
            except psycopg.Error as error:
                tries_left -= _taken_by(error)
                if tries_left <= 0:
                    self._refuse_all(translated(error))
                self._ending.wait(PAUSE_S)
            finally:
                self._writer.close()  # it has no lock
        raise Unavailable("the store closed before the database reported whether a commit took effect", reason="CLOSED")

    def _refuse_all(self, error: BaseException) -> None:
        """Answer those of the group in doubt, and those behind it."""
        words = "the database does not answer: the last commit may have taken effect"
        for operation in _unanswered(self._under_way):
            operation.answer.set_exception(Unavailable(words, reason="INDEX_FAILED", retry_after_s=RETRY_S))
        while behind := self._next(self._writes):
            behind.answer.set_exception(error)

    def _own_row(self, session: Session) -> list[tuple[Any, ...]]:
        """This store's row of `writers`, once no other session is about to change it."""
        return session.execute(f"{_OWN_ROW} {self._epoch:d} FOR UPDATE").fetchall()


def _unanswered(operations: Iterable[Operation]) -> list[Operation]:
    return [each for each in operations if not each.answer.done()]


def _taken_by(error: BaseException) -> int:
    """How many of _TRIES a failure takes: a look at a server that stands still costs as much time as six others."""
    return 6 if isinstance(error, ServerSilent) else 1


def _keep_number(session: Session, rows: CatalogChange) -> None:
    """Rows that were committed have this number for their namespace."""
    if rows.known_number:
        session.numbers[rows.namespace] = rows.known_number


def _end_to_read(session: Session) -> None:
    try:
        session.execute("COMMIT")
    except psycopg.Error:
        session.roll_back()


def _check_ours(session: Session, found: list[tuple[Any, ...]], acknowledged: int) -> None:
    """Raises Unavailable (LOCKED) where another store has the database: it may give out leases that this one gave, so
    that this one answers nothing more. Raises FailedPrecondition (INDEX_BEHIND).
    """
    _check_not_behind(session, found, acknowledged)
    if found[0][1]:
        raise Unavailable("another store has opened this database since; stop one of the two", reason="LOCKED")


def _check_not_behind(session: Session, found: list[tuple[Any, ...]], acknowledged: int) -> None:
    """Raises FailedPrecondition (INDEX_BEHIND) where the database lacks a group that was acknowledged, as a standby may
    that was not synchronous, or an old primary. The session then ends: another server may have it.
    """
    if not found or found[0][0] < acknowledged:
        session.leave()
        raise FailedPrecondition(
            "the database lacks commits that its server acknowledged; was a standby promoted that lacks them? "
            "Bring them back, or start the store again to go on without them",
            reason="INDEX_BEHIND",
        )
