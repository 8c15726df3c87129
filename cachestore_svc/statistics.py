"""Sizes and counters of a namespace, computed when asked."""

from cachestore_svc import garbage
from cachestore_svc.blob_rows import damaged_blobs, find_namespace
from cachestore_svc.core import Core
from cachestore_svc.index import Rows
from cachestore_svc.records import Stats


def of(core: Core, namespace: str) -> Stats:
    """See cachestore_svc.store.Store.stats."""
    agents, snapshots, blobs, blob_bytes, logical, damaged, unheld = core.index.read(
        lambda rows: _sizes(rows, namespace)
    )
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


def _sizes(rows: Rows, namespace: str) -> tuple[int, ...]:
    space = find_namespace(rows, namespace)
    of_agents = "FROM agents WHERE namespace_id = ?"
    of_versions = """FROM versions JOIN lines ON lines.id = versions.line_id JOIN agents ON agents.id = lines.agent_id
        JOIN manifests ON manifests.blob_id = versions.manifest_id WHERE agents.namespace_id = ?"""
    is_head = "versions.version = (SELECT MAX(version) FROM versions AS other WHERE other.line_id = versions.line_id)"
    return (
        _number(rows, f"SELECT COUNT(*) {of_agents}", space),
        _number(rows, f"SELECT COUNT(*) {of_versions}", space),
        _number(rows, "SELECT COUNT(*) FROM blobs WHERE namespace_id = ?", space),
        _number(rows, "SELECT COALESCE(SUM(size_bytes), 0) FROM blobs WHERE namespace_id = ?", space),
        _number(rows, f"SELECT COALESCE(SUM(manifests.total_bytes), 0) {of_versions} AND {is_head}", space),
        len(damaged_blobs(rows, space)),
        garbage.count_unheld(rows, namespace)[1],
    )


def _number(rows: Rows, sql: str, *parameters: object) -> int:
    found = rows.one(sql, *parameters)
    assert found is not None
    return int(found[0])
