"""Owners of agents: what is known of them, claims, and what peers report. `facts.ownership` has the steps' meaning."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from kvasir.errors import FailedPrecondition, ResourceExhausted
from kvasir.names import check_agent_id

from cachestore_svc.core.core import Core
from cachestore_svc.facts import ownership
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import AgentUpdated
from cachestore_svc.index.catalog import CatalogChange, CatalogView
from cachestore_svc.pairing.rights import May
from cachestore_svc.store.leases import Leases


class OwnerChanges:
    def __init__(self, core: Core) -> None:
        self._core = core

    def step(self, namespace: str, agent_id: str, step: Callable[[Ownership, int], Ownership]) -> Ownership:
        check_agent_id(agent_id)

        def work(change: CatalogChange) -> Ownership:
            new = step(change.ownership_of(agent_id), self._core.now_unix_ms())
            self.note(change, namespace, agent_id, new)
            return new

        return self._core.write(namespace, work, frees_space=True)

    def note(self, change: CatalogChange, namespace: str, agent_id: str, known: Ownership) -> None:
        if known != change.ownership_of(agent_id):
            change.set_ownership(agent_id, known)
            self._core.report(change, namespace, [AgentUpdated(agent_id)])

    def check_disk(self) -> None:
        """A peer's word is written beside what must stay free. Raises ResourceExhausted (DISK_FULL)."""
        if self._core.space.is_disk_full:
            text = "disk: no room for a peer's word beside what must stay free"
            raise ResourceExhausted(text, reason="DISK_FULL", retry_after_s=60)


class Owners:
    def __init__(self, core: Core, leases: Leases, changes: OwnerChanges) -> None:
        self._core = core
        self._leases = leases
        self._changes = changes

    def of(self, namespace: str, agent_id: str) -> Ownership:
        """What this store knows of an agent's owner. The agent need not exist."""
        check_agent_id(agent_id)
        return self._core.read(namespace, lambda view: view.ownership_of(agent_id))

    def unfinished(self) -> list[tuple[str, str, Ownership]]:
        """Namespace, agent and fact of all that are on their way, or whose owner must still be announced."""
        return self._facts(lambda view: view.unfinished_moves())

    def known(self) -> list[tuple[str, str, Ownership]]:
        """Namespace, agent and fact of all agents that ever changed hands, also of those that are gone."""
        return self._facts(lambda view: view.owners())

    def rename_peers(self, names: Mapping[str, str]) -> None:
        """Call peers by their new names in all that is known of owners. `names`: new ones by the old."""
        for namespace, agent_id, known in self.known():
            if ownership.renamed(known, names) != known:
                self._changes.step(namespace, agent_id, lambda known, _: ownership.renamed(known, names))

    def claim(
        self,
        namespace: str,
        agent_id: str,
        chance: int,
        above: int = 0,
        tells: Sequence[str] = (),
        expected: Ownership | None = None,
    ) -> Ownership:
        """Take over the agent from a peer that is gone, which is fenced when it hears of the claim; see
        ownership.claimed. `expected`: the fact that the claim rests on; if it has changed, nothing is done and today's
        is returned. Raises NotFound when nothing of the agent is here and nothing is known of it."""
        check_agent_id(agent_id)

        def work(change: CatalogChange) -> Ownership:
            known = change.ownership_of(agent_id)
            if known == ownership.HERE:
                change.get_agent(agent_id, self._core.config.retained_versions)
            if expected is not None and known != expected:
                return known
            new = ownership.claimed(known, chance, self._core.now_unix_ms(), above, tells)
            self._changes.note(change, namespace, agent_id, new)
            return new

        return self._core.write(namespace, work)

    def fence(self, namespace: str, agent_id: str, peer: str, generation: int, may: May) -> Ownership:
        """A peer reports that it knows an owner of this generation. Raises PermissionDenied as `may` does,
        ResourceExhausted (DISK_FULL), FailedPrecondition (OWNER_NEWER when this store knows a newer one; LEASE_HELD
        while an engine here may still extend the agent)."""

        def work(change: CatalogChange) -> Ownership:
            known = change.ownership_of(agent_id)
            may(known)
            self._changes.check_disk()
            new = ownership.fenced(agent_id, known, peer, generation, self._core.now_unix_ms())
            self._changes.note(change, namespace, agent_id, new)
            return new

        return self._leases.taking_back(namespace, agent_id, work)

    def told(self, namespace: str, agent_id: str, peer: str, generation: int) -> Ownership:
        return self._changes.step(namespace, agent_id, lambda known, _: ownership.told(known, peer, generation))

    def yield_to(self, namespace: str, agent_id: str, peer: str, told: int, generation: int, may: May) -> Ownership:
        """A peer, told of a generation, knows an owner of a newer one. Raises PermissionDenied as `may` does."""

        def work(change: CatalogChange) -> Ownership:
            known, now = change.ownership_of(agent_id), self._core.now_unix_ms()
            may(known)
            new = ownership.yielded(agent_id, known, peer, told, generation, now)
            self._changes.note(change, namespace, agent_id, new)
            return new

        return self._leases.taking_back(namespace, agent_id, work, frees_space=True)

    def _facts(self, find: Callable[[CatalogView], list[tuple[str, Ownership]]]) -> list[tuple[str, str, Ownership]]:
        found = list[tuple[str, str, Ownership]]()
        for namespace in self._core.sound_namespaces():
            with contextlib.suppress(FailedPrecondition):  # sealed, and without its key here
                found += [(namespace, *each) for each in self._core.read(namespace, find)]
        return found
