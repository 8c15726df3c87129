"""Garbage: blobs that nothing holds are marked, rest, and are swept by a later pass, rows first. One goes only when its
mark and its promises are older than the grace period; a slower writer finds its blob missing at its commit.
"""

from collections.abc import Sequence

from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import AgentDeleted, AgentUpdated, EventBody
from cachestore_svc.index import eviction
from cachestore_svc.index.sqlite import removals, versions
from cachestore_svc.index.sqlite.rows import Rows, numbered_digests
from cachestore_svc.index.values import Deadlines, Evicted, NotEnough


def mark_unheld(rows: Rows, now_unix_ms: int) -> int:
    """Mark the blobs that nothing holds; how many were not marked. Times to come, of a wrong clock, count from now."""
    return rows.run(
        f"""UPDATE blobs SET marked_unix_ms = :now, promised_unix_ms = CASE WHEN promised_unix_ms > :now THEN :now
            ELSE promised_unix_ms END WHERE namespace_id = :namespace
            AND (marked_unix_ms IS NULL OR marked_unix_ms > :now OR promised_unix_ms > :now)
            AND NOT {versions.IS_REFERENCED}""",  # noqa: S608
        now=now_unix_ms,
    )


def count_unheld(rows: Rows) -> tuple[int, int]:
    """How many unheld blobs are not marked yet, and the bytes of all that nothing holds."""
    [(unmarked, size_bytes)] = rows.all(
        f"""SELECT COUNT(CASE WHEN marked_unix_ms IS NULL THEN 1 END), COALESCE(SUM(size_bytes), 0) FROM blobs
            WHERE namespace_id = :namespace AND NOT {versions.IS_REFERENCED}"""  # noqa: S608
    )
    return unmarked, size_bytes


def rested(rows: Rows, deadlines: Deadlines, limit: int) -> list[tuple[int, Digest]]:
    """Marked blobs that may go, at most `limit` (-1: all): still unheld, and neither marked nor promised lately."""
    have_rested = f"""SELECT id, hash, size_bytes FROM blobs
        WHERE namespace_id = :namespace AND marked_unix_ms <= :marked_until AND promised_unix_ms <= :promised_until
        AND NOT {versions.IS_REFERENCED} ORDER BY id LIMIT :limit"""  # noqa: S608
    marked_until, promised_until = deadlines.marked_until_unix_ms, deadlines.promised_until_unix_ms
    return numbered_digests(rows, have_rested, marked_until=marked_until, promised_until=promised_until, limit=limit)


def remove_unused_schemas(rows: Rows) -> None:
    """Forget tensor schemas that no blob has."""
    rows.run("DELETE FROM schemas WHERE NOT EXISTS (SELECT 1 FROM blobs WHERE blobs.schema_hash = schemas.hash)")


def mark(rows: Rows, blob_ids: Sequence[int], now_unix_ms: int) -> None:
    marked = "UPDATE blobs SET marked_unix_ms = :now WHERE id IN (SELECT value FROM json_each(:ids))"
    rows.run(marked, now=now_unix_ms, ids=blob_ids)


def unlist(rows: Rows, blob_ids: Sequence[int], now_unix_ms: int, *, notes_removals: bool) -> None:
    """Unlist blobs that nothing holds. The database refuses it for one that something does. `notes_removals`: their
    objects are being removed, and others must know."""
    if notes_removals:
        removals.note_removals(rows, blob_ids, now_unix_ms)
    rows.run("DELETE FROM blobs WHERE id IN (SELECT value FROM json_each(:ids))", ids=blob_ids)


