"""The work that a store does for itself, by order of its owner or a timer."""

import contextlib
from collections.abc import Iterable, Iterator
from operator import itemgetter

from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id

from cachestore_svc.blobs.backend import Damaged
from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import CheckReport, GcReport, VerifyProgress
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.upkeep import check, collecting, expiring
from cachestore_svc.upkeep.expiring import ClockReading
from cachestore_svc.upkeep.scrubbing import Scrubbing

_USED_LAST = 1000  # of all namespaces: to find the blobs of each takes the interpreter a quarter of a millisecond


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

    def used_last(self) -> list[tuple[str, Digest, int]]:
        """The newest versions in all open namespaces, last used first: namespace, manifest, bytes of all its blobs."""
        found = list[tuple[int, str, Digest, int]]()
        for namespace in self._core.open_namespaces():
            with contextlib.suppress(KvasirError):  # it cannot be read now
                used = self._core.read(namespace, lambda view: view.used_last(_USED_LAST))
                found += [(used_ms, namespace, manifest, size) for used_ms, manifest, size in used]
        return [each[1:] for each in sorted(found, key=itemgetter(0), reverse=True)[:_USED_LAST]]

    def read_ahead(self, blobs: Iterable[tuple[str, Digest]]) -> int:
        """Have the system read blobs from the disk; how many bytes. It verifies nothing: their readers do."""
        read_bytes = 0
        for namespace, digest in blobs:
            with contextlib.suppress(OSError, Damaged, KvasirError):
                read_bytes += len(self._core.blobs.of(namespace).bytes_of(digest.hash, digest.size_bytes))
        return read_bytes

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
