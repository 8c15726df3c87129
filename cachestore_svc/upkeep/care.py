"""The work that a store does for itself, by order of its owner or a timer."""

from collections.abc import Iterator

from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id

from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import CheckReport, GcReport, VerifyProgress
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.upkeep import check, collecting, expiring
from cachestore_svc.upkeep.expiring import ClockReading
from cachestore_svc.upkeep.scrubbing import Scrubbing


class Care:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.scrubbing = Scrubbing(core)  # where the scrub in the background is

    def verify(self, namespace: str, agent_id: str | None = None) -> Iterator[VerifyProgress]:
        """Re-hash the blobs of an agent or of the namespace; the damaged are quarantined. Raises NotFound."""
        if agent_id is not None:
            check_agent_id(agent_id)

        def work(view: CatalogView) -> list[Digest]:
            return view.whole_blobs() if agent_id is None else view.held_digests(agent_id)

        return check.verify(self._core, namespace, self._core.read(namespace, work))

    def scrub(self) -> Iterator[VerifyProgress]:
        """`verify` for every namespace in turn but shut ones: without a key their bytes prove nothing."""
        for namespace in self._core.open_namespaces():
            yield from self.verify(namespace)

    def known_damage(self) -> Iterator[Digest]:
        """Blobs that were found damaged, and that nobody has stored again since; of every open namespace."""
        for namespace in self._core.open_namespaces():
            yield from self._core.read(namespace, lambda view: view.damaged_blobs())

    def collect_garbage(self, namespace: str | None = None, dry_run: bool = False) -> GcReport:
        """Mark unreferenced blobs and sweep those that rested a grace period; None: in every namespace."""
        return collecting.collect(self._core, namespace, dry_run)

    def collect_own(self) -> None:
        """Collect parts and asides of this store, of which others over the catalog do not know."""
        collecting.collect_own(self._core)

    def expire_agents(self, now: ClockReading) -> int:
        """Delete agents unused for longer than they may be; how many. Called regularly, by one thread."""
        return expiring.expire(self._core, now)

    def check(self, repair: bool = False) -> CheckReport:
        """Walk index and files both ways, in every namespace; `repair` fixes as much as it can."""
        return check.check(self._core, repair)
