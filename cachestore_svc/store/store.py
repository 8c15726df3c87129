"""The cache store: agents' memories by name, in one data directory. Start reading here. A blob is written once and
named by its bytes; a snapshot is visible once its manifest commits. Operations act in one namespace, block, may be
called from any thread, and raise the types of `kvasir.errors`.
"""

from collections.abc import Sequence
from typing import Self

from cachestore_svc.blobs.backend import BlobBackend
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.opening import Opened, open_directory
from cachestore_svc.sealing.keys import MasterKey
from cachestore_svc.store.agents import Agents
from cachestore_svc.store.blobs import Blobs
from cachestore_svc.store.events import Events
from cachestore_svc.store.leases import Leases
from cachestore_svc.store.move_steps import MoveSteps
from cachestore_svc.store.owners import OwnerChanges, Owners
from cachestore_svc.store.prefixes import Prefixes
from cachestore_svc.store.snapshots import Snapshots
from cachestore_svc.upkeep.care import Care
from cachestore_svc.upkeep.statistics import Statistics


class Store:
    """An open store. Everything that the service serves, below gRPC, is an operation of one of its parts."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._core = core = opened.core
        self.blobs = Blobs(core)
        self.prefixes = Prefixes(core)
        self.leases = Leases(core)
        self.snapshots = Snapshots(core, self.leases)
        self.agents = Agents(core, self.leases)
        changes = OwnerChanges(core)
        self.owners = Owners(core, self.leases, changes)
        self.moves = MoveSteps(core, self.leases, changes)
        self.events = Events(core)
        self.care = Care(core)
        self.statistics = Statistics(core)

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        means: Means,
        *,
        sweeps: bool = True,
        blobs: BlobBackend | None = None,
        masters: Sequence[MasterKey] = (),
    ) -> "Store":
        """Lock the data directory, bring its database to today's form, and, if it `sweeps`, remove what a crash left.
        `blobs` keeps the blobs' bytes; None: files in the data directory. `masters`: the keys that open sealed
        namespaces; a namespace that none of them opens refuses every request. Raises Unavailable (LOCKED, with the pid
        that holds it) and FailedPrecondition (DATA_TOO_NEW; INDEX_MISSING: there are blobs but no database).
        """
        return cls(open_directory(config, means, blobs, masters, sweeps=sweeps))

    def close(self) -> None:
        """Finish what is queued, then let go of the data directory. Further calls raise Unavailable."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def grace_period_s(self) -> float:
        """How long a blob that nothing names stays after a caller relied on it."""
        return self._core.config.grace_period_s

    @property
    def sealed_namespaces(self) -> tuple[str, ...]:
        return self._core.seals.namespaces

    @property
    def is_shared(self) -> bool:
        """Whether another store may write the same catalog."""
        return self._core.catalog.is_shared

    def has_job(self, name: str) -> bool:
        """Whether this store does this work of the background, for some time from now on. Raises Unavailable."""
        return self._core.catalog.has_job(name)

    def is_sealed(self, namespace: str) -> bool:
        return self._core.seals.key_of(namespace) is not None
