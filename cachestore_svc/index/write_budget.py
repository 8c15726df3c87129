"""The bytes of blobs written in a day (UTC), which wear an SSD, counted in the transaction that lists each. Beyond the
budget writes are refused only if so configured: then an engine keeps memories in RAM, and reports this.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from kvasir.errors import ResourceExhausted

from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogChange

DAY_MS = 86_400_000
_SHARE = 8  # A namespace that wrote more than this part leaves as much to those that wrote less


class WriteBudget:
    def __init__(
        self, catalog: Catalog, now_unix_ms: Callable[[], int], budget_bytes: int | None, *, refuses: bool
    ) -> None:
        """`budget_bytes`: of all namespaces together in a day; None: it is counted only."""
        self.budget_bytes = budget_bytes
        self._refuses = refuses
        self._catalog = catalog
        self._now_unix_ms = now_unix_ms
        self._lock = threading.Lock()
        self._day = -1
        self._written: Counter[str] = Counter()

    def look(self) -> None:
        """Let the next answer count the writes of other stores, too."""
        if self._catalog.is_shared:
            with self._lock:
                self._day = -1

    def today(self) -> Mapping[str, int]:
        self.look()
        return self._known_today()

    def _known_today(self) -> Mapping[str, int]:
        day = self._now_unix_ms() // DAY_MS
        with self._lock:
            if day == self._day:
                return dict(self._written)

        def read(change: CatalogChange) -> None:
            # Noted in its turn after the commit: it holds what this commit counted before it, and nothing later.
            written = Counter(change.written(day))
            change.after_commit(lambda: self._know(day, written))

        self._catalog.write(HOUSE, read, frees_space=True)
        with self._lock:
            return dict(self._written)

    def _know(self, day: int, written: Counter[str]) -> None:
        with self._lock:
            self._day, self._written = day, written

    @property
    def is_spent(self) -> bool:
        return self.budget_bytes is not None and sum(self.today().values()) >= self.budget_bytes

    def check(self, namespace: str, size_bytes: int) -> None:
        """Raises ResourceExhausted (WRITE_BUDGET_SPENT, with the caller's numbers) for a write that must wait."""
        if self.budget_bytes is None or not self._refuses:
            return
        written = self._known_today()
        own, after = written.get(namespace, 0), sum(written.values()) + size_bytes
        kept = self.budget_bytes // _SHARE if own > self.budget_bytes // _SHARE else 0
        if after > self.budget_bytes - kept:
            raise ResourceExhausted(
                f"the disk's write budget of this day (UTC) does not allow {size_bytes} bytes more; {own} were written",
                reason="WRITE_BUDGET_SPENT",
                retry_after_s=(DAY_MS - self._now_unix_ms() % DAY_MS) / 1000,
                metadata={"written_bytes": str(own), "asked_bytes": str(size_bytes)},
            )

    def count(self, change: CatalogChange, namespace: str, size_bytes: int) -> None:
        """A blob of this size was written; within the operation that lists it."""
        day = self._now_unix_ms() // DAY_MS
        change.count_written(day, size_bytes)

        def counted() -> None:
            with self._lock:
                if day == self._day:
                    self._written[namespace] += size_bytes

        change.after_commit(counted)
