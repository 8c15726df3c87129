"""Rows of lines and their versions, numbered in one order per agent. A version holds its manifest, whose rows hold its
blobs; a blob that nothing holds is garbage. References are not counted, so no count can be wrong.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvasir.errors import NotFound
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import ManifestFacts
from cachestore_svc.facts.records import LineKey, LineQuery, Origin, SnapshotVersion
from cachestore_svc.index.refusals import no_agent, no_line
from cachestore_svc.index.sqlite.blobs import find_blobs
from cachestore_svc.index.sqlite.provenance import TEXT_OWN
from cachestore_svc.index.sqlite.rows import Rows, Value, numbered_digests
from cachestore_svc.index.values import BlobEntry

_DROPPED_REMEMBERED = 1_000

# Used in WHERE clauses over `blobs`.
IS_REFERENCED = """(EXISTS (SELECT 1 FROM manifests WHERE manifests.blob_id = blobs.id)
    OR EXISTS (SELECT 1 FROM manifest_blobs WHERE manifest_blobs.blob_id = blobs.id))"""
_IS_MANIFEST = "blobs.namespace_id = :namespace AND blobs.hash = :hash AND blobs.size_bytes = :size_bytes"
_OF_LINE = "(:kv_identity_hash IS NULL OR lines.kv_identity_hash = :kv_identity_hash)"

# Used in ORDER BY clauses over `lines`. Data of an earlier form numbered each line by itself.
_NEWEST_FIRST = """(SELECT MAX(version) FROM versions WHERE versions.line_id = lines.id) DESC,
    lines.used_unix_ms DESC, lines.id DESC"""
_LINE = "SELECT lines.id, lines.agent_id, lines.kv_identity_hash, lines.used_unix_ms FROM lines"
_COLUMNS = """agents.name AS agent_id, lines.kv_identity_hash, versions.version, blobs.hash, blobs.size_bytes,
    versions.parent_version, manifests.token_count, versions.created_unix_ms, manifests.total_bytes, versions.origin,
    versions.origin_detail, manifests.request_id, blobs.is_brought"""
_FROM = """FROM versions JOIN lines ON lines.id = versions.line_id JOIN agents ON agents.id = lines.agent_id
    JOIN manifests ON manifests.blob_id = versions.manifest_id JOIN blobs ON blobs.id = versions.manifest_id"""
_SNAPSHOT = f"SELECT {_COLUMNS} {_FROM}"


@dataclass(frozen=True, slots=True)
class Line:
    id: int
    agent_id: int
    kv_identity_hash: str
    used_unix_ms: int


class Head(NamedTuple):
    """The newest version of a line, and when the line was last used."""

    used_unix_ms: int
    snapshot: SnapshotVersion


def find_line(rows: Rows, line: LineQuery | LineKey) -> Line | None:
    newest = f"""{_LINE} JOIN agents ON agents.id = lines.agent_id
        WHERE agents.namespace_id = :namespace AND agents.name = :agent_id AND {_OF_LINE}
        ORDER BY {_NEWEST_FIRST} LIMIT 1"""
    found = rows.one(newest, agent_id=line.agent_id, kv_identity_hash=line.kv_identity_hash)
    return Line(*found) if found else None


def get_line(rows: Rows, line: LineQuery | LineKey) -> Line:
    found = find_line(rows, line)
    if found is None:
        _agent_row(rows, line.agent_id)
        raise no_line(line.agent_id)
    return found


def lines_of(rows: Rows, agent: int) -> list[Line]:
    return [
        Line(*found) for found in rows.all(f"{_LINE} WHERE agent_id = :agent ORDER BY {_NEWEST_FIRST}", agent=agent)
    ]


def heads_of(rows: Rows, agents: Sequence[int]) -> dict[int, list[Head]]:
    """The newest version of each line, by agent, newest first: of many agents by one statement."""
    found = rows.all(
        f"""SELECT lines.agent_id AS agent, lines.used_unix_ms, {_COLUMNS} {_FROM}
            WHERE lines.agent_id IN (SELECT value FROM json_each(:ids)) AND versions.version =
                (SELECT MAX(version) FROM versions AS other WHERE other.line_id = versions.line_id)
            ORDER BY versions.version DESC, lines.used_unix_ms DESC, lines.id DESC""",  # noqa: S608
        ids=agents,
    )
    heads: dict[int, list[Head]] = {agent: [] for agent in agents}
    for agent, used_unix_ms, *snapshot in found:
        heads[agent].append(Head(used_unix_ms, _snapshot(tuple(snapshot))))
    return heads


def newest_line(rows: Rows, agent_id: str) -> tuple[Line, SnapshotVersion] | None:
    """The agent's line with its newest version, and that version."""
    line = "lines.id, lines.agent_id AS agent, lines.kv_identity_hash, lines.used_unix_ms"
    newest = f"""SELECT {line}, {_COLUMNS} {_FROM}
        WHERE agents.namespace_id = :namespace AND agents.name = :agent_id
        AND versions.version = (SELECT MAX(version) FROM versions AS other WHERE other.line_id = lines.id)
        ORDER BY versions.version DESC, lines.used_unix_ms DESC, lines.id DESC LIMIT 1"""  # noqa: S608
    found = rows.one(newest, agent_id=agent_id)
    return (Line(*found[:4]), _snapshot(found[4:])) if found else None


