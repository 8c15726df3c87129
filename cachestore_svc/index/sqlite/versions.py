"""Rows of lines and their versions: the newest, the ones before it, and the blobs that each holds.

All versions of an agent are numbered in one order, whichever line each belongs to. A version holds its manifest, and
the manifest's rows hold its blobs. A blob that nothing holds is garbage. References are not counted, so no count can be
wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.errors import NotFound
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import LineKey, LineQuery, Origin, SnapshotVersion
from cachestore_svc.index.ports.blobs import BlobEntry
from cachestore_svc.index.refusals import no_agent, no_line
from cachestore_svc.index.sqlite.blobs import find_blob, find_blobs, find_namespace
from cachestore_svc.index.sqlite.provenance import TEXT_OWN
from cachestore_svc.index.sqlite.rows import AGENT, DETAIL, HASH, PLAIN, REQUEST, Rows, Text, numbers

_DROPPED_REMEMBERED = 1_000

# Used in WHERE clauses over `blobs`.
IS_REFERENCED = """(EXISTS (SELECT 1 FROM manifests WHERE manifests.blob_id = blobs.id)
    OR EXISTS (SELECT 1 FROM manifest_blobs WHERE manifest_blobs.blob_id = blobs.id))"""

# Used in ORDER BY clauses over `lines`. Data of an earlier form numbered each line by itself.
_NEWEST_FIRST = """(SELECT MAX(version) FROM versions WHERE versions.line_id = lines.id) DESC,
    lines.used_unix_ms DESC, lines.id DESC"""
_SNAPSHOT = """SELECT agents.name, lines.kv_identity_hash, versions.version, blobs.hash, blobs.size_bytes,
    versions.parent_version, manifests.token_count, versions.created_unix_ms, manifests.total_bytes, versions.origin,
    versions.origin_detail, manifests.request_id, blobs.is_brought
    FROM versions JOIN lines ON lines.id = versions.line_id JOIN agents ON agents.id = lines.agent_id
    JOIN manifests ON manifests.blob_id = versions.manifest_id JOIN blobs ON blobs.id = versions.manifest_id"""


@dataclass(frozen=True, slots=True)
class Line:
    id: int
    agent_id: int
    kv_identity_hash: str
    used_unix_ms: int


@dataclass(frozen=True, slots=True)
class NewVersion:
    """The fields of a new version beside its number."""

    parent_version: int
    manifest_id: int
    origin: Origin
    origin_detail: str


def find_line(rows: Rows, query: LineQuery | LineKey) -> Line | None:
    """The line of that KV identity; without one: the line of the agent's newest version."""
    found = rows.one(
        f"""SELECT lines.id, lines.agent_id, lines.kv_identity_hash, lines.used_unix_ms
            FROM lines JOIN agents ON agents.id = lines.agent_id
            WHERE agents.namespace_id = ? AND agents.name = ? AND (? IS NULL OR lines.kv_identity_hash = ?)
            ORDER BY {_NEWEST_FIRST} LIMIT 1""",  # noqa: S608
        find_namespace(rows, query.namespace),
        AGENT(query.agent_id),
        *_twice(query.kv_identity_hash),
    )
    return Line(*found) if found else None


def get_line(rows: Rows, query: LineQuery | LineKey) -> Line:
    """As find_line. Raises NotFound."""
    found = find_line(rows, query)
    if found is None:
        _agent_row(rows, query)
        raise no_line(query.agent_id)
    return found


def lines_of(rows: Rows, agent_id: int) -> list[Line]:
    """An agent's lines, the one with its newest version first."""
    found = rows.all(
        f"""SELECT id, agent_id, kv_identity_hash, used_unix_ms FROM lines WHERE agent_id = ?
            ORDER BY {_NEWEST_FIRST}""",  # noqa: S608
        agent_id,
    )
    return [Line(*row) for row in found]


def make_line(rows: Rows, agent_id: int, kv_hash: str, now_unix_ms: int) -> int:
    """Id of an agent's line, made when it is not there; counts as a use."""
    rows.run(
        """INSERT INTO lines (agent_id, kv_identity_hash, used_unix_ms) VALUES (?, ?, ?)
            ON CONFLICT (agent_id, kv_identity_hash) DO UPDATE SET used_unix_ms = excluded.used_unix_ms""",
        agent_id,
        PLAIN(kv_hash),
        now_unix_ms,
    )
    found = rows.one("SELECT id FROM lines WHERE agent_id = ? AND kv_identity_hash = ?", agent_id, PLAIN(kv_hash))
    assert found is not None
    return int(found[0])


