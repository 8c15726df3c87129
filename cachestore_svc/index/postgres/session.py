"""A connection to PostgreSQL that takes the statements of SQLite, and is made again when it was lost."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from kvasir.errors import KvasirError, Unavailable
from psycopg.adapt import Buffer, Loader

from cachestore_svc.blobs.disk import disk_full
from cachestore_svc.index.postgres.pipeline import Answer, Pipeline, Statement
from cachestore_svc.index.postgres.servers import Server, Servers, ServerSilent

_Values = Mapping[str, Any]
_Key = tuple[str, tuple[bytes | None, ...]]
_QUOTED = re.compile(r"""(["']).*?\1""")


class EarlierFailed(psycopg.Error):
    """Of statements that went together one failed, perhaps one of an operation before the one that sent them. No
    savepoint is left to go back to: the transaction is done again, each operation alone."""


class _WholeNumber(Loader):
    """Sums of whole numbers, which PostgreSQL gives as decimals."""

    def load(self, data: Buffer) -> int:
        return int(bytes(data))


class Session:
    """Implements `Connection` over one connection at a time. Used by one thread."""

    def __init__(self, servers: Servers) -> None:
        """Connects at `connect`."""
        self._servers = servers
        self._server: Server | None = None
        self._silences = 0  # of the server, before this session
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._pipeline: Pipeline | None = None
        self._waiting: list[Statement] = []  # they go to the server with the next one
        self._ahead: list[Statement] = []  # reads that go with it, too
        self._found: dict[_Key, Answer] = {}  # and their answers, until something is written
        # Of namespaces, which never change in a server: another one, a standby that lacked them, may give them again.
        self.numbers: dict[str, int] = {}

    @property
    def is_lost(self) -> bool:
        """Also where another session found that this one's server stands still."""
        return self._connection is None or self._connection.closed or self._is_server_silent

    @property
    def _is_server_silent(self) -> bool:
        return self._server is not None and self._server.silences > self._silences

    def connect(self) -> None:
        """Connect again. Raises psycopg.OperationalError."""
        self.close()
        self._connection, self._server = self._servers.connect()
        self._silences = self._server.silences
        self._connection.adapters.register_loader("numeric", _WholeNumber)
        self._pipeline = Pipeline(self._connection, self._check_alive)

    def _check_alive(self) -> None:
        """Raises psycopg.OperationalError where the session's server, which other sessions may not have, stands still.
        That is no ServerSilent: another server may be there."""
        try:
            if self._server and not self._is_server_silent:
                self._server.check_session(self._connected)
                return
        except ServerSilent as error:
            raise psycopg.OperationalError(str(error)) from None
        raise psycopg.OperationalError("the server did not answer another session")

    def close(self) -> None:
        for each in (self._waiting, self._ahead, self._found, self.numbers):
            each.clear()
        if self._connection is not None:
            self._connection.close()

    def leave(self) -> None:
        """Close it. Where the address names other servers, `connect` tries them first."""
        if self._server is not None:
            self._server.leave()
        self.close()

    def execute(self, sql: str, values: _Values | None = None, /) -> Answer:
        """Run the statements that wait, and this one, in one round trip. Raises the first of their failures."""
        if sql.startswith("ROLLBACK"):
            self._drop_waiting(" TO " in sql)
            self._ahead.clear()
        statement = self._sendable.statement(sql, values)
        if not sql.startswith("SELECT"):
            self._found.clear()
        elif (answered := self._found.pop(_key(statement), None)) is not None:
            return answered
        return self._in_one_trip(statement)

    def _drop_waiting(self, is_to_savepoint: bool) -> None:
        """Statements that will be undone need not be sent; but the savepoint must be there, and all before it."""
        places = [place for place, each in enumerate(self._waiting) if each.sql.startswith("SAVEPOINT")]
        del self._waiting[places[-1] + 1 if places and is_to_savepoint else 0 :]

    def _in_one_trip(self, statement: Statement) -> Answer:
        """With all that waits to go to the server. Raises EarlierFailed where a savepoint ended among that."""
        waiting, self._waiting = self._waiting, []
        ahead, self._ahead = self._ahead, []
        try:
            *answers, answer = self._sendable.run([*waiting, *ahead, statement])
        except psycopg.Error as error:
            is_own = not any(each.sql.startswith("RELEASE") for each in waiting)
            if is_own or isinstance(error, psycopg.OperationalError):
                raise
            raise EarlierFailed from error
        if statement.sql.startswith("SELECT"):
            self._found |= zip(map(_key, ahead), answers[len(waiting) :], strict=True)
        return answer

    def execute_later(self, sql: str, values: _Values | None = None, /) -> None:
        """Run a statement before the next one, whose caller gets its failure."""
        self._found.clear()
        self._waiting.append(self._sendable.statement(sql, values))

    def execute_ahead(self, sql: str, values: _Values, /) -> None:
        """Send a read with the next statement. The same read is then answered at once, until something is written."""
        self._ahead.append(self._sendable.statement(sql, values))

    def executemany(self, sql: str, rows: Iterable[_Values], /) -> None:
        self._found.clear()
        self._waiting += [self._sendable.statement(sql, values) for values in rows]

    def heard(self, for_s: float) -> list[str]:
        """What others sent to the channels on which it listens, as soon as there is something, or within this time."""
        return [each.payload for each in self._connected.notifies(timeout=for_s, stop_after=1)]

    def roll_back(self) -> None:
        """End the transaction, if there is one; with the session where that was lost, as its server may go on."""
        if not self.is_lost:
            with suppress(psycopg.Error):
                self.execute("ROLLBACK")
                return
        self.close()

    @property
    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._connection is None:
            raise psycopg.OperationalError("not connected")
        return self._connection

    @property
    def _sendable(self) -> Pipeline:
        if self._pipeline is None:
            raise psycopg.OperationalError("not connected")
        return self._pipeline


def _key(statement: Statement) -> _Key:
    return statement.sql, tuple(statement.values)


def is_again(error: BaseException) -> bool:
    """Whether a transaction failed because of another one, a cut, or its server's end: the same may succeed at once."""
    is_others = isinstance(error, psycopg.OperationalError) and str(error.sqlstate).startswith(("40", "55P03"))
    return is_others or is_cut(error)


def is_cut(error: BaseException) -> bool:
    """Whether a statement failed because its session ended: what the server made of it is not known."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("57P", "08"))


def translated(error: BaseException) -> BaseException:
    """The error in words that a caller can act on, which hold no address. A bug of ours stays what it is."""
    if isinstance(error, EarlierFailed) and error.__cause__:
        error = error.__cause__
    if isinstance(error, KvasirError) or not isinstance(error, psycopg.Error):
        return error
    if isinstance(error, psycopg.errors.DiskFull):
        return disk_full("the index")
    # Class 25: the server takes no writes, or ended a session that stood still in a transaction.
    if isinstance(error, psycopg.OperationalError) or str(error.sqlstate).startswith("25"):
        why = type(error).__name__ if error.sqlstate else "there is no connection to its server"
        return Unavailable(f"the index cannot be used: {why}", reason="INDEX_FAILED", retry_after_s=1.0)
    return error


def refused_at_start(error: BaseException) -> BaseException:
    """As `translated`, for the operator who named the database: with the server's words, but for the names in them."""
    words = str(error).partition("\n")[0].rpartition("failed: ")[2]
    text = "catalog: " + " ".join(_QUOTED.sub("…", words).split())
    match error:
        case psycopg.OperationalError() if not isinstance(error, psycopg.errors.DiskFull):
            return Unavailable(text, reason="INDEX_FAILED", retry_after_s=1.0)
        case psycopg.errors.InsufficientPrivilege():
            text += "; it has to be of the store's own role"
            return Unavailable(text, reason="INDEX_FAILED", retry_after_s=1.0)
    return translated(error)