def make_line(rows: Rows, agent: int, kv_hash: str, now_unix_ms: int) -> int:
    """Id of an agent's line, made when it is not there; counts as a use."""
    used = """INSERT INTO lines (agent_id, kv_identity_hash, used_unix_ms) VALUES (:agent, :kv_identity_hash, :now)
        ON CONFLICT (agent_id, kv_identity_hash) DO UPDATE SET used_unix_ms = excluded.used_unix_ms"""
    rows.later(used, agent=agent, kv_identity_hash=kv_hash, now=now_unix_ms)
    made = "SELECT id FROM lines WHERE agent_id = :agent AND kv_identity_hash = :kv_identity_hash"
    return rows.number(made, agent=agent, kv_identity_hash=kv_hash)


def used_line(rows: Rows, newest: Line | None, agent: int, kv_hash: str, now_unix_ms: int) -> int:
    """As `make_line`, which need not look where the agent's newest line is the one."""
    if newest is None or newest.kv_identity_hash != kv_hash:
        return make_line(rows, agent, kv_hash, now_unix_ms)
    touch(rows, newest.id, now_unix_ms)
    return newest.id


def use_line(rows: Rows, line: LineKey, now_unix_ms: int) -> None:
    """Note that the line was used."""
    if found := find_line(rows, line):
        touch(rows, found.id, now_unix_ms)


def touch(rows: Rows, line_id: int, now_unix_ms: int) -> None:
    rows.later("UPDATE lines SET used_unix_ms = :now WHERE id = :line", now=now_unix_ms, line=line_id)


def get_snapshot(rows: Rows, query: LineQuery, version: int | None) -> tuple[SnapshotVersion, int]:
    """The version of that number (None: the newest), and when its line was last used. Raises NotFound."""
    line = line_with(rows, query, version)
    return get_version(rows, line, version), line.used_unix_ms


def line_with(rows: Rows, query: LineQuery, version: int | None) -> Line:
    """The wanted line; of several, the newest that has that version. Raises NotFound."""
    newest = get_line(rows, query)
    if query.kv_identity_hash is not None or version is None:
        return newest
    lines = lines_of(rows, newest.agent_id)
    return next((line for line in lines if find_version(rows, line.id, version)), newest)


def newest_of(rows: Rows, line: LineQuery | LineKey) -> SnapshotVersion | None:
    """The newest version of the line, or of the agent where no line is named, if there is any."""
    found = find_line(rows, line)
    return get_version(rows, found, None) if found else None