def use_line(rows: Rows, line: LineKey, now_unix_ms: int) -> None:
    """Note that the line was used, if it still exists."""
    if found := find_line(rows, line):
        touch(rows, found.id, now_unix_ms)


def touch(rows: Rows, line_id: int, now_unix_ms: int) -> None:
    """Note that the line of this row was used."""
    rows.run("UPDATE lines SET used_unix_ms = ? WHERE id = ?", now_unix_ms, line_id)


def get_snapshot(rows: Rows, query: LineQuery, version: int | None) -> tuple[SnapshotVersion, int]:
    line = line_with(rows, query, version)
    return get_version(rows, line, version), line.used_unix_ms


def line_with(rows: Rows, query: LineQuery, version: int | None) -> Line:
    """The line that is asked for; of several, the newest that has that version. Raises NotFound."""
    newest = get_line(rows, query)
    if query.kv_identity_hash is not None or version is None:
        return newest
    lines = lines_of(rows, newest.agent_id)
    return next((line for line in lines if find_version(rows, line.id, version)), newest)


def newest_of(rows: Rows, line: LineQuery | LineKey) -> SnapshotVersion | None:
    found = find_line(rows, line)
    return get_version(rows, found, None) if found else None


def snapshots_after(rows: Rows, query: LineQuery, before: int, after_line: str, limit: int) -> list[SnapshotVersion]:
    found = rows.all(
        f"""{_SNAPSHOT} WHERE lines.agent_id = ? AND (? IS NULL OR lines.kv_identity_hash = ?)
            AND (versions.version < ? OR (versions.version = ? AND lines.kv_identity_hash > ?))
            ORDER BY versions.version DESC, lines.kv_identity_hash LIMIT ?""",
        _agent_row(rows, query),
        *_twice(query.kv_identity_hash),
        *(before, before, PLAIN(after_line), limit),
    )
    return [_snapshot(rows, row) for row in found]


def _agent_row(rows: Rows, query: LineQuery | LineKey) -> int:
    """Id of the agent's row. Raises NotFound."""
    found = rows.one(
        "SELECT id FROM agents WHERE namespace_id = ? AND name = ?",
        find_namespace(rows, query.namespace),
        AGENT(query.agent_id),
    )
    if found is None:
        raise no_agent(query.agent_id)
    return int(found[0])


def head_of(rows: Rows, line_id: int) -> int:
    """The newest version's number; 0 for none."""
    found = rows.one("SELECT MAX(version) FROM versions WHERE line_id = ?", line_id)
    return int(found[0] or 0) if found else 0


def find_version(rows: Rows, line_id: int, version: int) -> SnapshotVersion | None:
    found = rows.one(f"{_SNAPSHOT} WHERE versions.line_id = ? AND versions.version = ?", line_id, version)
    return _snapshot(rows, found) if found else None


def get_version(rows: Rows, line: Line, version: int | None) -> SnapshotVersion:
    """The version of that number; None: the newest. Raises NotFound."""
    found = find_version(rows, line.id, head_of(rows, line.id) if version is None else version)
    if found is None:
        [sealed] = rows.one("SELECT name FROM agents WHERE id = ?", line.agent_id) or ("",)
        name = rows.opened(AGENT, sealed)
        raise NotFound(
            f"agent {name!r} has no version {version}", reason="VERSION_NOT_FOUND", metadata={"agent_id": name}
        )
    return found


def newest_number(rows: Rows, agent_id: int) -> int:
    """The number of an agent's newest version; 0 for none."""
    return max((head_of(rows, line.id) for line in lines_of(rows, agent_id)), default=0)


def add_version(rows: Rows, line_id: int, new: NewVersion, now_unix_ms: int) -> SnapshotVersion:
    """The agent's next version, in this line."""
    [agent_id] = rows.one("SELECT agent_id FROM lines WHERE id = ?", line_id) or (0,)
    version = newest_number(rows, agent_id) + 1
    rows.run(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
        line_id,
        version,
        new.parent_version,
        new.manifest_id,
        int(new.origin),
        DETAIL(new.origin_detail),
        now_unix_ms,
    )
    added = find_version(rows, line_id, version)
    assert added is not None
    return added


