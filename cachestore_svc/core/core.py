"""The state that the parts of an open store share."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from kvasir.names import check_namespace

from cachestore_svc.blobs.backend import Aside, BlobBackend
from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.blob_writer import Writers
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.space import Space
from cachestore_svc.core.early_commits import EarlyCommits
from cachestore_svc.facts.records import EventBody, StoreConfig
from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogChange, CatalogView, LeaseEnds
from cachestore_svc.index.write_budget import WriteBudget
from cachestore_svc.journal.journal import Journal
from cachestore_svc.sealing.seals import Seals

Answer = TypeVar("Answer")


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, namespace: str, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[namespace][name] += count

    def of_all(self) -> Counter[str]:
        with self._lock:
            return sum(self._counts.values(), Counter[str]())

    def of(self, namespace: str) -> dict[str, int]:
        with self._lock:
            return dict(self._counts[namespace])


class Watchers:
    """Callbacks, each for a namespace, or for a name in it. A key that nobody watches takes no memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[tuple[str, ...], list[Callable[[], object]]] = {}

    @contextlib.contextmanager
    def watching(self, key: tuple[str, ...], callback: Callable[[], object]) -> Iterator[None]:
        """For this time `callback` is called, on any thread, whenever the key is woken."""
        with self._lock:
            self._callbacks.setdefault(key, []).append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks[key].remove(callback)
                if not self._callbacks[key]:
                    del self._callbacks[key]

    def wake(self, *key: str) -> None:
        """Call the callbacks of a key; of all keys if it is empty."""
        with self._lock:
            woken = [self._callbacks.get(key, [])] if any(key) else self._callbacks.values()
            callbacks = [callback for each in woken for callback in each]
        for callback in callbacks:
            # An event loop that closed has no watchers left.
            with contextlib.suppress(RuntimeError):
                callback()


@dataclass(frozen=True)
class Storage:
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
    journal: Journal | None  # of a catalog that is a file; a server looks after its own
    now_unix_ms: Callable[[], int]
    leases: LeaseEnds
    write_budget: WriteBudget
    counters: Counters = field(default_factory=Counters)
    watchers: Watchers = field(default_factory=Watchers)  # of events
    released: Watchers = field(default_factory=Watchers)  # leases, by namespace and agent
    early_commits: EarlyCommits = field(default_factory=EarlyCommits)
    asides: set[Aside] = field(default_factory=set)  # bytes that were set aside, now or before the start

    @property
    def grace_ms(self) -> int:
        return int(self.config.grace_period_s * 1000)

    def check_open(self, namespace: str) -> None:
        """Raises InvalidArgument for no namespace, FailedPrecondition (NAMESPACE_SEALED) for one that no key opens."""
        check_namespace(namespace)
        self.seals.check_open(namespace)

    def read(self, namespace: str, work: Callable[[CatalogView], Answer]) -> Answer:
        self.check_open(namespace)
        return self.catalog.read(namespace, work)

    def write(self, namespace: str, work: Callable[[CatalogChange], Answer], *, frees_space: bool = False) -> Answer:
        self.check_open(namespace)
        return self.catalog.write(namespace, work, frees_space=frees_space)

    def sound_namespaces(self) -> list[str]:
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
        change.add_events(self.config.event_history, bodies, self.now_unix_ms())
        change.after_commit(lambda: self.watchers.wake(namespace))
