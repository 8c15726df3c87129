"""Files that no row names are set aside, never removed at once: an index may have lost rows, and then they are all
that is left.

What is set aside keeps its place under another name, which says since when, and goes when it has rested a grace period.
"""

import contextlib

import structlog
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_files import aside_since
from cachestore_svc.core import Core
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.records import GcReport


def sweep_at_start(core: Core) -> None:
    """Remove parts that a crash left, and set aside files that no row names. A row without a file is quarantined.

    Nothing else runs yet, so one look is enough.
    """
    new = sum(_sweep(core, namespace) for namespace in core.sound_namespaces())
    for directory in core.files.unknown_directories(core.known_namespaces()):
        listing = core.files.listing_of(directory)
        for hash_ in listing.parts:
            core.disk.remove(core.files.part_in(directory, hash_))
        for hash_ in listing.blobs:
            core.files.set_aside(directory, hash_, core.now_unix_ms())
        core.files.asides.update(listing.asides)
        new += len(listing.blobs)
    if core.files.asides:
        structlog.get_logger("cachestore").warning("blobs.set_aside", new=new, resting=len(core.files.asides))


def collect(core: Core) -> GcReport:
    """Remove what was set aside a grace period ago."""
    until = core.now_unix_ms() - core.grace_ms
    rested = [path for path in list(core.files.asides) if aside_since(path.name) <= until]
    removed = freed = 0
    for path in rested:
        size_bytes = core.disk.size_bytes(path) or 0
        # What cannot be removed, such as a directory, stays; it is looked at again by the next start.
        core.files.asides.discard(path)
        with contextlib.suppress(OSError):
            core.disk.remove(path)
            removed, freed = removed + 1, freed + size_bytes
    return GcReport(0, removed, freed)


def _sweep(core: Core, namespace: str) -> int:
    """How many files of a namespace were set aside."""

    def listed(view: CatalogView) -> tuple[list[Digest], list[Digest]]:
        return view.whole_blobs(namespace), view.damaged_blobs(namespace)

    listing = core.files.listing(namespace)
    whole, damaged = core.catalog.read(namespace, listed)
    for hash_ in listing.parts:
        core.files.remove_part(namespace, hash_)
    unnamed = listing.blobs - {digest.hash for digest in (*whole, *damaged)}
    for hash_ in unnamed:
        core.files.set_aside(core.files.directory(namespace).parent, hash_, core.now_unix_ms())
    core.files.asides.update(listing.asides)
    core.quarantine(namespace, [digest for digest in whole if digest.hash not in listing.blobs])
    return len(unnamed)
