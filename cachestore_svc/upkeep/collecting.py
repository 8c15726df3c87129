"""Collection and eviction as they run: decide in one transaction, then remove files, never the other way round."""

from collections.abc import Sequence

import structlog
from kvasir.errors import ResourceExhausted, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import end_removals, name_rest_ms, remove_files
from cachestore_svc.facts.records import GcReport
from cachestore_svc.index.catalog import HOUSE, CatalogChange
from cachestore_svc.index.values import Evicted, NotEnough, rested_at
from cachestore_svc.recovery import asides

_BATCH = 500  # blobs that one commit unlists


def collect(core: Core, namespace: str | None, dry_run: bool) -> GcReport:
    asker = HOUSE if namespace is None else namespace
    known = {*core.catalog.read(asker, lambda view: view.namespaces()), *core.writers.namespaces()}
    names = sorted(known - core.catalog.damage.keys()) if namespace is None else [namespace]
    reports = [_dry_run(core, name) if dry_run else _collect_one(core, name) for name in names]
    if not dry_run:
        core.catalog.write(asker, lambda change: change.remove_unused_schemas(), frees_space=True)
        core.ballast.fill(core.config.free_disk_reserve_bytes)
        if namespace is None:
            _drop_copies(core)
            reports.append(asides.collect(core))
            shorten(core)
    return GcReport(
        sum(report.blobs_marked for report in reports),
        sum(report.blobs_swept for report in reports),
        sum(report.bytes_freed for report in reports),
    )


def collect_own(core: Core) -> None:
    """Parts, handed files and copies on this store's disk, and its asides: another store may collect all but these."""
    for namespace in core.known_namespaces() | core.writers.namespaces():
        core.writers.drop_parts(namespace, core.now_unix_ms() - core.grace_ms)
        core.writers.drop_handed(namespace)
    _drop_copies(core)
    asides.collect(core)


def _drop_copies(core: Core) -> None:
    """As the index has names: without its key, too, a sealed namespace keeps no copy."""
    namespaces = {core.blobs.of(namespace).place: namespace for namespace in core.known_namespaces()}

    def listed(place: str, hashes: Sequence[str]) -> set[str]:
        if (namespace := namespaces.get(place)) is None:
            return set()
        return core.catalog.read(HOUSE, lambda view: view.of(namespace).listed_hashes(hashes))

    core.blobs.drop_copies(listed)


def shorten(core: Core) -> None:
    """Rewrite the journal when most of it is about what is gone. After a failure the next pass tries again. One that is
    damaged stays as it is: it would end at its damage, and a recovery would take it for whole."""
    log = core.journal
    if log is None or not log.is_long:
        return
    # On the index thread: what is appended there may not be committed yet, and is then cut off again.
    try:
        size_bytes, position = core.catalog.read(HOUSE, lambda _: (log.size_bytes, log.position))
        recorded = log.shorter(size_bytes)
        if recorded.position != position:
            structlog.get_logger("cachestore").error("journal.damaged", sequence=recorded.position.sequence)
            return
        core.catalog.read(HOUSE, lambda _: log.shorten(recorded.state, recorded.position, size_bytes))
    except (OSError, ResourceExhausted, Unavailable) as error:
        structlog.get_logger("cachestore").warning("journal.not_shortened", error=str(error))


def make_room(core: Core, namespace: str, wanted_bytes: int, resuming: Digest) -> None:
    """Free bytes of a namespace whose quota is full: first unheld blobs and parts, then what eviction may give up. The
    part of the blob that needs the room stays. Frees what is wanted, or as much unheld as there is; the caller checks
    again whether it is enough.
    """
    wanted_bytes -= core.writers.drop_parts(namespace, core.now_unix_ms(), but=resuming)
    if wanted_bytes > 0:
        wanted_bytes -= _sweep(core, namespace).bytes_freed
    if wanted_bytes > 0:
        _evict(core, namespace, wanted_bytes)


def _collect_one(core: Core, namespace: str) -> GcReport:
    swept = _sweep(core, namespace)  # sweep first: what this pass marks rests until another
    core.writers.drop_parts(namespace, core.now_unix_ms() - core.grace_ms)
    if not core.catalog.is_shared:  # else `collect_own` does, and a file waits for two calls
        core.writers.drop_handed(namespace)
    if core.blobs.is_shared:
        end_removals(core, namespace)  # of a process that died
    now = core.now_unix_ms()

    def mark(change: CatalogChange) -> int:
        change.free_names(now - name_rest_ms(core))
        return change.mark_unheld(now)

    marked = core.catalog.write(namespace, mark, frees_space=True)
    return GcReport(marked, swept.blobs_swept, swept.bytes_freed)


def _sweep(core: Core, namespace: str) -> GcReport:
    deadlines = rested_at(core.now_unix_ms(), core.grace_ms)
    blobs, freed = 0, 0

    def work(change: CatalogChange) -> list[Digest]:
        batch = change.rested(deadlines, _BATCH)
        unlisted = [blob_id for blob_id, _ in batch]
        change.unlist(unlisted, core.now_unix_ms(), notes_removals=core.blobs.is_shared)
        return [digest for _, digest in batch]

    while batch := core.catalog.write(namespace, work, frees_space=True):
        blobs += len(batch)
        freed += remove_files(core, namespace, batch)
    core.counters.add(namespace, "blobs_swept", blobs)
    return GcReport(0, blobs, freed)


def _dry_run(core: Core, namespace: str) -> GcReport:
    deadlines = rested_at(core.now_unix_ms(), core.grace_ms)
    new, _ = core.catalog.read(namespace, lambda view: view.count_unheld())
    ready = core.catalog.read(namespace, lambda view: view.rested(deadlines, -1))
    return GcReport(new, len(ready), sum(digest.size_bytes for _, digest in ready))


def _evict(core: Core, namespace: str, wanted_bytes: int) -> None:
    now = core.now_unix_ms()
    deadlines = rested_at(now, core.grace_ms)

    def work(change: CatalogChange) -> Evicted:
        shared = core.blobs.is_shared
        evicted = change.evict(wanted_bytes, core.config.evict_heads, now, deadlines, notes_removals=shared)
        core.report(change, namespace, evicted.events)
        return evicted

    try:
        evicted = core.catalog.write(namespace, work, frees_space=True)
    except NotEnough:
        return
    remove_files(core, namespace, evicted.freed)
    core.counters.add(namespace, "versions_evicted", evicted.versions)
