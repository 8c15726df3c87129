"""How the tables are read and written: statements within the transaction that an operation runs in.

Only modules beside this one use it. Rare questions (tables, columns, facts, labels) go through sqlite-utils; questions
of every turn are SQL, because the library reads a table's schema before each look-up.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from sqlite_utils import Database
from sqlite_utils.db import Table


class Rows:
    """The statements of one operation, and what to do once they are durable."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.after_commit_actions: list[Callable[[], None]] = []

    def all(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql, parameters).fetchall()

    def one(self, sql: str, *parameters: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.connection.execute(sql, parameters).fetchone()
        return row

    def run(self, sql: str, *parameters: object) -> int:
        """Run a statement that writes; how many rows it touched."""
        return self.connection.execute(sql, parameters).rowcount

    def insert(self, sql: str, *parameters: object) -> int:
        """Run an INSERT; the new row's id."""
        return int(self.connection.execute(sql, parameters).lastrowid or 0)

    def many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        self.connection.executemany(sql, parameters)

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do this on the index thread once the operation is durable; it must be quick and must not raise."""
        self.after_commit_actions.append(action)

    def plain(self, text: str) -> str:
        """A text of the tables as people have it. A sealed namespace's texts are sealed; see `sealed`."""
        return text

    def told(self, error: BaseException) -> BaseException:
        """An error of a verb with its texts as people have them."""
        return error

    def table(self, name: str) -> Table:
        """A table through sqlite-utils, whose writes are savepoints of this transaction."""
        return Database(self.connection).table(name)
