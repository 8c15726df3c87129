"""Blobs, by their digests: looked for, written, read. Knows nothing of agents."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import takewhile

from kvasir.errors import DataLoss, InvalidArgument, KvasirError, NotFound, ResourceExhausted
from kvasir.formats.digest import BlobName, Digest

from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.blobs.blob_writer import BlobWriter as BlobWriter
from cachestore_svc.blobs.blob_writer import NewBlob as NewBlob
from cachestore_svc.blobs.blob_writer import PartWriter, StoredBlob
from cachestore_svc.blobs.blob_writer import finish_all as finish_all
from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import end_removals, not_found, promised, read_blob
from cachestore_svc.facts.limits import check_range
from cachestore_svc.facts.records import MAX_DIGESTS_PER_REQUEST, BlobKind, WriteStatus
from cachestore_svc.index.catalog import SLICE, CatalogChange, CatalogView
from cachestore_svc.index.values import BlobEntry
from cachestore_svc.upkeep import collecting

_LOOKED_UP = 2 * SLICE  # at once: a look-up by hash takes less than other work


class Blobs:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.are_far = core.blobs.is_shared  # they lie in a bucket

    def find_missing(self, namespace: str, digests: Sequence[Digest]) -> list[Digest]:
        """Digests that the namespace lacks or holds damaged, in the given order. Extends the others' lifetimes."""
        names = [(digest.hash, digest.size_bytes) for digest in digests]
        whole = self.find_whole(namespace, names)
        return [digest for digest, name in zip(digests, names, strict=True) if name not in whole]

    def find_whole(self, namespace: str, names: Sequence[BlobName]) -> set[BlobName]:
        """Those that the namespace holds, and not damaged. Extends their lifetimes."""
        check_range("digests", len(names), 0, MAX_DIGESTS_PER_REQUEST)
        slices = (names[start : start + _LOOKED_UP] for start in range(0, len(names), _LOOKED_UP))
        return {name for some in slices for name in self._whole_of(namespace, some)}

    def _whole_of(self, namespace: str, names: Sequence[BlobName]) -> list[BlobName]:
        asked = set(names)

        def find(view: CatalogView) -> list[BlobEntry]:
            found = view.entries_of([hash_ for hash_, _ in asked])
            return [blob for blob in found if (blob.hash, blob.size_bytes) in asked]

        return [(blob.hash, blob.size_bytes) for blob in promised(self._core, namespace, find)]

    def receive_files(self, namespace: str) -> bool:
        """Whether a caller on this host may hand whole files over, never where bytes must not lie plain."""
        if self._core.seals.key_of(namespace) is not None or self._core.seals.refusal(namespace) is not None:
            return False
        with suppress(OSError):
            self._core.blobs.of(namespace).receive_files()
            return True
        return False

    def open_writer(self, namespace: str, digest: Digest, kind: BlobKind) -> BlobWriter:
        """Reserve room for a blob and begin, or go on, writing it. A full quota first gives up what eviction may.
        Raises ResourceExhausted (QUOTA_FULL, DISK_FULL, WRITE_BUDGET_SPENT, with numbers), FailedPrecondition
        (WRITE_IN_PROGRESS: another writer has it open) and InvalidArgument (BLOB_TOO_LARGE).
        """
        [opened] = self.open_writers(namespace, [NewBlob(digest, kind)])
        if isinstance(opened, Exception):
            raise opened
        return opened

    def open_writers(self, namespace: str, blobs: Sequence[NewBlob]) -> list[BlobWriter | KvasirError]:
        """As `open_writer`, of many at once: a writer of each, or why it has none. A handed blob has arrived whole."""
        self._core.check_open(namespace)
        with self._core.writers.noting_ends() as ended:
            lacking = set(self._lacking(namespace, [blob.digest for blob in blobs]))
            begun = list[BlobWriter | KvasirError]()
            if lacking:
                self._core.space.look(namespace)
                self._core.write_budget.look()
            try:
                self._begin(namespace, [blob for blob in blobs if blob.digest in lacking], begun)
                coming = iter(begun)
                opened = [next(coming) if blob.digest in lacking else StoredBlob(blob.digest) for blob in blobs]
                # Another writer may have listed one between the look-up and now; its part is then gone.
                doubtful = [digest for digest in lacking if (namespace, digest.hash) in ended]
                listed = set(doubtful) - set(self.find_missing(namespace, doubtful)) if doubtful else ()
            except BaseException:
                for each in begun:
                    if isinstance(each, PartWriter):
                        each.abandon()
                raise
        for number, each in enumerate(opened):
            if isinstance(each, PartWriter) and each.digest in listed:  # a name whose bytes are durable stays theirs
                each.abandon()
                opened[number] = StoredBlob(each.digest)
        return opened

    def _lacking(self, namespace: str, digests: Sequence[Digest]) -> list[Digest]:
        """As `find_missing`, without the index's thread for blobs that have no file: nothing is listed before its file
        has its name, and a turn's end waits for the answer.
        """
        named = digests if self.are_far else [digest for digest in digests if self._has_file(namespace, digest)]
        return [*(set(digests) - set(named)), *(self.find_missing(namespace, named) if named else ())]

    def _has_file(self, namespace: str, digest: Digest) -> bool:
        with suppress(OSError):
            return self._core.blobs.of(namespace).size_bytes(digest.hash) is not None
        return True

    def _begin(self, namespace: str, blobs: Sequence[NewBlob], begun: list[BlobWriter | KvasirError]) -> None:
        """Add to `begun` a writer of each, or why it has none; one by one if the quota is too full for all."""
        core = self._core
        if len(blobs) > 1 and core.space.shortage(namespace, sum(blob.digest.size_bytes for blob in blobs)):
            for blob in blobs:
                self._begin(namespace, [blob], begun)
            return
        refusals = [self._refusal(namespace, blob) for blob in blobs]
        may_come = [blob for blob, refusal in zip(blobs, refusals, strict=True) if refusal is None]
        writers = iter(core.writers.begin(namespace, may_come, _Register(core)) if may_come else ())
        group = [refusal or next(writers) for refusal in refusals]
        begun += group
        for number, (blob, each) in enumerate(zip(blobs, group, strict=True), len(begun) - len(group)):
            # Another sender took the room since it was looked for: more may be made.
            if len(group) > 1 and isinstance(each, ResourceExhausted) and each.reason == "QUOTA_FULL":
                again = list[BlobWriter | KvasirError]()
                self._begin(namespace, [blob], again)
                begun[number : number + 1] = again

    def _refusal(self, namespace: str, blob: NewBlob) -> KvasirError | None:
        """Why a blob may not come, if it may not. Makes room for it in a full quota."""
        core, digest = self._core, blob.digest
        try:
            if digest.size_bytes > core.config.max_blob_bytes:
                raise InvalidArgument(
                    f"size_bytes: expected at most {core.config.max_blob_bytes}, got {digest.size_bytes}",
                    reason="BLOB_TOO_LARGE",
                    field="digest.size_bytes",
                )
            if blob.kind is not BlobKind.MANIFEST:  # so that a turn whose blocks are here already can be committed
                core.write_budget.check(namespace, digest.size_bytes)
            left = core.writers.left_bytes(namespace, digest)
            if wanted := core.space.shortage(namespace, digest.size_bytes - left):
                collecting.make_room(core, namespace, wanted, resuming=digest)
        except KvasirError as error:
            return error
        return None

    def write_status(self, namespace: str, digest: Digest) -> WriteStatus:
        """How much of a blob has arrived. No side effect."""
        blob = self._find(namespace, digest)
        if blob and not blob.is_damaged:
            return WriteStatus(digest.size_bytes, is_complete=True)
        return WriteStatus(self._core.writers.received_bytes(namespace, digest), is_complete=False)

    def kind_of(self, namespace: str, digest: Digest) -> BlobKind | None:
        blob = self._find(namespace, digest)
        if blob is None:
            return None
        return BlobKind.MANIFEST if blob.kind == BlobKind.MANIFEST else BlobKind.TENSORS

    def named_blobs(self, namespace: str, manifest: Digest, total_bytes: int) -> list[Digest]:
        """The blobs that a version's manifest names, in order. Raises NotFound, DataLoss (INDEX_DAMAGED)."""
        named: list[Digest] = []
        after = -1
        while some := self._core.read(namespace, partial(_named_after, manifest, after)):
            named += [digest for _, digest in some]
            after = some[-1][0]
        if manifest.size_bytes + sum(digest.size_bytes for digest in named) == total_bytes:
            return named
        if not self._core.read(namespace, lambda view: view.is_held(manifest)):
            raise NotFound("the version was given up meanwhile", reason="VERSION_NOT_FOUND")
        raise DataLoss(f"the index names other blobs of manifest {manifest} than it has", reason="INDEX_DAMAGED")

    def leading_stored(self, namespace: str, digests: Sequence[Digest]) -> list[bool]:
        """Of the first digests that are stored, whether each is whole. One operation. Raises NotFound for the first."""
        found = self._core.read(namespace, lambda view: view.find_blobs(digests))
        stored = takewhile(lambda digest: digest in found, digests)
        are_whole = [not found[digest].is_damaged for digest in stored]
        if digests and not are_whole:
            raise not_found(digests[0])
        return are_whole

    def read(self, namespace: str, digest: Digest, *, is_found: bool = False) -> memoryview:
        """The blob's bytes, verified. One that `leading_stored` found whole (`is_found`) is looked up again only if its
        bytes are not there any more, or not right. Raises NotFound, and DataLoss (metadata "digest") when they are
        damaged: the blob is then quarantined, an event reports it, and a later write may replace it."""
        self._core.check_open(namespace)
        return read_blob(self._core, namespace, digest, is_found=is_found)

    def _find(self, namespace: str, digest: Digest) -> BlobEntry | None:
        return self._core.read(namespace, lambda view: view.find_blob(digest))


