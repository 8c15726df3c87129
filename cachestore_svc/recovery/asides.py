"""Sets unlisted blobs aside, under a name with the time, for a grace period: an index may have lost entries."""

import contextlib

import structlog
from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Listing, unknown_places
from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import quarantine, set_aside, set_unknown_aside, set_unlisted_aside, verified
from cachestore_svc.facts.records import GcReport

_REMEDY = "mount the disk of its blobs; if it has none, remove their empty directory, and start again"


def sweep_at_start(core: Core) -> None:
    """Remove parts and handed files of a crash, set aside files without a row, quarantine rows without a file."""
    for blobs in core.blobs.all():
        for token in blobs.handed():
            blobs.remove_handed(token)
    new = sum(_sweep(core, namespace) for namespace in core.sound_namespaces())
    for blobs in unknown_places(core.blobs, core.known_namespaces):
        listing = blobs.list()
        for hash_ in listing.parts:
            blobs.remove_part(hash_)
        new += len(set_unknown_aside(core, blobs, listing))
        core.asides.update(listing.asides)
    if core.asides:
        structlog.get_logger("cachestore").warning("blobs.set_aside", new=new, resting=len(core.asides))


def collect(core: Core) -> GcReport:
    until = core.now_unix_ms() - core.grace_ms
    rested = [aside for aside in list(core.asides) if aside.since_unix_ms <= until]
    removed = freed = 0
    for aside in rested:
        # An aside that cannot be removed, such as a directory, stays; the next start looks at it again.
        core.asides.discard(aside)
        with contextlib.suppress(OSError):
            size_bytes = core.blobs.remove_aside(aside)
            removed, freed = removed + 1, freed + size_bytes
    return GcReport(0, removed, freed)


def _sweep(core: Core, namespace: str) -> int:
    blobs, began_unix_ms = core.blobs.of(namespace), core.now_unix_ms()
    listing = blobs.list()
    listed = core.catalog.read(namespace, lambda view: view.hashes_of())
    if listed and not blobs.expect():
        structlog.get_logger("cachestore").warning("blobs.away", namespace=namespace, remedy=_REMEDY)
        return 0
    for hash_ in listing.parts:
        blobs.remove_part(hash_)
    if core.blobs.is_shared:
        unnamed = len(set_unlisted_aside(core, namespace, listing.editions, began_unix_ms))
    else:
        for hash_ in listing.blobs - listed:
            set_aside(core, blobs, hash_)
        unnamed = len(listing.blobs - listed)
    core.asides.update(listing.asides)
    if not listed <= listing.blobs:
        quarantine(core, namespace, _lost(core, namespace, listing))
    return unnamed


def _lost(core: Core, namespace: str, listing: Listing) -> list[Digest]:
    """Blobs that a row has, and no file. Those that lie aside go back: the process ended before that. A reader may have
    put them into quarantine since."""
    blobs, asides, lost = core.blobs.of(namespace), {each.hash: each for each in listing.asides}, list[Digest]()
    whole, damaged = core.catalog.read(namespace, lambda view: (view.whole_blobs(), {*view.damaged_blobs()}))
    absent = [digest for digest in (*whole, *damaged) if digest.hash not in listing.blobs]
    names = core.seals.names_of(namespace).hashes(digest.hash for digest in absent)
    for digest, aside in zip(absent, map(asides.get, names), strict=True):
        # With a size, another process published it since the listing.
        if (digest in damaged and aside is None) or blobs.size_bytes(digest.hash) is not None:
            continue
        if aside is not None:
            blobs.restore(aside)
            core.asides.discard(aside)
        if aside is None or blobs.size_bytes(digest.hash) is None:  # its time was over meanwhile
            lost.append(digest)
        elif digest in damaged:
            with contextlib.suppress(KvasirError):
                verified(core, namespace, digest)  # ends the quarantine
    return lost
