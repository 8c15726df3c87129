"""A connection to PostgreSQL that takes the statements of SQLite, and is made again when it was lost."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import psycopg
from kvasir.errors import InvalidArgument, KvasirError, Unavailable
from psycopg.adapt import Buffer, Loader

from cachestore_svc.blobs.disk import disk_full
from cachestore_svc.index.postgres.schema import SCHEMA

_Values = Mapping[str, Any]
_Statement = tuple[str, _Values | None]
_Key = tuple[str, frozenset[tuple[str, Any]]]
_LIST = re.compile(r"json_each\(:(\w+)\)(?: AS (\w+))?")
_AMONG = re.compile(r"IN \(SELECT value FROM json_each\(:(\w+)\)\)")
_VALUE = re.compile(r"(?<![:\w]):([a-z_]\w*)")
# What each side does where the other is gone. The server ends the transaction, and then the session, which holds locks.
_OF_SERVER = {
    "idle_in_transaction_session_timeout": "30s",
    "lock_timeout": "30s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10s",
}
_SETTINGS = {
    "application_name": "kvasir",
    "connect_timeout": "2",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "target_session_attrs": "read-write",
}


class _WholeNumber(Loader):
    """Sums of whole numbers, which PostgreSQL gives as decimals."""

    def load(self, data: Buffer) -> int:
        return int(bytes(data))


@cache
def adapted(sql: str) -> str:
    """A statement of SQLite's as PostgreSQL takes it. Lists of the name `ids` hold numbers, others texts."""
    text = sql.replace("%", "%%").replace(" NOT INDEXED", "")
    text = re.sub(r"LIMIT :(\w+)", r"LIMIT NULLIF(:\1, -1)", text)
    text = re.sub(r":(\w+) IS NULL", r"CAST(:\1 AS TEXT) IS NULL", text)
    return _VALUE.sub(r"%(\1)s", _LIST.sub(_unnested, _AMONG.sub(_among, text)))


def _among(found: re.Match[str]) -> str:
    # An array is looked up in the table's index; for a list that is joined the planner may read the whole table.
    value = "value::bigint" if found[1] == "ids" else "value"
    elements = f"jsonb_array_elements_text(%({found[1]})s::jsonb) AS each (value)"
    return f"= ANY (ARRAY(SELECT {value} FROM {elements}))"  # noqa: S608  all of it is written above


def _unnested(found: re.Match[str]) -> str:
    value = "value::bigint" if found[1] == "ids" else "value"
    elements = f"jsonb_array_elements_text(%({found[1]})s::jsonb) WITH ORDINALITY AS each (value, place)"
    return f"(SELECT {value} AS value, place - 1 AS key FROM {elements}) AS {found[2] or 'listed'}"  # noqa: S608  all of it is written above


class Session:
    """Implements `Connection` over one connection at a time. Used by one thread."""

    def __init__(self, url: str) -> None:
        """Connects at `connect`. Raises InvalidArgument for what is no URL of PostgreSQL."""
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            words = "catalog: expected postgresql://USER@HOST/DATABASE"  # what was given may hold a password
            raise InvalidArgument(words, field="catalog") from None
        ours = " ".join(f"-c {name}={value}" for name, value in _OF_SERVER.items())
        options = f"{ours} {given.get('options', '')}"  # the last word is the address's
        self._given: dict[str, Any] = {**_SETTINGS, **given, "options": options}
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._waiting: list[_Statement] = []  # they go to the server with the next one
        self._ahead: list[_Statement] = []  # reads that go with it, too
        self._found: dict[_Key, psycopg.Cursor[tuple[Any, ...]]] = {}  # and their answers, until something is written
        # Of namespaces, which never change in a server: another one, a standby that lacked them, may give them again.
        self.numbers: dict[str, int] = {}
        self._failures = 0  # of statements that went together

    @property
    def is_lost(self) -> bool:
        return self._connection is None or self._connection.closed

    def connect(self) -> None:
        """Connect again. Raises psycopg.OperationalError."""
        self.close()
        self._connection = psycopg.connect(**self._given, autocommit=True)
        self._connection.adapters.register_loader("numeric", _WholeNumber)
        self._connection.execute(f"SET search_path = {SCHEMA}")

    def close(self) -> None:
        for each in (self._waiting, self._ahead, self._found, self.numbers):
            each.clear()
        if self._connection is not None:
            self._connection.close()

    def execute(self, sql: str, values: _Values | None = None, /) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run the statements that wait, and this one, in one round trip. Raises the first of their failures."""
        if sql.startswith("ROLLBACK"):  # no need to write first: but the savepoint must be there
            self._waiting = [each for each in self._waiting if each[0].startswith("SAVEPOINT") and " TO " in sql]
            # psycopg takes statements for prepared that were skipped behind a failed one. Of a ROLLBACK in words that
            # are new to it, it forgets all.
            sql += f" -- {self._failures}"
            self._ahead.clear()
        if not sql.startswith("SELECT"):
            self._found.clear()
        elif (answered := self._found.pop(_key(sql, values), None)) is not None:
            return answered
        return self._in_one_trip(sql, values)

    def _in_one_trip(self, sql: str, values: _Values | None) -> psycopg.Cursor[tuple[Any, ...]]:
        """With all that waits to go to the server."""
        waiting, self._waiting = self._waiting, []
        ahead, self._ahead = self._ahead, []
        if not waiting and not ahead:
            return self._run(sql, values)
        try:
            with self._connected.pipeline():
                for each in waiting:
                    self._run(*each)
                found = {_key(*each): self._run(*each) for each in ahead}
                answer = self._run(sql, values)
        except psycopg.Error:
            self._failures += 1
            raise
        if sql.startswith("SELECT"):
            self._found |= found
        return answer

    def execute_later(self, sql: str, values: _Values | None = None, /) -> None:
        """Run a statement before the next one, whose caller gets its failure."""
        self._found.clear()
        self._waiting.append((sql, values))

    def execute_ahead(self, sql: str, values: _Values, /) -> None:
        """Send a read with the next statement. The same read is then answered at once, until something is written."""
        self._ahead.append((sql, values))

    def executemany(self, sql: str, rows: Iterable[_Values], /) -> None:
        self._found.clear()
        self._waiting += [(sql, values) for values in rows]

    def _run(self, sql: str, values: _Values | None) -> psycopg.Cursor[tuple[Any, ...]]:
        return self._connected.execute(adapted(sql) if values is not None else sql, values)  # type: ignore[arg-type]

    def heard(self, for_s: float) -> list[str]:
        """What others sent to the channels on which it listens, as soon as there is something, or within this time."""
        return [each.payload for each in self._connected.notifies(timeout=for_s, stop_after=1)]

    def roll_back(self) -> None:
        """End the transaction, if there is one and the connection was not lost."""
        if not self.is_lost:
            try:
                self.execute("ROLLBACK")
            except psycopg.Error:
                self.close()

    @property
    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._connection is None:
            raise psycopg.OperationalError("not connected")
        return self._connection


def _key(sql: str, values: _Values | None) -> _Key:
    return sql, frozenset((values or {}).items())


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
    if isinstance(error, KvasirError) or not isinstance(error, psycopg.Error):
        return error
    if isinstance(error, psycopg.errors.DiskFull):
        return disk_full("the index")
    # Class 25: the server takes no writes, or ended a session that stood still in a transaction.
    if isinstance(error, psycopg.OperationalError) or str(error.sqlstate).startswith("25"):
        why = type(error).__name__
        return Unavailable(f"the index cannot be used: {why}", reason="INDEX_FAILED", retry_after_s=1.0)
    return error
