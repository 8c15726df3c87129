"""Rows of blobs: which are stored, the facts of their headers, their promises, and their damage.

Every statement names a namespace: a hash alone finds nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_checks import BlobFacts, schema_hash
from cachestore_svc.index.ports.blobs import BlobEntry
from cachestore_svc.index.sqlite.rows import HASH, KEYED, PLAIN, Parameter, Rows, Text

_COLUMNS = """id, hash, size_bytes, kind, kv_identity_hash, start, tokens, chain, schema_hash, is_damaged,
    promised_unix_ms, is_brought, window"""


def find_namespace(rows: Rows, namespace: str) -> int:
    """Id of a namespace; 0, which none has, for one that holds nothing yet."""
    found = rows.one("SELECT id FROM namespaces WHERE name = ?", PLAIN(namespace))
    return int(found[0]) if found else 0


def make_namespace(rows: Rows, namespace: str) -> int:
    rows.run("INSERT OR IGNORE INTO namespaces (name) VALUES (?)", PLAIN(namespace))
    return find_namespace(rows, namespace)


def namespaces(rows: Rows) -> list[str]:
    return [str(name) for (name,) in rows.all("SELECT name FROM namespaces ORDER BY name")]


def find_blob(rows: Rows, namespace: str, digest: Digest) -> BlobEntry | None:
    return find_blobs(rows, namespace, [digest]).get(digest)


def find_blobs(rows: Rows, namespace: str, digests: Iterable[Digest]) -> dict[Digest, BlobEntry]:
    wanted = set(digests)
    found = entries_of(rows, namespace, [digest.hash for digest in wanted])
    return {digest: blob for blob in found if (digest := blob.digest) in wanted}


def entries_of(rows: Rows, namespace: str, hashes: Sequence[str]) -> Iterator[BlobEntry]:
    """The entries of these hashes, whatever their sizes."""
    found = rows.all(
        f"SELECT {_COLUMNS} FROM blobs WHERE namespace_id = ? AND hash IN (SELECT value FROM json_each(?))",  # noqa: S608
        find_namespace(rows, namespace),
        HASH.each(hashes),
    )
    opened = rows.names.open_hashes([row[1] for row in found])
    return (BlobEntry(row[0], hash_, *row[2:]) for row, hash_ in zip(found, opened, strict=True))


def add_blobs(rows: Rows, namespace: str, blobs: Sequence[tuple[Digest, BlobFacts]], now_unix_ms: int) -> list[bool]:
    namespace_id = make_namespace(rows, namespace)
    schemas = {facts.schema: PLAIN(schema_hash(facts.schema)) for _, facts in blobs if facts.identity}
    rows.many("INSERT OR IGNORE INTO schemas VALUES (?, ?)", [(hash_, PLAIN(text)) for text, hash_ in schemas.items()])
    listed = find_blobs(rows, namespace, [digest for digest, _ in blobs])
    rows.many(
        """INSERT INTO blobs (namespace_id, hash, size_bytes, kind, kv_identity_hash, start, tokens, chain, schema_hash,
            created_unix_ms, window) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
            ON CONFLICT (namespace_id, hash) DO UPDATE SET is_damaged = 0, marked_unix_ms = NULL""",
        [
            (
                *(namespace_id, HASH(digest.hash), digest.size_bytes, PLAIN(facts.kind)),
                *_columns_of(facts, schemas, now_unix_ms),
            )
            for digest, facts in blobs
        ],
    )
    return [digest not in listed for digest, _ in blobs]


def _columns_of(facts: BlobFacts, schemas: Mapping[str, Text], now_unix_ms: int) -> tuple[Parameter, ...]:
    """From kv_identity_hash on."""
    file = facts.identity
    if file is None:
        return (None, None, None, None, None, now_unix_ms, 0)
    return (
        *(PLAIN(file.kv_identity_hash), file.start, file.tokens, KEYED(file.chain)),
        *(schemas[facts.schema], now_unix_ms, file.window),
    )


def promise(rows: Rows, blobs: Sequence[BlobEntry], now_unix_ms: int) -> None:
    rows.many("UPDATE blobs SET promised_unix_ms = ? WHERE id = ?", [(now_unix_ms, blob.id) for blob in blobs])


def set_damaged(rows: Rows, namespace: str, digest: Digest, is_damaged: bool) -> bool:
    changed = rows.run(
        "UPDATE blobs SET is_damaged = ? WHERE namespace_id = ? AND hash = ? AND size_bytes = ? AND is_damaged <> ?",
        is_damaged,
        find_namespace(rows, namespace),
        HASH(digest.hash),
        digest.size_bytes,
        is_damaged,
    )
    return changed > 0


def damaged_blobs(rows: Rows, namespace: str) -> list[Digest]:
    """Every blob of the namespace in quarantine."""
    found = rows.all(
        "SELECT hash, size_bytes FROM blobs WHERE namespace_id = ? AND is_damaged ORDER BY hash",
        find_namespace(rows, namespace),
    )
    return rows.digests(found)


def whole_blobs(rows: Rows, namespace: str) -> list[Digest]:
    found = rows.all(
        "SELECT hash, size_bytes FROM blobs WHERE namespace_id = ? AND NOT is_damaged", find_namespace(rows, namespace)
    )
    return rows.digests(found)


def blobs_after(rows: Rows, namespace: str, number: int, limit: int) -> list[tuple[int, Digest]]:
    found = rows.all(
        "SELECT id, hash, size_bytes FROM blobs WHERE namespace_id = ? AND id > ? ORDER BY id LIMIT ?",
        *(find_namespace(rows, namespace), number, limit),
    )
    return rows.numbered_digests(found)


def all_hashes(rows: Rows) -> set[str]:
    return {str(hash_) for (hash_,) in rows.all("SELECT hash FROM blobs")}


def hashes_of(rows: Rows, namespace: str) -> set[str]:
    found = rows.all("SELECT hash FROM blobs WHERE namespace_id = ?", find_namespace(rows, namespace))
    return set(rows.names.open_hashes([hash_ for (hash_,) in found]))


def has_hash(rows: Rows, namespace: str, hash_: str) -> bool:
    namespace_id = find_namespace(rows, namespace)
    return rows.one("SELECT 1 FROM blobs WHERE namespace_id = ? AND hash = ?", namespace_id, HASH(hash_)) is not None


def stored_bytes(rows: Rows) -> dict[str, int]:
    # In the table's own order: in an index's order each row is a read of its own.
    return dict(
        rows.all(
            """SELECT namespaces.name, sums.size_bytes FROM (SELECT namespace_id, SUM(size_bytes) AS size_bytes
                FROM blobs NOT INDEXED GROUP BY +namespace_id) AS sums
                JOIN namespaces ON namespaces.id = sums.namespace_id"""
        )
    )
