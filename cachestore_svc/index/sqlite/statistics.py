"""Sums over a namespace's rows, a slice at a time, so that other work comes in between; a check counts all rows."""

from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.index.values import SLICE, Sums

_AGENTS = f"""WITH slice AS (SELECT id, name FROM agents WHERE namespace_id = :namespace AND name > :after
        ORDER BY name LIMIT {SLICE})
    SELECT (SELECT MAX(name) FROM slice), (SELECT COUNT(*) FROM slice), COUNT(versions.version), COALESCE(SUM(CASE WHEN
        versions.version = (SELECT MAX(version) FROM versions AS other WHERE other.line_id = versions.line_id)
        THEN manifests.total_bytes END), 0)
    FROM slice JOIN lines ON lines.agent_id = slice.id JOIN versions ON versions.line_id = lines.id
    JOIN manifests ON manifests.blob_id = versions.manifest_id"""  # noqa: S608
_BLOBS = f"""WITH slice AS (SELECT * FROM blobs WHERE namespace_id = :namespace AND hash > :after
        ORDER BY hash LIMIT {SLICE})
    SELECT MAX(hash), COUNT(*), COALESCE(SUM(size_bytes), 0), COUNT(CASE WHEN is_damaged THEN 1 END),
        COALESCE(SUM(CASE WHEN NOT {versions.IS_REFERENCED} THEN size_bytes END), 0)
    FROM slice AS blobs"""  # noqa: S608

_KEPT_DAYS = 31


def sums_of_agents(rows: Rows, after: str) -> Sums:
    """Agents, versions, bytes of the newest, over the next SLICE agents after `after`, and the last one's name."""
    return _slice(rows, _AGENTS, after)


def sums_of_blobs(rows: Rows, after: str) -> Sums:
    """Blobs, bytes, damaged ones, unheld bytes, over the next SLICE hashes after `after`, and the last hash."""
    return _slice(rows, _BLOBS, after)


def counts(rows: Rows) -> tuple[int, int]:
    """Blobs and versions of a namespace, all in one operation."""
    [(blobs, versions)] = rows.all(
        """SELECT (SELECT COUNT(*) FROM blobs WHERE namespace_id = :namespace), (SELECT COUNT(*) FROM versions
            JOIN lines ON lines.id = versions.line_id JOIN agents ON agents.id = lines.agent_id
            WHERE agents.namespace_id = :namespace)"""
    )
    return blobs, versions


def count_written(rows: Rows, day: int, size_bytes: int) -> None:
    """Add to the bytes written on a day; days older than a month are forgotten."""
    added = "UPDATE written SET bytes = bytes + :size_bytes WHERE day = :day AND namespace_id = :namespace"
    if not rows.run(added, size_bytes=size_bytes, day=day):
        rows.run("INSERT INTO written VALUES (:day, :namespace, :size_bytes)", day=day, size_bytes=size_bytes)
        rows.run("DELETE FROM written WHERE day < :kept", kept=day - _KEPT_DAYS)


def written(rows: Rows, day: int) -> dict[str, int]:
    """Bytes of blobs written on a day (UTC, counted from 1970), by namespace."""
    return dict(
        rows.all(
            """SELECT namespaces.name, bytes FROM written JOIN namespaces ON namespaces.id = namespace_id
                WHERE day = :day""",
            day=day,
        )
    )


def _slice(rows: Rows, sql: str, after: str) -> Sums:
    # Where it ended is named as the tables name it.
    [(last, *sums)] = rows.all(sql, after=after)
    return (None if last is None else str(last)), [int(each) for each in sums]
