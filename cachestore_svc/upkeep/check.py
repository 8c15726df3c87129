"""Checks the store against itself: catalog and files both ways, manifests against their rows, bytes against digests.
While the store serves, what they find is looked up again under the blob's lock before it is called wrong.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from kvasir.errors import DataLoss, InvalidArgument, KvasirError, NotFound, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import Damaged, unknown_places
from cachestore_svc.blobs.manifests import read_manifest
from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import (
    is_known,
    quarantine,
    read_blob,
    set_aside,
    set_unknown_aside,
    set_unlisted_aside,
    verified,
)
from cachestore_svc.facts.records import CheckReport, Finding, VerifyProgress
from cachestore_svc.index.catalog import HOUSE, CatalogView
from cachestore_svc.index.refusals import reading_damage
from cachestore_svc.journal import replay
from cachestore_svc.journal.journal import Journal
from cachestore_svc.recovery import looking

_BLOBS_PER_PROGRESS = 64


def check(core: Core, repair: bool) -> CheckReport:
    names = core.sound_namespaces()
    findings = list[Finding]()
    if core.journal is not None:
        with reading_damage():
            findings += _index(core, core.journal)
    findings += _unknown_places(core, repair)
    blobs = snapshots = 0
    for namespace in names:
        findings += _damaged(core, namespace, repair)
        findings += _files(core, namespace, repair)
        findings += _manifests(core, namespace, repair)
        counts = core.catalog.read(namespace, lambda view: view.counts())
        blobs += counts[0]
        snapshots += counts[1]
    asides = sum(len(blobs.list().asides) for blobs in core.blobs.all())
    return CheckReport(tuple(findings), len(names), blobs, snapshots, asides)


def verify(core: Core, namespace: str, digests: Sequence[Digest]) -> Iterator[VerifyProgress]:
    """Re-hash blobs; damaged ones are quarantined before they are reported. Raises Unavailable."""
    damaged: list[Digest] = []
    for number, digest in enumerate(digests, start=1):
        if not _is_whole(core, namespace, digest):
            damaged.append(digest)
        if number % _BLOBS_PER_PROGRESS == 0 and number < len(digests):
            yield VerifyProgress(number, len(digests), tuple(damaged))
            damaged = []
    yield VerifyProgress(len(digests), len(digests), tuple(damaged))


def _is_whole(core: Core, namespace: str, digest: Digest) -> bool:
    """Whether the bytes are the digest's. A blob swept meanwhile is not damaged."""
    try:
        verified(core, namespace, digest, past_copies=True)
    except NotFound:
        return True
    except DataLoss:
        return False
    return True


def _index(core: Core, log: Journal) -> Iterator[Finding]:
    """Faults of the index, namespaces whose rows were found damaged at the start, and what differs from the journal."""
    for problem, words in core.catalog.read(HOUSE, lambda view: view.problems()):
        yield Finding(problem, "", words)
    for namespace, words in core.catalog.damage.items():
        yield Finding("INDEX_DAMAGED", namespace, words)
    differences = core.catalog.read(HOUSE, partial(_differences, log))
    if differences is None:
        yield Finding("DAMAGED_JOURNAL", "", "it ends too early: restart the store, which writes it again")
    for namespace, damage in (differences or {}).items():
        if namespace not in core.catalog.damage:
            yield Finding("INDEX_DAMAGED", namespace, core.seals.plain(namespace, looking.words_of(damage)))


def _differences(log: Journal, view: CatalogView) -> dict[str, dict[str, str]] | None:
    """By namespace and agent; None where the journal is not what was written, and shows nothing about the index."""
    # On the catalog's thread nothing is written meanwhile: both are at one position.
    recorded = log.shorter(log.size_bytes)
    return replay.differences(recorded.state, view.state_anyway()) if recorded.position == log.position else None


def _unknown_places(core: Core, repair: bool) -> Iterator[Finding]:
    for blobs in unknown_places(core.blobs, core.known_namespaces):
        # A part may be the first blob of a new namespace, on its way.
        listing = blobs.list()
        left = set_unknown_aside(core, blobs, listing) if repair else sorted(listing.blobs)
        if repair or not is_known(core, blobs):
            yield from (Finding("ORPHAN_FILE", "", hash_, repair) for hash_ in left)