def manifest_id_of(rows: Rows, line_id: int, version: int) -> int:
    found = rows.one("SELECT manifest_id FROM versions WHERE line_id = ? AND version = ?", line_id, version)
    return int(found[0]) if found else 0


def hold_manifest(
    rows: Rows, manifest: BlobEntry, named: Sequence[BlobEntry], token_count: int, request_id: str
) -> None:
    """From now on a manifest holds on to the blobs that it names. It may do so already."""
    total = manifest.size_bytes + sum(blob.size_bytes for blob in named)
    is_new = rows.run(
        "INSERT OR IGNORE INTO manifests VALUES (?, ?, ?, ?)", manifest.id, token_count, total, REQUEST(request_id)
    )
    if is_new:
        rows.many(
            "INSERT INTO manifest_blobs VALUES (?, ?, ?)",
            [(manifest.id, position, blob.id) for position, blob in enumerate(named)],
        )
    # A later release must give them their whole rest.
    ids = [(blob.id,) for blob in (manifest, *named)]
    rows.many("UPDATE blobs SET marked_unix_ms = NULL WHERE id = ? AND marked_unix_ms IS NOT NULL", ids)


def named_digests(rows: Rows, manifest_id: int) -> list[Digest]:
    found = rows.all(
        """SELECT blobs.hash, blobs.size_bytes FROM manifest_blobs JOIN blobs ON blobs.id = manifest_blobs.blob_id
            WHERE manifest_blobs.manifest_id = ? ORDER BY manifest_blobs.position""",
        manifest_id,
    )
    return rows.digests(found)


def named_after(rows: Rows, namespace: str, manifest: Digest, position: int, limit: int) -> list[tuple[int, Digest]]:
    found = rows.all(
        """SELECT manifest_blobs.position, blobs.hash, blobs.size_bytes FROM manifest_blobs
            JOIN blobs ON blobs.id = manifest_blobs.blob_id
            WHERE manifest_blobs.position > ? AND manifest_blobs.manifest_id =
                (SELECT id FROM blobs WHERE namespace_id = ? AND hash = ? AND size_bytes = ?)
            ORDER BY manifest_blobs.position LIMIT ?""",
        position,
        find_namespace(rows, namespace),
        HASH(manifest.hash),
        manifest.size_bytes,
        limit,
    )
    return rows.numbered_digests(found)


def is_held(rows: Rows, namespace: str, manifest: Digest) -> bool:
    found = rows.one(
        """SELECT 1 FROM manifests JOIN blobs ON blobs.id = manifests.blob_id
            WHERE blobs.namespace_id = ? AND blobs.hash = ? AND blobs.size_bytes = ?""",
        find_namespace(rows, namespace),
        HASH(manifest.hash),
        manifest.size_bytes,
    )
    return found is not None


def held_manifests(rows: Rows, namespace: str) -> list[Digest]:
    found = rows.all(
        """SELECT blobs.hash, blobs.size_bytes FROM manifests JOIN blobs ON blobs.id = manifests.blob_id
            WHERE blobs.namespace_id = ? AND NOT blobs.is_damaged""",
        find_namespace(rows, namespace),
    )
    return rows.digests(found)


def names_others(rows: Rows, namespace: str, manifest: Digest, named: Sequence[Digest]) -> bool:
    """Whether a manifest that is held holds on to other blobs than these. A version dropped meanwhile has no rows."""
    found = find_blob(rows, namespace, manifest)
    return is_held(rows, namespace, manifest) and found is not None and named_digests(rows, found.id) != list(named)


def hold_anew(rows: Rows, namespace: str, manifest: Digest, named: Sequence[Digest]) -> None:
    if not is_held(rows, namespace, manifest):
        return
    found = find_blobs(rows, namespace, [manifest, *named])
    manifest_id = found[manifest].id
    rows.run("DELETE FROM manifest_blobs WHERE manifest_id = ?", manifest_id)
    rows.many(
        "INSERT INTO manifest_blobs VALUES (?, ?, ?)",
        [(manifest_id, place, found[digest].id) for place, digest in enumerate(named) if digest in found],
    )


