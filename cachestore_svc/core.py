"""The state that the parts of an open store share, and their work on blobs: read, quarantine, remove."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from kvasir.errors import DataLoss, NotFound, ResourceExhausted, Unavailable
from kvasir.formats.digest import Digest
from kvasir.names import check_namespace

from cachestore_svc.blobs.backend import Aside, BlobBackend, Damaged, NamespaceBlobs
from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.blob_writer import Writers
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.space import Space
from cachestore_svc.facts.records import BlobDamaged, EventBody, StoreConfig
from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogChange, CatalogView
from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.index.ports.blobs import BlobEntry
from cachestore_svc.index.ports.history import History
from cachestore_svc.index.resting import needs_promise
from cachestore_svc.index.write_budget import WriteBudget
from cachestore_svc.journal.journal import Journal
from cachestore_svc.sealing.seals import Seals

Answer = TypeVar("Answer")


class Counters:
    """Counts since start, per namespace. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, namespace: str, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[namespace][name] += count

    def of_all(self) -> Counter[str]:
        """Sums over namespaces."""
        with self._lock:
            return sum(self._counts.values(), Counter[str]())

    def of(self, namespace: str) -> dict[str, int]:
        with self._lock:
            return dict(self._counts[namespace])


@dataclass
class Watchers:
    """Callbacks that events wake. Used from any thread."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _callbacks: list[Callable[[str], None]] = field(default_factory=list)

    def add(self, callback: Callable[[str], None]) -> Callable[[], None]:
        with self._lock:
            self._callbacks.append(callback)

        def end() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return end

    def wake(self, namespace: str) -> None:
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            # An event loop that closed has no watchers left.
            with contextlib.suppress(RuntimeError):
                callback(namespace)


@dataclass(frozen=True)
class Storage:
    """Where rows and bytes lie, and who writes them."""

    config: StoreConfig
    disk: Disk
    ballast: Ballast
    catalog: Catalog
    blobs: BlobBackend  # opens what is sealed
    seals: Seals
    space: Space
    writers: Writers


@dataclass(frozen=True)
class Core(Storage):
    """The one of each thing that an open store has."""

    history: History
    journal: Journal
    now_unix_ms: Callable[[], int]
    leases: LiveLeases
    write_budget: WriteBudget
    counters: Counters = field(default_factory=Counters)
    watchers: Watchers = field(default_factory=Watchers)
    asides: set[Aside] = field(default_factory=set)  # bytes that were set aside, now or before the start

    @property
    def grace_ms(self) -> int:
        return int(self.config.grace_period_s * 1000)

    def check_open(self, namespace: str) -> None:
        """Raises InvalidArgument for what is no namespace, and FailedPrecondition (NAMESPACE_SEALED) for one that no
        key opens."""
        check_namespace(namespace)
        self.seals.check_open(namespace)

    def read(self, namespace: str, work: Callable[[CatalogView], Answer]) -> Answer:
        """What the catalog answers about a namespace that is open."""
        self.check_open(namespace)
        return self.catalog.read(namespace, work)

    def write(self, namespace: str, work: Callable[[CatalogChange], Answer], *, frees_space: bool = False) -> Answer:
        """The same of what is changed."""
        self.check_open(namespace)
        return self.catalog.write(namespace, work, frees_space=frees_space)

    def sound_namespaces(self) -> list[str]:
        """Namespaces whose entries can be trusted."""
        names = self.catalog.read(HOUSE, lambda view: view.namespaces())
        return [name for name in names if name not in self.catalog.damage]

    def open_namespaces(self) -> list[str]:
        """Sound namespaces whose names and bytes can be read: they are not sealed, or their key is here."""
        return [name for name in self.sound_namespaces() if self.seals.refusal(name) is None]

    def known_namespaces(self) -> set[str]:
        """All namespaces, also those that are kept out because their entries are damaged."""
        return {*self.catalog.read(HOUSE, lambda view: view.namespaces()), *self.catalog.damage}

    def report(self, change: CatalogChange, namespace: str, bodies: Iterable[EventBody]) -> None:
        """Write events, and wake their watchers once they are durable."""
        change.add_events(self.history, bodies, self.now_unix_ms())
        change.after_commit(lambda: self.watchers.wake(namespace))

    def promised(self, namespace: str, find: Callable[[CatalogView], Iterable[BlobEntry]]) -> list[BlobEntry]:
        """The undamaged blobs that `find` finds in the namespace. They stay for a grace period from now on, because the
        caller learns that they are here. Writes only when an earlier promise is not fresh enough.

        One operation of the catalog: a caller that looks for thousands asks in slices of SLICE.
        """
        now = self.now_unix_ms()

        def find_whole(view: CatalogView) -> list[BlobEntry]:
            return [blob for blob in find(view) if not blob.is_damaged]

        def find_and_promise(change: CatalogChange) -> list[BlobEntry]:
            found = find_whole(change)
            change.promise(found, now)
            return found

        found = self.read(namespace, find_whole)
        if any(needs_promise(blob.promised_unix_ms, now, self.grace_ms) for blob in found):
            return self.write(namespace, find_and_promise, frees_space=True)
        return found

    def read_blob(self, namespace: str, digest: Digest, *, is_found: bool = False) -> memoryview:
        """As `Blobs.read`."""
        data = self.verified(namespace, digest, is_found=is_found)
        self.counters.add(namespace, "blobs_read")
        self.counters.add(namespace, "bytes_read", digest.size_bytes)
        return data

    def verified(self, namespace: str, digest: Digest, *, is_found: bool = False) -> memoryview:
        """As read_blob, but not counted as served."""
        if not is_found:
            self._listed_whole(namespace, digest)
        try:
            return self.blobs.of(namespace).read(digest)
        except (FileNotFoundError, Damaged):
            # Since the look-up it may have been swept, and written again: what is there now decides.
            with self.blobs.of(namespace).naming(digest.hash):
                return self._read_or_quarantine(namespace, digest)

    def _read_or_quarantine(self, namespace: str, digest: Digest) -> memoryview:
        """Read while no other thread can replace or remove the blob."""
        self._listed_whole(namespace, digest)
        try:
            return self.blobs.of(namespace).read(digest)
        except FileNotFoundError:
            raise self._found_damaged(namespace, digest, "its file is missing") from None
        except Damaged as error:
            raise self._found_damaged(namespace, digest, str(error)) from error

    def quarantine(self, namespace: str, digests: Iterable[Digest]) -> None:
        """Never serve these until they are rewritten; each is reported once."""
        wanted = list(digests)

        def work(change: CatalogChange) -> None:
            new = [digest for digest in wanted if change.set_damaged(digest, True)]
            self.report(change, namespace, [BlobDamaged(digest) for digest in new])

        if wanted:
            self.catalog.write(namespace, work, frees_space=True)
            self.counters.add(namespace, "blobs_damaged", len(wanted))

    def set_aside(self, blobs: NamespaceBlobs, hash_: str) -> None:
        """Keep bytes that nothing lists for a grace period, under a name that no reader asks for."""
        self.asides.add(blobs.set_aside(hash_, self.now_unix_ms()))

    def remove_files(self, namespace: str, digests: Iterable[Digest]) -> int:
        """Remove the files of blobs that are not listed any more; bytes freed. A blob that was written again stays."""
        freed = 0
        for digest in digests:
            with self.blobs.of(namespace).naming(digest.hash):
                self.space.freed(namespace, digest.size_bytes)
                if self._find(namespace, digest) is None:
                    try:
                        self.blobs.of(namespace).remove(digest.hash)
                    except OSError:
                        # Unlisted already: the sweep at the next start tries again.
                        self.counters.add(namespace, "files_not_removed")
            freed += digest.size_bytes
        return freed

    def _found_damaged(self, namespace: str, digest: Digest, why: str) -> DataLoss:
        # Where not even that can be written, the bytes are not served all the same, and the next reader tries again.
        with contextlib.suppress(ResourceExhausted, Unavailable):
            self.quarantine(namespace, [digest])
        return damaged_error(digest, why)

    def _listed_whole(self, namespace: str, digest: Digest) -> None:
        found = self._find(namespace, digest)
        if found is None:
            raise not_found(digest)
        if found.is_damaged:
            raise damaged_error(digest, "it is in quarantine")

    def _find(self, namespace: str, digest: Digest) -> BlobEntry | None:
        return self.catalog.read(namespace, lambda view: view.find_blob(digest))


def not_found(digest: Digest) -> NotFound:
    return NotFound(f"there is no blob {digest}", reason="BLOB_NOT_FOUND", metadata={"digest": digest.hash})


def damaged_error(digest: Digest, why: str) -> DataLoss:
    return DataLoss(f"blob {digest} is damaged: {why}", metadata={"digest": digest.hash})
