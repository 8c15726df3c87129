"""Garbage: blobs that nothing holds are marked, rest, and are swept by a later pass. Rows go first, bytes follow.

A mark says "first seen unheld"; a promise says "a caller relies on it". A blob goes only when both are older than the
grace period. A writer that pauses for longer finds its blob missing at its commit; nothing else goes wrong.
"""

from collections.abc import Sequence

from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import AgentDeleted, AgentUpdated, EventBody
from cachestore_svc.index import eviction
from cachestore_svc.index.ports.garbage import Deadlines, Evicted, NotEnough
from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.sqlite.blobs import find_namespace
from cachestore_svc.index.sqlite.rows import AGENT, Rows


def mark_unheld(rows: Rows, namespace: str, now_unix_ms: int) -> int:
    """Mark the blobs that nothing holds; how many were not marked before. A mark or a promise of a time that is still
    to come was made under a wrong clock: it counts from now."""
    return rows.run(
        f"""UPDATE blobs SET marked_unix_ms = ?1, promised_unix_ms = MIN(promised_unix_ms, ?1)
            WHERE namespace_id = ?2 AND (marked_unix_ms IS NULL OR MAX(marked_unix_ms, promised_unix_ms) > ?1)
            AND NOT {versions.IS_REFERENCED}""",  # noqa: S608
        now_unix_ms,
        find_namespace(rows, namespace),
    )


def count_unheld(rows: Rows, namespace: str) -> tuple[int, int]:
    found = rows.one(
        f"""SELECT COALESCE(SUM(marked_unix_ms IS NULL), 0), COALESCE(SUM(size_bytes), 0) FROM blobs
            WHERE namespace_id = ? AND NOT {versions.IS_REFERENCED}""",  # noqa: S608
        find_namespace(rows, namespace),
    )
    assert found is not None
    return int(found[0]), int(found[1])


def rested(rows: Rows, namespace: str, deadlines: Deadlines, limit: int) -> list[tuple[int, Digest]]:
    found = rows.all(
        f"""SELECT id, hash, size_bytes FROM blobs
            WHERE namespace_id = ? AND marked_unix_ms <= ? AND promised_unix_ms <= ? AND NOT {versions.IS_REFERENCED}
            ORDER BY id LIMIT ?""",  # noqa: S608
        find_namespace(rows, namespace),
        deadlines.marked_until_unix_ms,
        deadlines.promised_until_unix_ms,
        limit,
    )
    return rows.numbered_digests(found)


def remove_blobs(rows: Rows, blob_ids: Sequence[int]) -> None:
    """Unlist blobs that nothing holds. The database refuses it for one that something does."""
    rows.many("DELETE FROM blobs WHERE id = ?", [(blob_id,) for blob_id in blob_ids])


def remove_unused_schemas(rows: Rows) -> None:
    rows.run("DELETE FROM schemas WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE blobs.schema_hash = schemas.hash)")


def mark(rows: Rows, blob_ids: Sequence[int], now_unix_ms: int) -> None:
    """Mark these at once: their rest begins now."""
    rows.many("UPDATE blobs SET marked_unix_ms = ? WHERE id = ?", [(now_unix_ms, blob_id) for blob_id in blob_ids])


def bytes_of(rows: Rows, blob_ids: Sequence[int]) -> int:
    sizes = (rows.one("SELECT size_bytes FROM blobs WHERE id = ?", blob_id) for blob_id in blob_ids)
    return sum(size[0] for size in sizes if size)


