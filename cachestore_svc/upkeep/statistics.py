"""Sizes and counters, computed on request, and the ailments of a store."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial

from kvasir.server.operating.wellness import Ailment

from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import Stats, Totals
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.index.values import Sums


class Statistics:
    def __init__(self, core: Core) -> None:
        self._core = core

    def of(self, namespace: str) -> Stats:
        self._core.check_open(namespace)
        return self._of(namespace)

    def _of(self, namespace: str) -> Stats:
        core = self._core
        agents, snapshots, logical = self._sums(namespace, 3, lambda after, view: view.sums_of_agents(after))
        blobs, *of_blobs = self._sums(namespace, 4, lambda after, view: view.sums_of_blobs(after))
        blob_bytes, damaged, unreferenced = of_blobs
        return Stats(
            agent_count=agents,
            snapshot_count=snapshots,
            blob_count=blobs,
            blob_bytes=blob_bytes,
            logical_bytes=logical,
            quota_bytes=core.config.quota_of(namespace),
            reserved_bytes=core.space.reserved_bytes(namespace),
            free_disk_bytes=core.space.free_disk_bytes,
            is_disk_full=core.space.is_disk_full,
            unreferenced_bytes=unreferenced,
            damaged_blob_count=damaged,
            written_today_bytes=core.write_budget.today().get(namespace, 0),
            write_budget_bytes=core.write_budget.budget_bytes,
            counters=core.counters.of(namespace),
        )

    def totals(self) -> Totals:
        """Sizes of all namespaces, for the store's owner. Reads the whole index, in slices."""
        core = self._core
        each = [self._of(namespace) for namespace in core.sound_namespaces()]
        sums = {field.name: sum(getattr(stats, field.name) for stats in each) for field in fields(Totals)}
        sums["free_disk_bytes"] = core.space.free_disk_bytes
        return Totals(**sums | {"written_today_bytes": sum(core.write_budget.today().values())})

    def written(self) -> Mapping[str, int | bool]:
        """Bytes of blobs that all namespaces wrote today (UTC), and the budget, for the store's owner."""
        budget = self._core.write_budget
        today = sum(budget.today().values())
        return {"today_bytes": today, "budget_bytes": budget.budget_bytes or 0, "is_spent": budget.is_spent}

    def counted(self) -> Mapping[str, int]:
        return self._core.counters.of_all()

    def count_repair(self, namespace: str) -> None:
        self._core.counters.add(namespace, "blobs_repaired")

    def ailments(self) -> list[Ailment]:
        """Faults of the store, for its owner. Raises where the index does not answer."""
        core, found = self._core, list[Ailment]()
        core.sound_namespaces()  # raises where the index does not answer
        if core.space.is_disk_full:
            found.append(Ailment("DISK_FULL", "the disk has no room beside what must stay free: writes are refused"))
        if failure := core.space.disk_failure:
            found.append(Ailment("DISK_FAILED", f"the disk takes no file: {failure}"))
        found += [Ailment(refusal.reason, refusal.message) for refusal in core.seals.refusals()]
        if core.catalog.damage:
            what = f"the index is damaged: {len(core.catalog.damage)} namespaces are kept out"
            found.append(Ailment("INDEX_DAMAGED", f"{what}; stop the store and run: kvasir store recover"))
        return found

    def _sums(self, namespace: str, count: int, sums_of: Callable[[str, CatalogView], Sums]) -> list[int]:
        """Sums over all rows, a slice at a time, so that other operations come in between."""
        sums, after = [0] * count, ""
        while True:
            last, numbers = self._core.catalog.read(namespace, partial(sums_of, after))
            if last is None:
                return sums
            after = last
            sums = [total + number for total, number in zip(sums, numbers, strict=True)]
