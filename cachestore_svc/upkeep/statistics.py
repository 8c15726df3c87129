"""Sizes and counters of a namespace, computed when asked."""

from collections.abc import Callable
from functools import partial

from cachestore_svc.core import Core
from cachestore_svc.index.catalog import CatalogView, Sums
from cachestore_svc.records import Stats

_SumsOf = Callable[[str, str, CatalogView], Sums]


def stats_of(core: Core, namespace: str) -> Stats:
    """See cachestore_svc.store.Store.stats."""
    agents, snapshots, logical = _sums(core, namespace, _sums_of_agents, 3)
    blobs, blob_bytes, damaged, unreferenced = _sums(core, namespace, _sums_of_blobs, 4)
    return Stats(
        agent_count=agents,
        snapshot_count=snapshots,
        blob_count=blobs,
        blob_bytes=blob_bytes,
        logical_bytes=logical,
        quota_bytes=core.config.quota_bytes(namespace),
        reserved_bytes=core.space.reserved_bytes(namespace),
        free_disk_bytes=core.disk.free_bytes(core.config.data_dir),
        unreferenced_bytes=unreferenced,
        damaged_blob_count=damaged,
        counters=core.counters.of(namespace),
    )


def _sums(core: Core, namespace: str, sums_of: _SumsOf, count: int) -> list[int]:
    """Sums over all rows, a slice at a time, so that other operations come in between."""
    sums, after = [0] * count, ""
    while True:
        last, numbers = core.catalog.read(namespace, partial(sums_of, namespace, after))
        if last is None:
            return sums
        after = last
        sums = [total + number for total, number in zip(sums, numbers, strict=True)]


def _sums_of_agents(namespace: str, after: str, view: CatalogView) -> Sums:
    return view.sums_of_agents(namespace, after)


def _sums_of_blobs(namespace: str, after: str, view: CatalogView) -> Sums:
    return view.sums_of_blobs(namespace, after)
