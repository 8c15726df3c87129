"""Rows of blobs: stored, facts of headers, promises, damage. Every statement names the namespace."""

from collections.abc import Iterable, Sequence

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_checks import BlobFacts, schema_hash
from cachestore_svc.index.sqlite.rows import Rows, Value, numbered_digests
from cachestore_svc.index.values import BlobEntry

_COLUMNS = """blobs.id, hash, size_bytes, kind, kv_identity_hash, start, tokens, chain, schema_hash, is_damaged,
    promised_unix_ms, is_brought, "window" """
_OF_TENSORS = ("kv_identity_hash", "start", "tokens", "chain", "window")


def namespaces(rows: Rows) -> list[str]:
    """Names of all namespaces, sorted."""
    return [str(name) for (name,) in rows.all("SELECT name FROM namespaces ORDER BY name")]


def find_blob(rows: Rows, digest: Digest) -> BlobEntry | None:
    """The blob's entry, damaged or not."""
    return find_blobs(rows, [digest]).get(digest)


def find_blobs(rows: Rows, digests: Iterable[Digest]) -> dict[Digest, BlobEntry]:
    """The entries of listed blobs, damaged ones too. A digest whose size is another blob's finds nothing."""
    wanted = {(digest.hash, digest.size_bytes): digest for digest in digests}
    entries = entries_of(rows, [hash_ for hash_, _ in wanted])
    return {wanted[name]: blob for blob in entries if (name := (blob.hash, blob.size_bytes)) in wanted}


def entries_of(rows: Rows, hashes: Sequence[str]) -> list[BlobEntry]:
    """The entries of listed blobs of these hashes, of any size, damaged ones too."""
    # Joined, each hash is looked up as it comes. Of a list behind IN SQLite makes an index first: twice the time.
    found = f"""SELECT {_COLUMNS} FROM json_each(:hash) AS sought CROSS JOIN blobs
        WHERE namespace_id = :namespace AND hash = sought.value"""  # noqa: S608
    return [BlobEntry(*each) for each in rows.all(found, hash=hashes)]


def add_blobs(rows: Rows, blobs: Sequence[tuple[Digest, BlobFacts]], now_unix_ms: int) -> list[bool]:
    """List blobs whose files are durable. False for each that replaces a damaged one."""
    rows.make_namespace()
    schemas = {text: schema_hash(text) for text in {facts.schema for _, facts in blobs if facts.identity}}
    new_schemas = [{"schema_hash": hash_, "tensors": text} for text, hash_ in schemas.items()]
    rows.many("INSERT INTO schemas VALUES (:schema_hash, :tensors) ON CONFLICT DO NOTHING", new_schemas)
    listed = find_blobs(rows, [digest for digest, _ in blobs])
    rows.many(
        """INSERT INTO blobs (namespace_id, hash, size_bytes, kind, kv_identity_hash, start, tokens, chain, schema_hash,
            created_unix_ms, "window") VALUES (:namespace, :hash, :size_bytes, :kind, :kv_identity_hash, :start,
            :tokens, :chain, :schema_hash, :now, :window)
            ON CONFLICT (namespace_id, hash) DO UPDATE SET is_damaged = FALSE, marked_unix_ms = NULL""",
        [_columns_of(digest, facts, schemas.get(facts.schema), now_unix_ms) for digest, facts in blobs],
    )
    return [digest not in listed for digest, _ in blobs]


def _columns_of(digest: Digest, facts: BlobFacts, schema: str | None, now_unix_ms: int) -> dict[str, Value]:
    about: dict[str, Value] = {name: getattr(facts.identity, name, None) for name in _OF_TENSORS}
    about |= {"hash": digest.hash, "size_bytes": digest.size_bytes, "kind": facts.kind}
    return about | {"schema_hash": schema, "now": now_unix_ms, "window": about["window"] or 0}


def promise(rows: Rows, blobs: Sequence[BlobEntry], now_unix_ms: int) -> None:
    """Note that a caller relies on these."""
    promised = "UPDATE blobs SET promised_unix_ms = :now WHERE id IN (SELECT value FROM json_each(:ids))"
    rows.run(promised, now=now_unix_ms, ids=[blob.id for blob in blobs])


def set_damaged(rows: Rows, digest: Digest, is_damaged: bool) -> bool:
    """Quarantine a blob, or take it out. True when that changed something."""
    changed = """UPDATE blobs SET is_damaged = :is_damaged WHERE namespace_id = :namespace AND hash = :hash
        AND size_bytes = :size_bytes AND is_damaged <> :is_damaged"""
    return rows.run(changed, is_damaged=is_damaged, hash=digest.hash, size_bytes=digest.size_bytes) > 0


def damaged_blobs(rows: Rows) -> list[Digest]:
    """Every blob in quarantine."""
    which = "namespace_id = :namespace AND is_damaged ORDER BY hash"
    return rows.digests(f"SELECT hash, size_bytes FROM blobs WHERE {which}")  # noqa: S608


def whole_blobs(rows: Rows) -> list[Digest]:
    """Every blob that is not in quarantine."""
    return rows.digests("SELECT hash, size_bytes FROM blobs WHERE namespace_id = :namespace AND NOT is_damaged")


def blobs_after(rows: Rows, number: int, limit: int) -> list[tuple[int, Digest]]:
    """Blobs behind one by the catalog's number, with their own; those in quarantine too."""
    which = "namespace_id = :namespace AND id > :number ORDER BY id LIMIT :limit"
    blobs = f"SELECT id, hash, size_bytes FROM blobs WHERE {which}"  # noqa: S608
    return numbered_digests(rows, blobs, number=number, limit=limit)


def all_hashes(rows: Rows) -> set[str]:
    """Hashes of the blobs of every namespace, damaged ones too."""
    return {str(hash_) for (hash_,) in rows.all("SELECT hash FROM blobs")}


def hashes_of(rows: Rows) -> set[str]:
    """Hashes of the namespace's blobs, damaged ones too."""
    return {hash_ for (hash_,) in rows.all("SELECT hash FROM blobs WHERE namespace_id = :namespace")}


def listed_hashes(rows: Rows, hashes: Sequence[str]) -> set[str]:
    """Those of the hashes that the namespace lists, damaged ones too."""
    listed = "SELECT hash FROM blobs WHERE namespace_id = :namespace AND hash IN (SELECT value FROM json_each(:hash))"
    return {hash_ for (hash_,) in rows.all(listed, hash=hashes)}


def has_hash(rows: Rows, hash_: str) -> bool:
    """Whether the namespace lists a blob of this hash, damaged or not."""
    listed = "SELECT 1 FROM blobs WHERE namespace_id = :namespace AND hash = :hash"
    return rows.one(listed, hash=hash_) is not None


def counted_bytes(rows: Rows) -> int:
    """Bytes of the namespace's blobs, as a database of a server counts them with each change."""
    return rows.number("SELECT bytes FROM stored WHERE namespace_id = :namespace")


def stored_bytes(rows: Rows) -> dict[str, int]:
    """Bytes of all blobs, by namespace."""
    # In the table's own order: in an index's order each row is a read of its own.
    return dict(
        rows.all(
            """SELECT namespaces.name, sums.size_bytes FROM (
                SELECT +namespace_id AS namespace_id, SUM(size_bytes) AS size_bytes
                FROM blobs NOT INDEXED GROUP BY +namespace_id) AS sums
                JOIN namespaces ON namespaces.id = sums.namespace_id"""
        )
    )