def snapshots_after(rows: Rows, query: LineQuery, before: int, after_line: str, limit: int) -> list[SnapshotVersion]:
    """Versions, newest first: below `before`, and of that number in lines behind `after_line`. Raises NotFound."""
    agent, kv_hash = _agent_row(rows, query.agent_id), query.kv_identity_hash
    older = f"""{_SNAPSHOT} WHERE lines.agent_id = :agent AND {_OF_LINE}
        AND (versions.version < :before OR (versions.version = :before AND lines.kv_identity_hash > :after))
        ORDER BY versions.version DESC, lines.kv_identity_hash LIMIT :limit"""
    found = rows.all(older, agent=agent, kv_identity_hash=kv_hash, before=before, after=after_line, limit=limit)
    return [_snapshot(each) for each in found]


def _agent_row(rows: Rows, agent_id: str) -> int:
    found = rows.number("SELECT id FROM agents WHERE namespace_id = :namespace AND name = :agent_id", agent_id=agent_id)
    if not found:
        raise no_agent(agent_id)
    return found


def head_of(rows: Rows, line_id: int) -> int:
    return rows.number("SELECT MAX(version) FROM versions WHERE line_id = :line", line=line_id)


def find_version(rows: Rows, line_id: int, version: int | None) -> SnapshotVersion | None:
    """The version of that number; None: the newest."""
    numbers: dict[str, Value] = {"line": line_id} if version is None else {"line": line_id, "version": version}
    number = "(SELECT MAX(version) FROM versions WHERE line_id = :line)" if version is None else ":version"
    found = rows.one(f"{_SNAPSHOT} WHERE versions.line_id = :line AND versions.version = {number}", **numbers)
    return _snapshot(found) if found else None


def get_version(rows: Rows, line: Line, version: int | None) -> SnapshotVersion:
    """The version of that number; None: the newest. Raises NotFound."""
    found = find_version(rows, line.id, version)
    if found is None:
        [name] = rows.one("SELECT name AS agent_id FROM agents WHERE id = :agent", agent=line.agent_id) or ("",)
        raise NotFound(
            f"agent {name!r} has no version {version}", reason="VERSION_NOT_FOUND", metadata={"agent_id": name}
        )
    return found


def newest_number(rows: Rows, line_id: int) -> int:
    """The newest version of the line's agent, whichever of its lines has it; 0 where none has one."""
    return rows.number(
        """SELECT MAX((SELECT MAX(version) FROM versions WHERE versions.line_id = lines.id)) FROM lines
            WHERE agent_id = (SELECT agent_id FROM lines WHERE id = :line)""",
        line=line_id,
    )


def add_version(
    rows: Rows, line_id: int, parent_version: int, manifest_id: int, origin: Origin, origin_detail: str, now: int
) -> SnapshotVersion:
    """Add the agent's next version. `parent_version`: its newest one, or 0."""
    number = (parent_version or newest_number(rows, line_id)) + 1
    put_version(rows, "INSERT", line_id, number, (parent_version, manifest_id, int(origin), origin_detail, now))
    added = find_version(rows, line_id, number)
    assert added is not None
    return added


def put_version(rows: Rows, verb: str, line_id: int, number: int, facts: tuple[int, int, int, str, int]) -> None:
    """Write a version: "INSERT", or "INSERT OR REPLACE" one that has its number. `facts`: in the table's order."""
    names = ("parent", "manifest", "origin", "origin_detail", "created")
    values: dict[str, Value] = dict(zip(names, facts, strict=True))
    all_of = "(:line, :version, :parent, :manifest, :origin, :origin_detail, :created)"
    rows.later(f"{verb} INTO versions VALUES {all_of}", line=line_id, version=number, **values)


def manifest_id_of(rows: Rows, line_id: int, version: int) -> int:
    which = "line_id = :line AND version = :version"
    return rows.number(f"SELECT manifest_id FROM versions WHERE {which}", line=line_id, version=version)  # noqa: S608


class KnownPart(NamedTuple):
    """So many of the first blobs that a commit names are those of a held manifest, which has this number. None of them
    needs a look: they fit, and are undamaged, unmarked and not brought.
    """

    length: int = 0
    manifest_id: int = 0


