"""How the tables are read and written: statements within the transaction that an operation runs in.

A statement takes no bare text. Each text names its `Column`, and is sealed here where the operation's namespace is: so
the index, its log and the journal, which catches what the tables get, hold no name, text or hash of such a namespace.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.formats.digest import Digest

from cachestore_svc.sealing import sealed_names
from cachestore_svc.sealing.sealed_names import PLAIN_NAMES, PlainNames


@dataclass(frozen=True, slots=True)
class Text:
    """Texts for one place of a statement: one, or a list for `json_each`."""

    column: "Column"
    texts: Sequence[str]
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """What the texts of a column are, and so how a sealed namespace has them."""

    kind: str

    def __call__(self, text: str) -> Text:
        return Text(self, (text,))

    def each(self, texts: Iterable[str]) -> Text:
        """A list for `json_each`, in its order."""
        return Text(self, tuple(texts), is_list=True)


AGENT, LABEL, VALUE, DETAIL, REQUEST = map(
    Column, (sealed_names.AGENT, sealed_names.LABEL, sealed_names.VALUE, sealed_names.DETAIL, sealed_names.REQUEST)
)
HASH = Column("hash")  # of a blob: the key turns it back
KEYED = Column("keyed")  # chain and block hashes: nothing turns them back
PLAIN = Column("plain")  # hides nothing of a namespace

Parameter = int | float | Text | None


def numbers(values: Iterable[int]) -> Text:
    """Numbers for `json_each`."""
    return PLAIN(json.dumps(list(values)))


class Rows:
    """The statements of one operation, and what to do once they are durable."""

    def __init__(self, connection: sqlite3.Connection, names: PlainNames = PLAIN_NAMES) -> None:
        """`names`: how the operation's namespace has its names in the tables."""
        self.connection = connection
        self.names = names
        self.after_commit_actions: list[Callable[[], None]] = []

    def all(self, sql: str, *parameters: Parameter) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql, self._bound(parameters)).fetchall()

    def one(self, sql: str, *parameters: Parameter) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.connection.execute(sql, self._bound(parameters)).fetchone()
        return row

    def run(self, sql: str, *parameters: Parameter) -> int:
        """Run a statement that writes; how many rows it touched."""
        return self.connection.execute(sql, self._bound(parameters)).rowcount

    def many(self, sql: str, parameters: Iterable[Sequence[Parameter]]) -> None:
        self.connection.executemany(sql, map(self._bound, parameters))

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do this on the index thread once the operation is durable; it must be quick and must not raise."""
        self.after_commit_actions.append(action)

    def columns(self, table: str) -> set[str]:
        """Names of a table's columns; none where there is no such table."""
        return {str(column[1]) for column in self.all(f"PRAGMA table_info({table})")}

    # --- texts as the tables have them ---

    def sealed(self, column: Column, texts: Sequence[str]) -> list[str]:
        match column.kind:
            case "plain":
                return list(texts)
            case "hash":
                return self.names.hashes(texts)
            case "keyed":
                return [self.names.keyed(text) for text in texts]
            case kind:
                return [self.names.text(kind, text) for text in texts]

    def opened(self, column: Column, text: str) -> str:
        return self.names.open_hashes([text])[0] if column is HASH else self.names.open_text(text)

    def digests(self, found: Sequence[tuple[Any, ...]]) -> list[Digest]:
        """Digests of rows of hash and size."""
        hashes = self.names.open_hashes([hash_ for hash_, _ in found])
        return [Digest(hash_, size_bytes) for hash_, (_, size_bytes) in zip(hashes, found, strict=True)]

    def numbered_digests(self, found: Sequence[tuple[Any, ...]]) -> list[tuple[int, Digest]]:
        """The same of rows of number, hash and size, with their numbers."""
        return [(int(row[0]), digest) for row, digest in zip(found, self.digests([r[1:] for r in found]), strict=True)]

    def _bound(self, parameters: Sequence[Parameter]) -> list[int | float | str | None]:
        return [each if each is None or isinstance(each, int | float) else self._text(each) for each in parameters]

    def _text(self, parameter: Text) -> str:
        if not isinstance(parameter, Text):
            raise TypeError("a text of a statement names its column")
        sealed = self.sealed(parameter.column, parameter.texts)
        return json.dumps(sealed) if parameter.is_list else sealed[0]
