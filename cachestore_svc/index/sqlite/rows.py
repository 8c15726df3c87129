"""Statements within an operation's transaction; `:namespace` is the operation's own. The name of a text gives its kind
(`TEXTS`), so it is sealed where the namespace is, and opened where it is selected; a text of any other name is refused.
So index, log and journal hold no name, text or hash of a sealed namespace.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from kvasir.formats.digest import Digest

from cachestore_svc.sealing.sealed_names import AGENT, DETAIL, LABEL, PLAIN_NAMES, REQUEST, VALUE, PlainNames

HASH, KEYED, PLAIN = "hash", "keyed", "plain"
_OPENED = {
    "agent_id": AGENT,
    "label": LABEL,
    "label_value": VALUE,
    "origin_detail": DETAIL,
    "request_id": REQUEST,
    "hash": HASH,  # of a blob: the key turns it back
}
_HIDES_NOTHING = (
    *("after", "body", "had_by", "kind", "kv_identity_hash", "move_id", "name", "owner", "peer", "prefix"),
    *("schema_hash", "tells", "tensors", "used", "value"),
)
TEXTS: Mapping[str, str] = {
    **_OPENED,
    **dict.fromkeys(("chain", "block_hash"), KEYED),  # nothing turns them back
    **dict.fromkeys(_HIDES_NOTHING, PLAIN),
}

Value = int | float | str | None | Sequence[str] | Sequence[int]  # A list is one for `json_each`


class Texts:
    def __init__(self, names: PlainNames) -> None:
        self.names = names

    def sealed(self, name: str, texts: Sequence[str]) -> list[str]:
        match TEXTS.get(name):
            case None:
                raise TypeError(f"no text of a statement has the name {name!r}")
            case "plain":
                return list(texts)
            case "hash":
                return self.names.hashes(texts)
            case "keyed":
                return [self.names.keyed(text) for text in texts]
            case kind:
                return [self.names.text(kind, text) for text in texts]

    def opened(self, name: str, texts: Sequence[Any]) -> Sequence[Any]:
        if name not in _OPENED or not isinstance(texts[0], str):  # numbers of agents
            return texts
        return self.names.open_hashes(texts) if name == HASH else [self.names.open_text(text) for text in texts]

    def bound(self, name: str, value: Value) -> int | float | str | None:
        if value is None or isinstance(value, int | float):  # first: most are numbers
            return value
        if isinstance(value, str):
            return value if TEXTS.get(name) == PLAIN else self.sealed(name, [value])[0]
        texts = [each for each in value if isinstance(each, str)]
        return json.dumps(self.sealed(name, texts) if texts else list(value))


class Connection(Protocol):
    """What statements run on: one of SQLite, or one of PostgreSQL that takes the same statements."""

    def execute(self, sql: str, values: Any = ..., /) -> Any:
        """Run a statement; its cursor."""

    def executemany(self, sql: str, rows: Any, /) -> Any:
        """Run a statement with each of these values."""


def run_later(connection: Connection, sql: str, values: Mapping[str, Any] | None = None) -> None:
    """Run a statement whose answer nobody needs, at the latest before the next one."""
    getattr(connection, "execute_later", connection.execute)(sql, values or {})


class Rows:
    def __init__(self, connection: Connection, namespace: str = "", names: PlainNames = PLAIN_NAMES) -> None:
        """`names`: how the namespace has its names in the tables."""
        self.connection = connection
        self.namespace = namespace
        self.texts = Texts(names)
        self.known_number = 0  # the namespace's, once it was looked up

    def of(self, namespace: str) -> Self:
        """Rows of another namespace, with texts as the tables have them: at a start, and in a recovery."""
        return type(self)(self.connection, namespace)

    @property
    def namespace_id(self) -> int:
        """0, which none has, for a namespace that holds nothing yet."""
        self.known_number = self.known_number or self.number(
            "SELECT id FROM namespaces WHERE name = :name", name=self.namespace
        )
        return self.known_number

    def make_namespace(self) -> None:
        if not self.namespace_id:  # it never goes
            self.run("INSERT INTO namespaces (name) VALUES (:name) ON CONFLICT DO NOTHING", name=self.namespace)

    def all(self, sql: str, **values: Value) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql, self._bound(sql, values))
        found: list[tuple[Any, ...]] = cursor.fetchall()
        if self.texts.names is PLAIN_NAMES or not found:
            return found
        columns = zip((name for name, *_ in cursor.description), zip(*found, strict=True), strict=True)
        return list(zip(*(self.texts.opened(*each) for each in columns), strict=True))

    def one(self, sql: str, **values: Value) -> tuple[Any, ...] | None:
        return next(iter(self.all(sql, **values)), None)

    def number(self, sql: str, **values: Value) -> int:
        [found] = self.one(sql, **values) or (0,)
        return int(found or 0)

    def digests(self, sql: str, **values: Value) -> list[Digest]:
        return [Digest(*found) for found in self.all(sql, **values)]

    def run(self, sql: str, **values: Value) -> int:
        """Run a statement that writes; how many rows it touched."""
        return int(self.connection.execute(sql, self._bound(sql, values)).rowcount)

    def later(self, sql: str, **values: Value) -> None:
        """Run a statement that writes, at the latest before the next one: a server gets both in one round trip."""
        run_later(self.connection, sql, self._bound(sql, values))

    def many(self, sql: str, rows: Iterable[Mapping[str, Value]]) -> None:
        self.connection.executemany(sql, (self._bound(sql, values) for values in rows))

    def _bound(self, sql: str, values: Mapping[str, Value]) -> dict[str, int | float | str | None]:
        bound = {name: self.texts.bound(name, value) for name, value in values.items()}
        return bound | {"namespace": self.namespace_id} if ":namespace" in sql else bound


class RowsAhead(Rows):
    """Finds nothing. A server answers what is read here with the next statement, and then the same reads at once. For
    reads that are surely done soon, and before anything is written."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.connection, rows.namespace, rows.texts.names)
        self.known_number = rows.namespace_id

    def all(self, sql: str, **values: Value) -> list[tuple[Any, ...]]:
        if ask := getattr(self.connection, "execute_ahead", None):
            ask(sql, self._bound(sql, values))
        return []


def numbered_digests(rows: Rows, sql: str, **values: Value) -> list[tuple[int, Digest]]:
    """As `Rows.digests`, of rows of number, hash and size, with their numbers."""
    return [(int(number), Digest(*found)) for number, *found in rows.all(sql, **values)]