def _named_after(manifest: Digest, after: int, view: CatalogView) -> list[tuple[int, Digest]]:
    return view.named_after(manifest, after, SLICE)


class _Register:
    def __init__(self, core: Core) -> None:
        self._core = core

    def editions(self, namespace: str, digests: Sequence[Digest]) -> Mapping[str, int]:
        hashes = [digest.hash for digest in digests]
        if not self._core.blobs.is_shared:
            return dict.fromkeys(hashes, 0)
        if not self._core.catalog.read(namespace, lambda view: view.namespace_id):
            # Before its first object: nobody knows the place of a namespace that is in no row.
            self._core.catalog.write(namespace, lambda change: change.make_namespace())
        return self._core.catalog.read(namespace, lambda view: view.free_editions(hashes))

    def add(self, namespace: str, blobs: Sequence[tuple[Digest, BlobFacts]], editions: Mapping[str, int]) -> list[bool]:
        now = self._core.now_unix_ms()
        size_bytes = sum(digest.size_bytes for digest, _ in blobs)

        def work(change: CatalogChange) -> list[bool]:
            is_shared = self._core.blobs.is_shared
            are_new = change.add_editions(blobs, editions, now) if is_shared else change.add_blobs(blobs, now)
            self._core.write_budget.count(change, namespace, size_bytes)
            return are_new

        brings = partial(self._core.early_commits.listing, namespace, [digest for digest, _ in blobs])
        # With the commits that it brings: else the index's thread often commits the blobs alone.
        listed: Future[list[bool]] = self._core.catalog.write_later(namespace, work, brings)
        are_new = listed.result()
        self._core.counters.add(namespace, "blobs_written", len(blobs))
        self._core.counters.add(namespace, "bytes_written", size_bytes)
        return are_new

    def withdraw(self, namespace: str, digests: Sequence[Digest], editions: Mapping[str, int]) -> None:
        if self._core.blobs.is_shared:
            found = {hash_: {edition} for hash_, edition in editions.items()}
            now = self._core.now_unix_ms()
            self._core.catalog.write(
                namespace, lambda change: change.condemn(found, now, keeps=False), frees_space=True
            )
            end_removals(self._core, namespace)
            return
        for digest in digests:
            if self._core.catalog.read(namespace, partial(_lacks, digest)):
                with suppress(OSError):  # the others go all the same, and the caller learns why none was listed
                    self._core.blobs.of(namespace).remove(digest.hash)


def _lacks(digest: Digest, view: CatalogView) -> bool:
    return view.find_blob(digest) is None