NOTHING_KNOWN = KnownPart()


def known_part(rows: Rows, parent_hash: str, count: int, bound: int) -> KnownPart:
    """The first `count` blobs of a manifest, if it holds them, they are as they should be, and the first `bound` of
    them are bound to their block hashes: a block has only one. None of a manifest that was brought: a commit from
    elsewhere marks those that no other one holds.
    """
    # Subqueries, which no planner turns into a look at all blobs.
    found = rows.one(
        """SELECT manifest_id, COUNT((SELECT 1 FROM blobs
                WHERE id = blob_id AND NOT is_damaged AND is_brought = 0 AND marked_unix_ms IS NULL)),
            COUNT(CASE WHEN position < :bound THEN (SELECT 1 FROM prefixes
                WHERE prefixes.blob_id = manifest_blobs.blob_id LIMIT 1) END)
            FROM manifest_blobs WHERE position < :count AND manifest_id = (SELECT id FROM blobs
                WHERE namespace_id = :namespace AND hash = :hash AND is_brought = 0) GROUP BY manifest_id""",
        hash=parent_hash,
        count=count,
        bound=bound,
    )
    return KnownPart(count, int(found[0])) if found and tuple(found[1:]) == (count, bound) else NOTHING_KNOWN


def hold_manifest(
    rows: Rows,
    manifest: BlobEntry,
    facts: ManifestFacts,
    named: Sequence[BlobEntry],
    known: KnownPart = NOTHING_KNOWN,
) -> None:
    """From now on a manifest holds on to the blobs that it names: those that are known, and `named` behind these. It
    may do so already."""
    held = "INSERT INTO manifests VALUES (:manifest, :tokens, :total, :request_id) ON CONFLICT DO NOTHING"
    tokens, total = facts.tokens, total_bytes(manifest, facts)
    rows.later(held, manifest=manifest.id, tokens=tokens, total=total, request_id=facts.request_id)
    if known.length:
        same = """INSERT INTO manifest_blobs SELECT :manifest, position, blob_id FROM manifest_blobs
            WHERE manifest_id = :parent AND position < :count ON CONFLICT DO NOTHING"""
        rows.later(same, manifest=manifest.id, parent=known.manifest_id, count=known.length)
    _name_blobs(rows, manifest.id, named, known.length)
    # A later release must give them their whole rest.
    unmarked = "UPDATE blobs SET marked_unix_ms = NULL WHERE id IN (SELECT value FROM json_each(:ids))"
    rows.later(f"{unmarked} AND marked_unix_ms IS NOT NULL", ids=[blob.id for blob in (manifest, *named)])


def total_bytes(manifest: BlobEntry, facts: ManifestFacts) -> int:
    return manifest.size_bytes + sum(need.digest.size_bytes for need in facts.named)


def _name_blobs(rows: Rows, manifest_id: int, named: Sequence[BlobEntry | None], first: int = 0) -> None:
    """Blobs that are not listed keep their places free."""
    new = "INSERT INTO manifest_blobs SELECT :manifest, key + :first, value FROM json_each(:ids) WHERE value > 0"
    ids = [blob.id if blob else 0 for blob in named]
    rows.later(f"{new} ON CONFLICT DO NOTHING", manifest=manifest_id, first=first, ids=ids)


def named_after(rows: Rows, manifest: Digest, position: int, limit: int) -> list[tuple[int, Digest]]:
    """Blobs that a manifest names behind a position, with theirs."""
    named = f"""SELECT manifest_blobs.position, named.hash, named.size_bytes FROM blobs
        JOIN manifest_blobs ON manifest_blobs.manifest_id = blobs.id
        JOIN blobs AS named ON named.id = manifest_blobs.blob_id
        WHERE {_IS_MANIFEST} AND manifest_blobs.position > :position
        ORDER BY manifest_blobs.position LIMIT :limit"""  # noqa: S608
    hash_, size_bytes = manifest.hash, manifest.size_bytes
    return numbered_digests(rows, named, hash=hash_, size_bytes=size_bytes, position=position, limit=limit)


