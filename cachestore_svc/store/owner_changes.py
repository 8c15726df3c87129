"""How a fact about an agent's owner changes: each step is one transaction, and is durable on return."""

from collections.abc import Callable

from kvasir.errors import ResourceExhausted
from kvasir.names import check_agent_id

from cachestore_svc.core.core import Core
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import AgentUpdated
from cachestore_svc.index.catalog import CatalogChange


class OwnerChanges:
    def __init__(self, core: Core) -> None:
        self._core = core

    def step(self, namespace: str, agent_id: str, step: Callable[[Ownership, int], Ownership]) -> Ownership:
        """Note the fact that follows from the known one and the time."""
        check_agent_id(agent_id)

        def work(change: CatalogChange) -> Ownership:
            new = step(change.ownership_of(agent_id), self._core.now_unix_ms())
            self.note(change, namespace, agent_id, new)
            return new

        return self._core.write(namespace, work, frees_space=True)

    def note(self, change: CatalogChange, namespace: str, agent_id: str, known: Ownership) -> None:
        """Write the fact within an operation, and an event of it."""
        if known != change.ownership_of(agent_id):
            change.set_ownership(agent_id, known)
            self._core.report(change, namespace, [AgentUpdated(agent_id)])

    def check_disk(self) -> None:
        """A peer's word is written beside what must stay free. Raises ResourceExhausted (DISK_FULL)."""
        if self._core.space.is_disk_full:
            text = "disk: no room for a peer's word beside what must stay free"
            raise ResourceExhausted(text, reason="DISK_FULL", retry_after_s=60)