def has_had(rows: Rows, query: LineQuery, manifest_hash: str) -> bool:
    found = rows.one(
        """SELECT 1 FROM agents JOIN namespaces ON namespaces.id = agents.namespace_id
            WHERE namespaces.name = ? AND agents.name = ? AND (
                EXISTS (SELECT 1 FROM dropped WHERE dropped.agent_id = agents.id AND dropped.manifest_hash = ?)
                OR EXISTS (SELECT 1 FROM lines JOIN versions ON versions.line_id = lines.id
                    JOIN blobs ON blobs.id = versions.manifest_id
                    WHERE lines.agent_id = agents.id AND blobs.hash = ?))""",
        *(PLAIN(query.namespace), AGENT(query.agent_id), HASH(manifest_hash), HASH(manifest_hash)),
    )
    return found is not None


def drop_version(rows: Rows, line_id: int, version: int) -> list[int]:
    """Remove a version; ids of the blobs that nothing holds any more. That it was there is remembered longer: what
    grew out of a version follows it in other stores, too."""
    manifest_id = manifest_id_of(rows, line_id, version)
    rows.run(
        """INSERT OR REPLACE INTO dropped SELECT lines.agent_id, blobs.hash, versions.version, versions.origin
            FROM versions JOIN lines ON lines.id = versions.line_id JOIN blobs ON blobs.id = versions.manifest_id
            WHERE versions.line_id = ? AND versions.version = ?""",
        *(line_id, version),
    )
    rows.run(
        """DELETE FROM dropped WHERE agent_id = (SELECT agent_id FROM lines WHERE id = ?) AND version <= ?
            AND origin NOT IN (?, ?)""",
        *(line_id, version - _DROPPED_REMEMBERED, int(Origin.PULL), int(Origin.MOVE)),
    )
    rows.run("DELETE FROM versions WHERE line_id = ? AND version = ?", line_id, version)
    return let_go(rows, manifest_id)


def let_go(rows: Rows, manifest_id: int) -> list[int]:
    """Release the blobs of a manifest, unless it is still a version; returns the ids of those that nothing holds
    now."""
    if rows.one("SELECT 1 FROM versions WHERE manifest_id = ?", manifest_id):
        return []
    named = rows.all("SELECT blob_id FROM manifest_blobs WHERE manifest_id = ?", manifest_id)
    rows.run("DELETE FROM manifests WHERE blob_id = ?", manifest_id)
    candidates = [manifest_id, *(blob_id for (blob_id,) in named)]
    unheld = rows.all(
        f"SELECT id FROM blobs WHERE id IN (SELECT value FROM json_each(?)) AND NOT {IS_REFERENCED}",  # noqa: S608
        numbers(candidates),
    )
    return [int(blob_id) for (blob_id,) in unheld]


def retain(rows: Rows, line_id: int, kept: int) -> None:
    """Drop a line's oldest versions beyond those kept. What nothing holds then waits for collection."""
    old = rows.all(
        "SELECT version FROM versions WHERE line_id = ? ORDER BY version DESC LIMIT -1 OFFSET ?", line_id, kept
    )
    for (version,) in old:
        drop_version(rows, line_id, version)


def _twice(kv_hash: str | None) -> tuple[Text | None, Text | None]:
    """For "(? IS NULL OR kv_identity_hash = ?)"."""
    text = None if kv_hash is None else PLAIN(kv_hash)
    return text, text


def _snapshot(rows: Rows, row: tuple[object, ...]) -> SnapshotVersion:
    agent, kv_hash, version, hash_, size, parent, tokens, created, total, origin, detail, request, is_brought = row
    return SnapshotVersion(
        agent_id=rows.opened(AGENT, str(agent)),
        kv_identity_hash=str(kv_hash),
        version=_int(version),
        manifest=Digest(rows.opened(HASH, str(hash_)), _int(size)),
        parent_version=_int(parent),
        token_count=_int(tokens),
        created_unix_ms=_int(created),
        total_bytes=_int(total),
        origin=Origin(_int(origin)),
        origin_detail=rows.opened(DETAIL, str(detail)),
        request_id=rows.opened(REQUEST, str(request)),
        is_brought=bool(is_brought),
        is_text_own=is_brought == TEXT_OWN,
    )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
