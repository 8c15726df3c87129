"""Prometheus metrics of the store, summed over namespaces: how many series there are does not depend on callers."""

import time
from collections.abc import Callable, Iterator

from kvasir.server.operating.audit import Audit
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.operator_page import audit_metric, counter, gauge, rpc_metrics
from prometheus_client import Metric

from cachestore_svc.facts.limits import BELIEVED_S
from cachestore_svc.facts.records import Totals
from cachestore_svc.store.store import Store

_MOVED_BYTES = {"bytes_read": "read", "bytes_written": "written"}


class StoreNumbers:
    """Reads a store for a scrape. On the threads of the operators' page."""

    def __init__(
        self, store: Store, rpcs: RpcCounts, audit: Audit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._rpcs = rpcs
        self._audit = audit
        self._clock = clock
        self._read_s = 0.0
        self._totals: Totals | None = None

    def metrics(self) -> Iterator[Metric]:
        totals = self._sizes()
        sizes = (
            ("agents", "Agents that are remembered.", totals.agent_count),
            ("snapshots", "Versions that can be gone back to.", totals.snapshot_count),
            ("blobs", "Blobs that are listed.", totals.blob_count),
            ("blob_bytes", "Their bytes.", totals.blob_bytes),
            ("logical_bytes", "Bytes of the newest versions if they shared nothing.", totals.logical_bytes),
            ("reserved_bytes", "Bytes set aside for writes under way.", totals.reserved_bytes),
            ("unreferenced_bytes", "Bytes that nothing names, which rest or wait.", totals.unreferenced_bytes),
            ("damaged_blobs", "Blobs that are not served because their bytes are damaged.", totals.damaged_blob_count),
            ("free_disk_bytes", "Bytes that the disk has free.", totals.free_disk_bytes),
            (
                "written_today_bytes",
                "Bytes of blobs (no index, no journal) since midnight UTC.",
                totals.written_today_bytes,
            ),
        )
        for name, help_text, value in sizes:
            yield gauge(f"kvasir_store_{name}", help_text, value)
        budget_bytes = self._store.statistics.written()["budget_bytes"]
        budget = "The write budget of a day; 0: writes are only counted."
        yield gauge("kvasir_store_write_budget_bytes", budget, budget_bytes)
        ended_s = self._store.care.scrubbing.state.ended_unix_ms / 1000
        about = "When the last pass of the background scrub ended, in Unix seconds; 0 while one is under way."
        yield gauge("kvasir_store_scrub_ended_seconds", about, ended_s)
        counted = dict(self._store.statistics.counted())
        moved = {word: counted.pop(name, 0) for name, word in _MOVED_BYTES.items()}
        yield counter("kvasir_store_moved_bytes", "Bytes of blobs that were read and written.", moved, "direction")
        yield counter("kvasir_store_work", "Operations on blobs and versions.", counted, "what")
        yield from rpc_metrics("kvasir_store", self._rpcs)
        yield audit_metric("kvasir_store", self._audit)

    def _sizes(self) -> Totals:
        now_s = self._clock()
        if self._totals is None or now_s - self._read_s > BELIEVED_S:
            self._totals, self._read_s = self._store.statistics.totals(), now_s
        return self._totals