def is_held(rows: Rows, manifest: Digest) -> bool:
    """Whether some version is this manifest."""
    held = f"SELECT 1 FROM manifests JOIN blobs ON blobs.id = manifests.blob_id WHERE {_IS_MANIFEST}"  # noqa: S608
    return rows.one(held, hash=manifest.hash, size_bytes=manifest.size_bytes) is not None


def used_last(rows: Rows, count: int) -> list[tuple[int, Digest, int]]:
    """The newest version of each line, last used first: when it was, its manifest, and the bytes of all its blobs."""
    found = rows.all(
        """SELECT lines.used_unix_ms, blobs.hash, blobs.size_bytes, manifests.total_bytes FROM agents
            JOIN lines ON lines.agent_id = agents.id
            JOIN versions ON versions.line_id = lines.id AND versions.version =
                (SELECT MAX(version) FROM versions AS other WHERE other.line_id = lines.id)
            JOIN manifests ON manifests.blob_id = versions.manifest_id JOIN blobs ON blobs.id = manifests.blob_id
            WHERE agents.namespace_id = :namespace ORDER BY lines.used_unix_ms DESC, lines.id DESC LIMIT :count""",
        count=count,
    )
    return [(used_unix_ms, Digest(hash_, size), total) for used_unix_ms, hash_, size, total in found]


def held_manifests(rows: Rows) -> list[Digest]:
    """Manifests that some version is, those in quarantine left out."""
    return rows.digests(
        """SELECT blobs.hash, blobs.size_bytes FROM manifests JOIN blobs ON blobs.id = manifests.blob_id
            WHERE blobs.namespace_id = :namespace AND NOT blobs.is_damaged"""
    )


def names_others(rows: Rows, manifest: Digest, named: Sequence[Digest]) -> bool:
    """Whether a manifest that is held holds on to other blobs than these. A version dropped meanwhile has no rows."""
    return is_held(rows, manifest) and [digest for _, digest in named_after(rows, manifest, -1, -1)] != list(named)


def hold_again(rows: Rows, manifest: Digest, named: Sequence[Digest]) -> None:
    """Rewrite a manifest's references to those of its blobs that are listed."""
    if is_held(rows, manifest):
        found = find_blobs(rows, [manifest, *named])
        rows.run("DELETE FROM manifest_blobs WHERE manifest_id = :manifest", manifest=found[manifest].id)
        _name_blobs(rows, found[manifest].id, [found.get(digest) for digest in named])


def has_had(rows: Rows, query: LineQuery, manifest_hash: str) -> bool:
    """Whether a version of the agent is or was this manifest, as far as dropped versions are remembered."""
    had = """SELECT 1 FROM agents WHERE namespace_id = :namespace AND name = :agent_id AND (
        EXISTS (SELECT 1 FROM dropped WHERE dropped.agent_id = agents.id AND dropped.manifest_hash = :hash)
        OR EXISTS (SELECT 1 FROM lines JOIN versions ON versions.line_id = lines.id
            JOIN blobs ON blobs.id = versions.manifest_id
            WHERE lines.agent_id = agents.id AND blobs.hash = :hash))"""
    return rows.one(had, agent_id=query.agent_id, hash=manifest_hash) is not None


# Of the blobs that a manifest names, unless it is still a version.
_RELEASE = """DELETE FROM manifests WHERE blob_id = :manifest
    AND NOT EXISTS (SELECT 1 FROM versions WHERE manifest_id = :manifest)"""


def drop_version(rows: Rows, line_id: int, version: int) -> list[int]:
    """Remove a version; ids of blobs that nothing holds now. That it was there is remembered longer."""
    manifest_id = manifest_id_of(rows, line_id, version)
    _forget_version(rows, line_id, version)
    return let_go(rows, manifest_id)


