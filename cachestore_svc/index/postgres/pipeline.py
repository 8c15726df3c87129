"""Statements that go to PostgreSQL together: prepared, in one message, their answers read when all have run. The
library's own pipeline wakes both sides for each statement, which costs several times as much as to run it.
"""

import re
import select
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import psycopg
from kvasir.waits import PAUSE_S, RETRY_S
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

_LIST = re.compile(r"json_each\(:(\w+)\)(?: AS (\w+))?")
_SOUGHT = re.compile(r"json_each\(:(\w+)\) AS sought CROSS JOIN (.+)= sought\.value", re.DOTALL)
_AMONG = re.compile(r"IN \(SELECT value FROM json_each\(:(\w+)\)\)")
_VALUE = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_Key = tuple[bytes, tuple[int, ...]]
_OIDS = {bool: 16, int: 20, float: 701}  # of other types PostgreSQL finds out itself


@cache
def adapted(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """A statement of SQLite's as PostgreSQL takes it, and its values in their order. Lists of the name `ids` hold
    numbers, others texts."""
    text = sql.replace(" NOT INDEXED", "")
    text = re.sub(r"LIMIT :(\w+)", r"LIMIT NULLIF(:\1, -1)", text)
    text = re.sub(r":(\w+) IS NULL", r"CAST(:\1 AS TEXT) IS NULL", text)
    text = _SOUGHT.sub(r"\2IN (SELECT value FROM json_each(:\1))", text)
    text = _LIST.sub(_unnested, _AMONG.sub(_among, text))
    names = tuple(dict.fromkeys(_VALUE.findall(text)))
    return _VALUE.sub(lambda found: f"${names.index(found[1]) + 1}", text).encode(), names


def _among(found: re.Match[str]) -> str:
    # An array is looked up in the table's index; for a list that is joined the planner may read the whole table.
    value = "value::bigint" if found[1] == "ids" else "value"
    elements = f"jsonb_array_elements_text(:{found[1]}::jsonb) AS each (value)"
    return f"= ANY (ARRAY(SELECT {value} FROM {elements}))"  # noqa: S608  all of it is written above


def _unnested(found: re.Match[str]) -> str:
    value = "value::bigint" if found[1] == "ids" else "value"
    elements = f"jsonb_array_elements_text(:{found[1]}::jsonb) WITH ORDINALITY AS each (value, place)"
    return f"(SELECT {value} AS value, place - 1 AS key FROM {elements}) AS {found[2] or 'listed'}"  # noqa: S608  all of it is written above


class Answer:
    """A statement's answer, as a cursor gives it."""

    def __init__(self, result: PGresult, transformer: Any) -> None:
        self._result = result
        self._rows: list[tuple[Any, ...]] = []
        if result.status == ExecStatus.TUPLES_OK:
            transformer.set_pgresult(result)
            self._rows = transformer.load_rows(0, result.ntuples, tuple)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    @property
    def rowcount(self) -> int:
        touched = self._result.command_tuples
        return -1 if touched is None else touched

    @property
    def statusmessage(self) -> str:
        return (self._result.command_status or b"").decode()

    @property
    def description(self) -> list[tuple[str]]:
        return [((self._result.fname(place) or b"").decode(),) for place in range(self._result.nfields)]


class Statement(NamedTuple):
    """A statement with its values as they are sent."""

    sql: str  # as SQLite has it
    text: bytes
    types: tuple[int, ...]
    values: list[bytes | None]
    is_kept: bool  # prepared for the next time


class Pipeline:
    """Of one connection. Used by one thread."""

    def __init__(self, connection: "psycopg.Connection[Any]", check_alive: Callable[[], None]) -> None:
        """`check_alive`: raises psycopg.OperationalError where a server that is silent hangs."""
        self._connection = connection
        self._check_alive = check_alive
        self._transformer = Transformer(connection)
        self._encoding = connection.info.encoding
        self._prepared: dict[_Key, bytes] = {}  # names, by text and types
        self._count = 0  # of names that were given

    def statement(self, sql: str, values: Mapping[str, Any] | None) -> Statement:
        """Raises psycopg.DataError for a value that no statement can have. With `values` it is kept for the next."""
        if values is None:
            return Statement(sql, sql.encode(), (), [], is_kept=False)
        text, names = adapted(sql)
        given = [values[name] for name in names]
        types = tuple(_OIDS.get(type(value), 0) for value in given)
        return Statement(sql, text, types, [self._sent(value) for value in given], is_kept=True)

    def run(self, statements: Sequence[Statement]) -> list[Answer]:
        """Run them in their order, and wait once. Raises the first failure: those behind it have not run."""
        server = self._connection.pgconn
        server.enter_pipeline_mode()
        try:
            sent = self._send(server, statements)
            results = _received(server, self._check_alive)
        except BaseException:
            self._connection.close()  # more results may come
            raise
        if server.status != ConnStatus.BAD:
            server.exit_pipeline_mode()
        answers = []
        for (key, name), result in zip(sent, results, strict=False):
            if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
                raise error_from_result(result, encoding=self._encoding)
            if key is None:
                answers.append(Answer(result, self._transformer))
            else:
                self._prepared[key] = name
        if len(answers) < len(statements):
            raise psycopg.OperationalError("the connection is lost")
        return answers

    def _send(self, server: PGconn, statements: Sequence[Statement]) -> list[tuple[_Key | None, bytes]]:
        """For each result that will come, the statement that it prepares, and its name; None: it is an answer."""
        sent: list[tuple[_Key | None, bytes]] = []
        new: dict[_Key, bytes] = {}
        for each in statements:
            if each.is_kept:
                key = each.text, each.types
                name = self._prepared.get(key) or new.get(key)
                if name is None:
                    self._count += 1
                    name = new[key] = f"kvasir_{self._count}".encode()
                    server.send_prepare(name, *key)
                    sent.append((key, name))
                server.send_query_prepared(name, each.values)
            else:
                server.send_query_params(each.text, each.values)
            sent.append((None, b""))
        server.pipeline_sync()
        return sent

    def _sent(self, value: Any) -> bytes | None:
        if value is None or isinstance(value, bool):
            return value if value is None else b"t" if value else b"f"
        text = str(value)
        if "\0" in text:
            raise psycopg.DataError("a text of PostgreSQL cannot have the character of code 0")
        return text.encode(self._encoding)


def _received(server: PGconn, check_alive: Callable[[], None]) -> list[PGresult]:
    """All results, up to the last or to the connection's end. Sends and receives at once: neither side waits for the
    other with a full buffer."""
    results: list[PGresult] = []
    ready = select.poll()
    is_sent, look_s = False, PAUSE_S
    while True:
        is_sent = is_sent or server.flush() == 0
        ready.register(server.socket, select.POLLIN if is_sent else select.POLLIN | select.POLLOUT)
        if not ready.poll(1000 * look_s):  # it may work on a long statement, or wait for a lock
            check_alive()
            look_s = min(2 * look_s, RETRY_S)  # each look is a process of the server's
        server.consume_input()
        while not server.is_busy():
            result = server.get_result()
            if result is None:
                if server.status == ConnStatus.BAD:
                    return results
            elif result.status == ExecStatus.PIPELINE_SYNC:
                return results
            else:
                results.append(result)