def evict(
    rows: Rows,
    wanted_bytes: int,
    evict_heads: bool,
    now_unix_ms: int,
    deadlines: Deadlines,
    *,
    notes_removals: bool = False,
) -> Evicted:
    """Give up versions until their blobs free enough at once. Only bytes that no caller was promised count and go;
    others are marked and rest. Raises NotEnough, which undoes all of it.
    """
    if not evict_heads and _held_by_old_versions(rows, deadlines) < wanted_bytes:
        raise NotEnough
    freed: list[Digest] = []
    victims: list[eviction.Candidate] = []
    events: dict[str, EventBody] = {}
    for victim in eviction.order(_candidates(rows), evict_heads, deadlines.marked_until_unix_ms):
        if sum(digest.size_bytes for digest in freed) >= wanted_bytes:
            break
        victims.append(victim)
        unheld = versions.drop_version(rows, victim.line_id, victim.version)
        event = _drop_empty(rows, victim.line_id)
        events[event.agent_id] = event
        free = _unpromised(rows, unheld, deadlines)
        unlist(rows, [*free], now_unix_ms, notes_removals=notes_removals)
        mark(rows, [blob_id for blob_id in unheld if blob_id not in free], now_unix_ms)
        freed += free.values()
    if sum(digest.size_bytes for digest in freed) < wanted_bytes:
        raise NotEnough
    return Evicted(freed, list(events.values()), len(victims))


def _held_by_old_versions(rows: Rows, deadlines: Deadlines) -> int:
    """The most bytes that giving up old versions can free, checked before the attempt, which is expensive."""
    return rows.number(
        """WITH heads (manifest_id) AS (
                SELECT versions.manifest_id FROM versions JOIN lines ON lines.id = versions.line_id
                JOIN agents ON agents.id = lines.agent_id WHERE agents.namespace_id = :namespace AND versions.version =
                (SELECT MAX(version) FROM versions AS other WHERE other.line_id = versions.line_id))
            SELECT SUM(size_bytes) FROM blobs WHERE namespace_id = :namespace AND promised_unix_ms <= :promised_until
            AND id NOT IN (SELECT manifest_id FROM heads)
            AND id NOT IN (SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM heads))""",
        promised_until=deadlines.promised_until_unix_ms,
    )


def _candidates(rows: Rows) -> list[eviction.Candidate]:
    """An agent's newest version counts as used whenever one of its lines was: without it the agent would go back."""
    found = rows.all(
        """SELECT lines.id, versions.version, versions.version = heads.version, agents.is_pinned,
            CASE WHEN versions.version = newest.version THEN newest.used_unix_ms ELSE lines.used_unix_ms END
            FROM versions JOIN lines ON lines.id = versions.line_id JOIN agents ON agents.id = lines.agent_id
            JOIN (SELECT line_id, MAX(version) AS version FROM versions GROUP BY line_id) AS heads
            ON heads.line_id = lines.id
            JOIN (SELECT agent_id, MAX(version) AS version, MAX(used_unix_ms) AS used_unix_ms
                FROM lines JOIN versions ON versions.line_id = lines.id GROUP BY agent_id) AS newest
            ON newest.agent_id = agents.id WHERE agents.namespace_id = :namespace"""
    )
    return [eviction.Candidate(*each) for each in found]


def _drop_empty(rows: Rows, line_id: int) -> AgentUpdated | AgentDeleted:
    """Remove a line without versions, and its agent if that has no other line. The event of the agent."""
    of_line = "SELECT agents.id, name AS agent_id FROM agents JOIN lines ON lines.agent_id = agents.id"
    [(agent, name)] = rows.all(f"{of_line} WHERE lines.id = :line", line=line_id)
    if versions.head_of(rows, line_id):
        return AgentUpdated(name)
    rows.run("DELETE FROM lines WHERE id = :line", line=line_id)
    if rows.one("SELECT 1 FROM lines WHERE agent_id = :agent", agent=agent):
        return AgentUpdated(name)
    rows.run("DELETE FROM agents WHERE id = :agent", agent=agent)
    return AgentDeleted(name)


def _unpromised(rows: Rows, blob_ids: Sequence[int], deadlines: Deadlines) -> dict[int, Digest]:
    free = numbered_digests(
        rows,
        """SELECT id, hash, size_bytes FROM blobs WHERE id IN (SELECT value FROM json_each(:ids))
            AND promised_unix_ms <= :promised_until""",
        ids=blob_ids,
        promised_until=deadlines.promised_until_unix_ms,
    )
    return dict(free)