def _files(core: Core, namespace: str, repair: bool) -> Iterator[Finding]:
    began_unix_ms = core.now_unix_ms()
    listing = core.blobs.of(namespace).list()
    digests = core.catalog.read(namespace, lambda view: view.whole_blobs())
    listed = {digest.hash: digest for digest in digests}
    unlisted, gone, is_shared = listing.blobs - set(listed), set[str](), core.blobs.is_shared
    if repair and is_shared:
        editions = {hash_: listing.editions[hash_] for hash_ in unlisted}
        gone = {each.hash for each in set_unlisted_aside(core, namespace, editions, began_unix_ms)}
    for hash_ in sorted(unlisted):
        if hash_ in gone or _is_orphan(core, namespace, hash_, repair and not is_shared):
            yield Finding("ORPHAN_FILE", namespace, hash_, repair and (hash_ in gone or not is_shared))
    for name in listing.strange:
        yield Finding("STRANGE_FILE", namespace, name)
    for digest in digests:
        size = core.blobs.of(namespace).size_bytes(digest.hash)
        if size != digest.size_bytes and _has_wrong_size(core, namespace, digest, repair):
            problem, found = ("MISSING_FILE", "none") if size is None else ("WRONG_SIZE", str(size))
            detail = f"{digest.hash}: expected {digest.size_bytes} bytes, found {found}"
            yield Finding(problem, namespace, detail, repair)


def _is_orphan(core: Core, namespace: str, hash_: str, repair: bool) -> bool:
    """Whether a blob is still not listed, looked up while no writer can be between naming it and listing it."""
    blobs = core.blobs.of(namespace)
    with blobs.naming(hash_):
        if core.catalog.read(namespace, lambda view: view.has_hash(hash_)):
            return False
        if repair:
            set_aside(core, blobs, hash_)
        return blobs.size_bytes(hash_) is not None or repair


def _has_wrong_size(core: Core, namespace: str, digest: Digest, repair: bool) -> bool:
    """Whether a listed blob still has another size, looked up while it cannot be swept or written again."""
    blobs = core.blobs.of(namespace)
    with blobs.naming(digest.hash):
        is_right = blobs.size_bytes(digest.hash) == digest.size_bytes
        if is_right or not core.catalog.read(namespace, lambda view: view.has_hash(digest.hash)):
            return False
        if repair:
            quarantine(core, namespace, [digest])
    return True


def _manifests(core: Core, namespace: str, repair: bool) -> Iterator[Finding]:
    for manifest in core.catalog.read(namespace, lambda view: view.held_manifests()):
        try:
            facts = read_manifest(read_blob(core, namespace, manifest))
        except InvalidArgument as error:
            yield Finding("MANIFEST_REFUSED", namespace, f"{manifest.hash}: {error}")
            continue
        except KvasirError:
            # Damaged: reported as such. Swept: not there to be wrong.
            continue
        if _names_others(core, namespace, manifest, [blob.digest for blob in facts.named], repair):
            yield Finding("WRONG_REFERENCES", namespace, manifest.hash, repair)


def _names_others(core: Core, namespace: str, manifest: Digest, named: Sequence[Digest], repair: bool) -> bool:
    does = core.catalog.read(namespace, lambda view: view.names_others(manifest, named))
    if does and repair:
        core.catalog.write(namespace, lambda change: change.hold_again(manifest, named))
    return does


def _damaged(core: Core, namespace: str, repair: bool) -> Iterator[Finding]:
    """Blobs in quarantine. Repair takes out those that can be read again, and are whole."""
    for digest in core.catalog.read(namespace, lambda view: view.damaged_blobs()):
        yield Finding("DAMAGED_BLOB", namespace, digest.hash, repair and _is_taken_out(core, namespace, digest))


def _is_taken_out(core: Core, namespace: str, digest: Digest) -> bool:
    try:
        core.blobs.of(namespace).read(digest, past_copies=True)
    except (Damaged, FileNotFoundError, Unavailable):
        return False
    core.catalog.write(namespace, lambda change: change.set_damaged(digest, False))
    return True