def evict(
    rows: Rows, namespace: str, wanted_bytes: int, evict_heads: bool, now_unix_ms: int, deadlines: Deadlines
) -> Evicted:
    """Give up versions until their blobs free enough at once. Raises NotEnough, which undoes all of it.

    Only bytes that no caller was promised count and go; others are marked and rest.
    """
    namespace_id = find_namespace(rows, namespace)
    if not evict_heads and _held_by_old_versions(rows, namespace_id, deadlines) < wanted_bytes:
        raise NotEnough
    candidates = _candidates(rows, namespace_id)
    freed: list[Digest] = []
    victims: list[eviction.Candidate] = []
    events: dict[str, EventBody] = {}
    for victim in eviction.order(candidates, evict_heads, deadlines.marked_until_unix_ms):
        if sum(digest.size_bytes for digest in freed) >= wanted_bytes:
            break
        victims.append(victim)
        name = _agent_of(rows, victim.line_id)
        unheld = versions.drop_version(rows, victim.line_id, victim.version)
        events[name] = _drop_empty(rows, victim.line_id, name)
        freed += _remove_unpromised(rows, unheld, now_unix_ms, deadlines)
    if sum(digest.size_bytes for digest in freed) < wanted_bytes:
        raise NotEnough
    return Evicted(freed, list(events.values()), len(victims))


def _held_by_old_versions(rows: Rows, namespace_id: int, deadlines: Deadlines) -> int:
    """Bytes of unpromised blobs that no head holds: the most that giving up old versions can free.

    Checked first: refused callers retry, and a full eviction attempt is expensive.
    """
    found = rows.one(
        """WITH heads (manifest_id) AS (
                SELECT versions.manifest_id FROM versions JOIN lines ON lines.id = versions.line_id
                JOIN agents ON agents.id = lines.agent_id WHERE agents.namespace_id = ?1 AND versions.version =
                (SELECT MAX(version) FROM versions AS other WHERE other.line_id = versions.line_id))
            SELECT COALESCE(SUM(size_bytes), 0) FROM blobs WHERE namespace_id = ?1 AND promised_unix_ms <= ?2
            AND id NOT IN (SELECT manifest_id FROM heads)
            AND id NOT IN (SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM heads))""",
        namespace_id,
        deadlines.promised_until_unix_ms,
    )
    assert found is not None
    return int(found[0])


def _candidates(rows: Rows, namespace_id: int) -> list[eviction.Candidate]:
    found = rows.all(
        """SELECT lines.id, versions.version, versions.version = heads.version, agents.is_pinned, lines.used_unix_ms
            FROM versions JOIN lines ON lines.id = versions.line_id JOIN agents ON agents.id = lines.agent_id
            JOIN (SELECT line_id, MAX(version) AS version FROM versions GROUP BY line_id) AS heads
            ON heads.line_id = lines.id WHERE agents.namespace_id = ?""",
        namespace_id,
    )
    return [
        eviction.Candidate(line, version, bool(head), bool(pinned), used) for line, version, head, pinned, used in found
    ]


def _agent_of(rows: Rows, line_id: int) -> str:
    found = rows.one("SELECT name FROM agents JOIN lines ON lines.agent_id = agents.id WHERE lines.id = ?", line_id)
    assert found is not None
    return rows.opened(AGENT, found[0])


def _drop_empty(rows: Rows, line_id: int, agent: str) -> EventBody:
    """Remove a line without versions, and its agent if that has no other line. The event of the agent."""
    if versions.head_of(rows, line_id):
        return AgentUpdated(agent)
    found = rows.one("SELECT agent_id FROM lines WHERE id = ?", line_id)
    assert found is not None
    rows.run("DELETE FROM lines WHERE id = ?", line_id)
    if rows.one("SELECT 1 FROM lines WHERE agent_id = ?", found[0]):
        return AgentUpdated(agent)
    rows.run("DELETE FROM agents WHERE id = ?", found[0])
    return AgentDeleted(agent)


def _remove_unpromised(rows: Rows, blob_ids: Sequence[int], now_unix_ms: int, deadlines: Deadlines) -> list[Digest]:
    free: dict[int, tuple[str, int]] = {}
    for blob_id in blob_ids:
        found = rows.one("SELECT hash, size_bytes, promised_unix_ms FROM blobs WHERE id = ?", blob_id)
        assert found is not None
        if found[2] <= deadlines.promised_until_unix_ms:
            free[blob_id] = found[:2]
    remove_blobs(rows, list(free))
    mark(rows, [blob_id for blob_id in blob_ids if blob_id not in free], now_unix_ms)
    return rows.digests(list(free.values()))
