"""Sets unlisted blobs aside, under a name with the time, for a grace period: an index may have lost entries."""

import contextlib
from collections.abc import Iterable, Sequence

import structlog
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Aside, unknown_places
from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import quarantine, set_aside, set_unknown_aside, set_unlisted_aside
from cachestore_svc.facts.records import GcReport


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
        whole = core.catalog.read(namespace, lambda view: view.whole_blobs())
        lost = [digest for digest in whole if digest.hash not in listing.blobs]
        # Another process may have published one since the listing.
        lost = [digest for digest in lost if blobs.size_bytes(digest.hash) is None]
        quarantine(core, namespace, _without_asides(core, namespace, lost, listing.asides))
    return unnamed


def _without_asides(core: Core, namespace: str, lost: Sequence[Digest], asides: Iterable[Aside]) -> list[Digest]:
    """Of blobs that a row has, those that do not lie aside. The others go back: the process ended before that."""
    names, by_name = core.seals.names_of(namespace), {each.hash: each for each in asides}
    blobs, left = core.blobs.of(namespace), list[Digest]()
    for digest, name in zip(lost, names.hashes(digest.hash for digest in lost), strict=True):
        if (aside := by_name.get(name)) is None:
            left.append(digest)
            continue
        blobs.restore(aside)
        core.asides.discard(aside)
        if blobs.size_bytes(digest.hash) is None:  # its time was over meanwhile
            left.append(digest)
    return left
