"""The port to the index. An operation is a function that the catalog runs in a transaction of one namespace, with a
`CatalogView` or a `CatalogChange`: it takes effect as a whole or not at all. tests/cachestore/any_backend has every
implementation.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from cachestore_svc.index.ports.agents import AgentsChange, AgentsView
from cachestore_svc.index.ports.blobs import BlobsChange, BlobsView
from cachestore_svc.index.ports.history import HistoryChange, HistoryView
from cachestore_svc.index.ports.rights import RightsChange, RightsView
from cachestore_svc.index.ports.upkeep import UpkeepChange, UpkeepView
from cachestore_svc.journal.journal import Journal
from cachestore_svc.sealing.sealed_names import PlainNames

_Answer = TypeVar("_Answer")
HOUSE = ""  # The store's own operations: opening, checking, collecting everywhere. No credential has this namespace.
# Work on thousands of blobs is done in operations of this many each (a millisecond or two), so that other namespaces'
# operations come in between.
SLICE = 500


class CatalogView(BlobsView, AgentsView, RightsView, UpkeepView, HistoryView, Protocol):
    """What an operation may read. A namespace that holds nothing answers as an empty one."""


class CatalogChange(BlobsChange, AgentsChange, RightsChange, UpkeepChange, HistoryChange, CatalogView, Protocol):
    """What an operation may read and write. Nothing of it is visible before all of it is durable."""

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` on the catalog's thread once the operation is durable; it must be quick and must not raise."""


class Catalog(Protocol):
    """Runs operations: namespaces in turn, each one's in order. A read sees every acknowledged write, and no other."""

    is_migrated: bool  # opening it changed its form

    def read(self, namespace: str, work: Callable[[CatalogView], _Answer]) -> _Answer:
        """The answer of `work` about the namespace (HOUSE: about the store itself)."""

    def write(self, namespace: str, work: Callable[[CatalogChange], _Answer], *, frees_space: bool = False) -> _Answer:
        """The answer of `work`, once it is durable. All of it took effect, or, when this raises, nothing. `work` may
        run twice, so it touches nothing else. `frees_space` lets it use the ballast of a full disk.
        """

    def write_later(self, namespace: str, work: Callable[[CatalogChange], None]) -> None:
        """Write without waiting and without an answer; for what may be lost, such as times of last use."""

    def record_with(self, journal: Journal) -> None:
        """From now on write to the journal what each commit changes of agents and versions, before it commits."""

    def seal(self, names_of: Callable[[str], PlainNames]) -> None:
        """From now on what a sealed namespace asks has plain names, and its entries have sealed ones."""

    def keep_out(self, damage: Mapping[str, str]) -> None:
        """From now on refuse all that these namespaces ask: their entries are damaged, in these words."""

    @property
    def damage(self) -> Mapping[str, str]:
        """Namespaces whose entries are damaged, and how."""

    def rebuild_indexes(self) -> None:
        """Rebuild look-ups from the tables. Raises DataLoss when these contradict themselves."""

    def close(self) -> bool:
        """Finish the operations that wait. False when it was closed before."""
