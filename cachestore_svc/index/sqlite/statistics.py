"""Sizes and counters of a namespace, computed when asked."""

from functools import partial
from typing import Any

from cachestore_svc.core import Core
from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.sqlite.blob_rows import find_namespace
from cachestore_svc.index.sqlite.index import SLICE, Rows
from cachestore_svc.records import Stats

_AGENTS = f"""WITH some AS (SELECT id, name FROM agents WHERE namespace_id = ? AND name > ? ORDER BY name LIMIT {SLICE})
    SELECT (SELECT MAX(name) FROM some), (SELECT COUNT(*) FROM some), COUNT(versions.version), COALESCE(SUM(CASE WHEN
        versions.version = (SELECT MAX(version) FROM versions AS other WHERE other.line_id = versions.line_id)
        THEN manifests.total_bytes END), 0)
    FROM some JOIN lines ON lines.agent_id = some.id JOIN versions ON versions.line_id = lines.id
    JOIN manifests ON manifests.blob_id = versions.manifest_id"""  # noqa: S608
_BLOBS = f"""WITH some AS (SELECT * FROM blobs WHERE namespace_id = ? AND hash > ? ORDER BY hash LIMIT {SLICE})
    SELECT MAX(hash), COUNT(*), COALESCE(SUM(size_bytes), 0), COALESCE(SUM(is_damaged), 0),
        COALESCE(SUM(CASE WHEN NOT {versions.IS_REFERENCED} THEN size_bytes END), 0)
    FROM some AS blobs"""  # noqa: S608


def of(core: Core, namespace: str) -> Stats:
    """See cachestore_svc.store.Store.stats."""
    agents, snapshots, logical = _sums(core, namespace, _AGENTS, 3)
    blobs, blob_bytes, damaged, unheld = _sums(core, namespace, _BLOBS, 4)
    return Stats(
        agent_count=agents,
        snapshot_count=snapshots,
        blob_count=blobs,
        blob_bytes=blob_bytes,
        logical_bytes=logical,
        quota_bytes=core.config.quota_bytes(namespace),
        reserved_bytes=core.space.reserved_bytes(namespace),
        free_disk_bytes=core.disk.free_bytes(core.config.data_dir),
        unreferenced_bytes=unheld,
        damaged_blob_count=damaged,
        counters=core.counters.of(namespace),
    )


def _sums(core: Core, namespace: str, sql: str, count: int) -> list[int]:
    """Sums over all rows, a slice at a time, so that other operations come in between; each slice tells its last."""
    sums, after = [0] * count, ""
    while True:
        found = core.index.read(namespace, partial(_slice, namespace=namespace, sql=sql, after=after))
        if found[0] is None:
            return sums
        after = str(found[0])
        sums = [total + number for total, number in zip(sums, found[1:], strict=True)]


def _slice(rows: Rows, *, namespace: str, sql: str, after: str) -> tuple[Any, ...]:
    found = rows.one(sql, find_namespace(rows, namespace), after)
    assert found is not None
    return found