def _forget_version(rows: Rows, line_id: int, version: int) -> None:
    which = {"line": line_id, "version": version}
    rows.later(
        """INSERT INTO dropped SELECT lines.agent_id, blobs.hash, versions.version, versions.origin
            FROM versions JOIN lines ON lines.id = versions.line_id JOIN blobs ON blobs.id = versions.manifest_id
            WHERE versions.line_id = :line AND versions.version = :version
            ON CONFLICT (agent_id, manifest_hash) DO UPDATE SET version = excluded.version, origin = excluded.origin""",
        **which,
    )
    if version > _DROPPED_REMEMBERED:
        rows.later(
            f"""DELETE FROM dropped WHERE agent_id = (SELECT agent_id FROM lines WHERE id = :line)
            AND version <= :version - {_DROPPED_REMEMBERED} AND origin NOT IN ({Origin.PULL:d}, {Origin.MOVE:d})""",  # noqa: S608
            **which,
        )
    rows.later("DELETE FROM versions WHERE line_id = :line AND version = :version", **which)


def let_go(rows: Rows, manifest_id: int) -> list[int]:
    """Release the blobs of a manifest, unless it is still a version; ids of those that nothing holds now."""
    if rows.one("SELECT 1 FROM versions WHERE manifest_id = :manifest", manifest=manifest_id):
        return []
    named = rows.all("SELECT blob_id FROM manifest_blobs WHERE manifest_id = :manifest", manifest=manifest_id)
    rows.later(_RELEASE, manifest=manifest_id)
    unheld = rows.all(
        f"SELECT id FROM blobs WHERE id IN (SELECT value FROM json_each(:ids)) AND NOT {IS_REFERENCED}",  # noqa: S608
        ids=[manifest_id, *(blob_id for (blob_id,) in named)],
    )
    return [int(blob_id) for (blob_id,) in unheld]


def retain(rows: Rows, line_id: int, kept: int) -> None:
    """Drop a line's oldest versions beyond those kept. Blobs that nothing holds then wait for collection."""
    which = "versions WHERE line_id = :line ORDER BY version DESC LIMIT :limit OFFSET :kept"
    old = f"SELECT version, manifest_id FROM {which}"  # noqa: S608
    drop(rows, line_id, rows.all(old, line=line_id, limit=-1, kept=kept))


def old_versions(rows: Rows, line: LineKey, default_kept: int) -> list[tuple[Any, ...]]:
    """Versions of a line, and their manifests, that are beyond those kept once there is one more."""
    agent = "agents WHERE namespace_id = :namespace AND name = :agent_id"
    old = f"""SELECT version, manifest_id FROM versions WHERE line_id = (SELECT id FROM lines
            WHERE agent_id = (SELECT id FROM {agent} AND NOT is_pinned) AND kv_identity_hash = :kv_identity_hash)
        ORDER BY version DESC LIMIT :limit OFFSET
            COALESCE((SELECT NULLIF(retained_versions, 0) FROM {agent}), :kept) - 1"""  # noqa: S608
    about = {"agent_id": line.agent_id, "kv_identity_hash": line.kv_identity_hash}
    return rows.all(old, **about, limit=-1, kept=default_kept)


def drop(rows: Rows, line_id: int, old: Iterable[tuple[Any, ...]]) -> None:
    """Drop these versions of a line, given with their manifests."""
    for version, manifest_id in old:
        _forget_version(rows, line_id, version)
        rows.later(_RELEASE, manifest=manifest_id)


def _snapshot(found: tuple[Any, ...]) -> SnapshotVersion:
    agent, kv_hash, version, hash_, size, parent, tokens, created, total, origin, detail, request, brought = found
    numbers = version, size, parent, tokens, created, total
    assert all(isinstance(each, int) for each in numbers), "a damaged index may have text here"
    about = Digest(hash_, size), parent, tokens, created, total, Origin(origin), detail, request
    return SnapshotVersion(agent, kv_hash, version, *about, bool(brought), brought == TEXT_OWN)
