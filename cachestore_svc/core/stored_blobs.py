"""An open store's work on stored blobs: promise, read, quarantine, set aside, remove."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from kvasir.errors import DataLoss, NotFound, ResourceExhausted, Unavailable
from kvasir.formats.digest import Digest
from kvasir.waits import HANGS_S

from cachestore_svc.blobs.backend import Aside, Damaged, Listing, NamespaceBlobs
from cachestore_svc.blobs.disk import refusal
from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import BlobDamaged
from cachestore_svc.index.catalog import SLICE, CatalogChange, CatalogView, Removal
from cachestore_svc.index.values import BlobEntry, needs_promise

_MOST_SENT = 15  # times that one request may take, all its tries together
_UNKNOWN_AT_ONCE = 64  # objects between two looks at which namespaces are known


def promised(core: Core, namespace: str, find: Callable[[CatalogView], Iterable[BlobEntry]]) -> list[BlobEntry]:
    """The namespace's undamaged blobs that `find` finds; they stay for a grace period. About SLICE at once."""
    now = core.now_unix_ms()

    def find_whole(view: CatalogView) -> list[BlobEntry]:
        return [blob for blob in find(view) if not blob.is_damaged]

    def find_and_promise(change: CatalogChange) -> list[BlobEntry]:
        found = find_whole(change)
        change.promise(found, now)
        return found

    found = core.read(namespace, find_whole)
    if any(needs_promise(blob.promised_unix_ms, now, core.grace_ms) for blob in found):
        return core.write(namespace, find_and_promise, frees_space=True)
    return found


def read_blob(core: Core, namespace: str, digest: Digest, *, is_found: bool = False) -> memoryview:
    data = verified(core, namespace, digest, is_found=is_found)
    core.counters.add(namespace, "blobs_read")
    core.counters.add(namespace, "bytes_read", digest.size_bytes)
    return data


def verified(
    core: Core, namespace: str, digest: Digest, *, is_found: bool = False, past_copies: bool = False
) -> memoryview:
    """As read_blob, but not counted as served. `past_copies`: see NamespaceBlobs.read."""
    with contextlib.suppress(FileNotFoundError, Damaged):
        if is_found or not _listed(core, namespace, digest).is_damaged:
            return core.blobs.of(namespace).read(digest, past_copies=past_copies)
    # Since the look-up it may have been swept, and written again: its present bytes decide.
    with core.blobs.of(namespace).naming(digest.hash):
        return _read_or_quarantine(core, namespace, digest)


def _read_or_quarantine(core: Core, namespace: str, digest: Digest) -> memoryview:
    """Read, past copies, while no other thread can replace or remove the blob."""
    if _listed(core, namespace, digest).is_damaged:
        return _read_again(core, namespace, digest)
    blobs = core.blobs.of(namespace)
    try:
        return blobs.read(digest, past_copies=True)
    except FileNotFoundError as error:
        if not core.blobs.is_shared and not blobs.exists():  # a disk that is away has lost nothing
            raise refusal(error, f"{digest}") from error
        refused, cause = _found_damaged(core, namespace, digest, "its file is missing"), None
    except Damaged as error:
        refused, cause = _found_damaged(core, namespace, digest, str(error)), error
    with contextlib.suppress(DataLoss):
        return _read_again(core, namespace, digest)  # another process may have written it while this one looked
    raise refused from cause


def _read_again(core: Core, namespace: str, digest: Digest) -> memoryview:
    """Read a blob that is in quarantine, and take it out. On a disk its bytes stay as they are; a bucket that had
    others may only have answered wrongly. Raises DataLoss."""
    if core.blobs.is_shared:
        with contextlib.suppress(FileNotFoundError, Damaged):
            data = core.blobs.of(namespace).read(digest, past_copies=True)
            core.catalog.write(namespace, lambda change: change.set_damaged(digest, False), frees_space=True)
            return data
    raise damaged_error(digest, "it is in quarantine")


def quarantine(core: Core, namespace: str, digests: Iterable[Digest]) -> None:
    """Never serve these until they are rewritten; each is reported once."""
    wanted = list(digests)

    def work(change: CatalogChange) -> None:
        new = [digest for digest in wanted if change.set_damaged(digest, True)]
        core.report(change, namespace, [BlobDamaged(digest) for digest in new])

    if wanted:
        core.catalog.write(namespace, work, frees_space=True)
        core.counters.add(namespace, "blobs_damaged", len(wanted))


def set_aside(core: Core, blobs: NamespaceBlobs, hash_: str, editions: Iterable[int] = (0,)) -> None:
    """Keep bytes that nothing lists for a grace period, under a name that no reader knows."""
    for edition in editions:
        core.asides.add(blobs.set_aside(hash_, core.now_unix_ms(), edition))


def set_unknown_aside(core: Core, blobs: NamespaceBlobs, listing: Listing) -> list[str]:
    """As `set_aside`, of a place, while no namespace is known whose it is; the hashes. Another process may
    begin it meanwhile, and find objects there: those of the last few then go back. Each look reads all namespaces."""
    gone, hashes = list[str](), sorted(listing.blobs)
    for some in (hashes[start : start + _UNKNOWN_AT_ONCE] for start in range(0, len(hashes), _UNKNOWN_AT_ONCE)):
        with blobs.naming(*some):
            if is_known(core, blobs):
                break
            made = list[tuple[int, Aside]]()
            for hash_, edition in ((each, edition) for each in some for edition in listing.editions.get(each, {0})):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    made.append((edition, blobs.set_aside(hash_, core.now_unix_ms(), edition)))
            if core.blobs.is_shared and is_known(core, blobs):
                core.asides.update(_bring_back(blobs, made))
                break
        core.asides.update(aside for _, aside in made)
        gone += some
    return gone


