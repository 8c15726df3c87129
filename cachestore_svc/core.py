"""What the parts of an open store share, and what they all do to a blob: read, quarantine, remove its file."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvasir.errors import DataLoss, NotFound, ResourceExhausted, Unavailable
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.blob_files import BlobFiles, Damaged
from cachestore_svc.blobs.blob_writer import Writers
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.space import Space
from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.index.sqlite import blob_rows, garbage
from cachestore_svc.index.sqlite.events import History
from cachestore_svc.index.sqlite.index import HOUSE, Index, Rows
from cachestore_svc.journal.journal import Journal
from cachestore_svc.records import BlobDamaged, EventBody, StoreConfig


class Counters:
    """Counts since start, per namespace. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, namespace: str, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[namespace][name] += count

    def of(self, namespace: str) -> dict[str, int]:
        with self._lock:
            return dict(self._counts[namespace])


@dataclass
class Watchers:
    """Who wants to be woken by events. Used from any thread."""

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
            # An event loop that closed has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                callback(namespace)


@dataclass(frozen=True)
class Core:
    """The one of each thing that an open store has."""

    config: StoreConfig
    disk: Disk
    ballast: Ballast
    index: Index
    files: BlobFiles
    space: Space
    writers: Writers
    history: History
    journal: Journal
    now_unix_ms: Callable[[], int]
    leases: LiveLeases
    counters: Counters = field(default_factory=Counters)
    watchers: Watchers = field(default_factory=Watchers)

    @property
    def grace_ms(self) -> int:
        return int(self.config.grace_period_s * 1000)

    def sound_namespaces(self) -> list[str]:
        """Those whose rows can be trusted."""
        names = self.index.read(HOUSE, blob_rows.namespaces)
        return [name for name in names if name not in self.index.damage]

    def known_namespaces(self) -> set[str]:
        """Those, and those that are kept out because their rows are damaged."""
        return {*self.index.read(HOUSE, blob_rows.namespaces), *self.index.damage}

    def tell(self, rows: Rows, namespace: str, bodies: Iterable[EventBody]) -> None:
        """Write events, and wake their watchers once they are durable."""
        namespace_id = blob_rows.make_namespace(rows, namespace)
        for body in bodies:
            self.history.append(rows, namespace_id, body, self.now_unix_ms())
        rows.after_commit(lambda: self.watchers.wake(namespace))

    def promised(self, namespace: str, find: Callable[[Rows, int], list[blob_rows.BlobRow]]) -> list[blob_rows.BlobRow]:
        """The whole blobs that `find` finds in the namespace, kept for a grace period from now because a caller is told
        that they are here. Writes only when an earlier promise is not fresh enough.

        One operation of the index: whoever looks for thousands asks in slices of SLICE.
        """
        now = self.now_unix_ms()

        def find_whole(rows: Rows) -> list[blob_rows.BlobRow]:
            return [blob for blob in find(rows, blob_rows.find_namespace(rows, namespace)) if not blob.is_damaged]

        def find_and_promise(rows: Rows) -> list[blob_rows.BlobRow]:
            found = find_whole(rows)
            blob_rows.promise(rows, [blob.id for blob in found], now)
            return found

        found = self.index.read(namespace, find_whole)
        if any(garbage.needs_promise(blob.promised_unix_ms, now, self.grace_ms) for blob in found):
            return self.index.write(namespace, find_and_promise, frees_space=True)
        return found

    def read_blob(self, namespace: str, digest: Digest) -> memoryview:
        """See cachestore_svc.store.Store.read_blob."""
        data = self.verified(namespace, digest)
        self.counters.add(namespace, "blobs_read")
        self.counters.add(namespace, "bytes_read", digest.size_bytes)
        return data

    def verified(self, namespace: str, digest: Digest) -> memoryview:
        """As read_blob, but not counted as served."""
        self._listed_whole(namespace, digest)
        try:
            return self.files.read(namespace, digest)
        except (FileNotFoundError, Damaged):
            # Since the look-up it may have been swept, and written again: what is there now decides.
            with self.files.naming(namespace, digest.hash):
                return self._read_or_quarantine(namespace, digest)

    def _read_or_quarantine(self, namespace: str, digest: Digest) -> memoryview:
        """Read while nobody can give the name to another file or take it away."""
        self._listed_whole(namespace, digest)
        try:
            return self.files.read(namespace, digest)
        except FileNotFoundError:
            raise self._found_damaged(namespace, digest, "its file is missing") from None
        except Damaged as error:
            raise self._found_damaged(namespace, digest, str(error)) from error

    def quarantine(self, namespace: str, digests: Iterable[Digest]) -> None:
        """Never serve these again until they are written anew; each is told once."""
        wanted = list(digests)

        def work(rows: Rows) -> None:
            namespace_id = blob_rows.find_namespace(rows, namespace)
            new = [digest for digest in wanted if blob_rows.set_damaged(rows, namespace_id, digest, True)]
            self.tell(rows, namespace, [BlobDamaged(digest) for digest in new])

        if wanted:
            self.index.write(namespace, work, frees_space=True)
            self.counters.add(namespace, "blobs_damaged", len(wanted))

    def remove_files(self, namespace: str, digests: Iterable[Digest]) -> int:
        """Remove the files of blobs whose rows are gone; bytes freed. One that was written again meanwhile stays."""
        freed = 0
        for digest in digests:
            with self.files.naming(namespace, digest.hash):
                self.space.freed(namespace, digest.size_bytes)
                if self._find(namespace, digest) is None:
                    try:
                        self.files.remove(namespace, digest.hash)
                    except OSError:
                        # Unlisted already: the sweep at the next start tries again.
                        self.counters.add(namespace, "files_not_removed")
            freed += digest.size_bytes
        return freed

    def _found_damaged(self, namespace: str, digest: Digest, why: str) -> DataLoss:
        # Where not even that can be written, the bytes are not served all the same, and the next reader tells it again.
        with contextlib.suppress(ResourceExhausted, Unavailable):
            self.quarantine(namespace, [digest])
        return damaged_error(digest, why)

    def _listed_whole(self, namespace: str, digest: Digest) -> None:
        found = self._find(namespace, digest)
        if found is None:
            raise not_found(digest)
        if found.is_damaged:
            raise damaged_error(digest, "it is in quarantine")

    def _find(self, namespace: str, digest: Digest) -> blob_rows.BlobRow | None:
        return self.index.read(
            namespace, lambda rows: blob_rows.find_blob(rows, blob_rows.find_namespace(rows, namespace), digest)
        )


def not_found(digest: Digest) -> NotFound:
    return NotFound(f"there is no blob {digest}", reason="BLOB_NOT_FOUND", metadata={"digest": digest.hash})


def damaged_error(digest: Digest, why: str) -> DataLoss:
    return DataLoss(f"blob {digest} is damaged: {why}", metadata={"digest": digest.hash})