def _bring_back(blobs: NamespaceBlobs, made: Iterable[tuple[int, Aside]]) -> list[Aside]:
    """Restore the first edition of each blob. Returns the others, which stay aside: one of them may be damaged."""
    others = list[Aside]()
    for _, aside in sorted(made, key=lambda each: each[0]):
        if blobs.size_bytes(aside.hash) is None:
            blobs.restore(aside)
        else:
            others.append(aside)
    return others


def is_known(core: Core, blobs: NamespaceBlobs) -> bool:
    """Whether they lie at the place of a namespace that is known."""
    return any(core.blobs.of(namespace).place == blobs.place for namespace in core.known_namespaces())


def set_unlisted_aside(core: Core, namespace: str, found: Mapping[str, set[int]], since_unix_ms: int) -> list[Removal]:
    """As `set_aside`, of the editions of a shared backend that no row has; which these are. `since_unix_ms`: when the
    list of them began. Another process may be about to list one: it then writes the blob under another name."""
    hashes, unlisted = sorted(found), list[Removal]()
    for start in range(0, len(hashes), SLICE):
        now, some = core.now_unix_ms(), {each: found[each] for each in hashes[start : start + SLICE]}
        if not _is_soon(core, since_unix_ms):
            break
        unlisted += core.catalog.write(namespace, partial(_condemn, some, now))
    end_removals(core, namespace)
    return unlisted


def _condemn(found: Mapping[str, set[int]], now_unix_ms: int, change: CatalogChange) -> list[Removal]:
    return change.condemn(found, now_unix_ms, keeps=True)


def remove_files(core: Core, namespace: str, digests: Iterable[Digest]) -> int:
    """Remove the files of blobs that are not listed any more; bytes freed. A blob that was written again stays."""
    freed = 0
    if core.blobs.is_shared:
        for digest in digests:
            core.space.freed(namespace, digest.size_bytes)
            freed += digest.size_bytes
        end_removals(core, namespace)
        return freed
    for digest in digests:
        with core.blobs.of(namespace).naming(digest.hash):
            core.space.freed(namespace, digest.size_bytes)
            if _find(core, namespace, digest) is None:
                try:
                    core.blobs.of(namespace).remove(digest.hash)
                except OSError:
                    # Unlisted already: the sweep at the next start tries again.
                    core.counters.add(namespace, "files_not_removed")
        freed += digest.size_bytes
    return freed


def end_removals(core: Core, namespace: str) -> None:
    """Remove objects whose removal was noted, by this process or by one that died, or set them aside if that was noted.
    Another one may do the same."""
    found: list[Removal] = []
    while waiting := core.catalog.read(namespace, lambda view: view.waiting_removals(SLICE)):
        if found == waiting:  # none of them could be removed
            return
        found, done = waiting, list[Removal]()
        began_unix_ms = core.now_unix_ms()
        for each in waiting:
            if not _is_soon(core, began_unix_ms):
                break
            try:
                _end_one(core, namespace, each)
                done.append(each)
            except OSError:
                core.counters.add(namespace, "files_not_removed")
        core.catalog.write(namespace, partial(_end, done, core.now_unix_ms()), frees_space=True)


def _end_one(core: Core, namespace: str, each: Removal) -> None:
    blobs = core.blobs.of(namespace)
    if not each.is_kept:
        blobs.remove(each.hash, each.edition)
        return
    with contextlib.suppress(FileNotFoundError):
        set_aside(core, blobs, each.hash, [each.edition])


def _end(done: Sequence[Removal], now_unix_ms: int, change: CatalogChange) -> None:
    change.end_removals(done, now_unix_ms)


def _is_soon(core: Core, began_unix_ms: int) -> bool:
    """Whether what was read then still holds. A process that stood still may not go on: names may be used again."""
    return 0 <= core.now_unix_ms() - began_unix_ms < name_rest_ms(core) // 2


def name_rest_ms(core: Core) -> int:
    """For so long a name whose removal was answered is not used again: the request may have been sent twice."""
    return max(core.grace_ms, round(_MOST_SENT * HANGS_S * 1000))


def _found_damaged(core: Core, namespace: str, digest: Digest, why: str) -> DataLoss:
    # Where not even that can be written, the bytes are not served all the same, and the next reader tries again.
    with contextlib.suppress(ResourceExhausted, Unavailable):
        quarantine(core, namespace, [digest])
    return damaged_error(digest, why)


def _listed(core: Core, namespace: str, digest: Digest) -> BlobEntry:
    found = _find(core, namespace, digest)
    if found is None:
        raise not_found(digest)
    return found


def _find(core: Core, namespace: str, digest: Digest) -> BlobEntry | None:
    return core.catalog.read(namespace, lambda view: view.find_blob(digest))


def not_found(digest: Digest) -> NotFound:
    return NotFound(f"there is no blob {digest}", reason="BLOB_NOT_FOUND", metadata={"digest": digest.hash})


def damaged_error(digest: Digest, why: str) -> DataLoss:
    return DataLoss(f"blob {digest} is damaged: {why}", metadata={"digest": digest.hash})
