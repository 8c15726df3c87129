"""Agents: listed, changed, forked, rolled back, deleted. One that is another store's can be read, forked and deleted
here; all that extends or changes it raises FailedPrecondition (AGENT_MOVED, AGENT_MOVING)."""

from collections.abc import Mapping
from dataclasses import replace

from kvasir.names import check_agent_id

from cachestore_svc.core.core import Core
from cachestore_svc.facts import records
from cachestore_svc.facts.limits import check_labels, check_query, check_range, check_text
from cachestore_svc.facts.ownership import FIRST_MOVE, check_stays_itself, check_writable
from cachestore_svc.index import listing
from cachestore_svc.index.catalog import CatalogChange, CatalogView
from cachestore_svc.index.values import AgentFilter, gone_by
from cachestore_svc.store.leases import Leases
from cachestore_svc.upkeep import expiring


class Agents:
    def __init__(self, core: Core, leases: Leases) -> None:
        self._core = core
        self._leases = leases

    def page(
        self,
        namespace: str,
        page_size: int = 0,
        page_token: str = "",
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> records.AgentPage:
        """Agents by name, those that have all the labels. Raises InvalidArgument (token, page size)."""
        self._core.check_open(namespace)
        check_text(name_prefix, "name_prefix")
        check_labels(labels or {})
        wanted = AgentFilter(name_prefix, labels or {})
        kept = self._core.config.retained_versions
        size = listing.page_size(page_size)
        page = listing.agents_page(self._core.catalog, namespace, wanted, size, page_token, kept)
        return records.AgentPage(tuple(self._expiring(namespace, agent) for agent in page.agents), page.next_page_token)

    def get(self, namespace: str, agent_id: str) -> records.AgentRecord:
        check_agent_id(agent_id)
        return self._expiring(namespace, self._core.read(namespace, lambda view: self._record(view, agent_id)))

    def update(
        self,
        namespace: str,
        agent_id: str,
        labels: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
        retained_versions: int | None = None,
        *,
        replaces_labels: bool = False,
    ) -> records.AgentRecord:
        """Change what is given; an empty label (with `replaces_labels` an absent one) goes. Raises NotFound."""
        check_agent_id(agent_id)
        check_labels(labels or {})
        if retained_versions is not None:
            check_range("retained_versions", retained_versions, 1, records.MAX_RETAINED_VERSIONS)

        def work(change: CatalogChange) -> records.AgentRecord:
            check_writable(agent_id, change.ownership_of(agent_id))
            before = self._record(change, agent_id).labels
            check_stays_itself(before, labels or {})
            removed = dict.fromkeys(before.keys() - {FIRST_MOVE}, "") if replaces_labels else {}
            change.update_agent(agent_id, {**removed, **(labels or {})}, is_pinned, retained_versions)
            self._core.report(change, namespace, [records.AgentUpdated(agent_id)])
            return self._record(change, agent_id)

        return self._expiring(namespace, self._core.write(namespace, work))

    def fork(
        self,
        namespace: str,
        source_agent_id: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        version: int | None = None,
    ) -> records.AgentRecord:
        """Start an agent with versions of another. Raises NotFound, AlreadyExists, FailedPrecondition (LEASE_HELD)."""
        source = check_query(source_agent_id, kv_identity_hash)

        def work(change: CatalogChange) -> records.AgentRecord:
            check_writable(agent_id, change.ownership_of(agent_id))
            made = change.fork_agent(source, agent_id, version, self._core.now_unix_ms())
            self._core.report(change, namespace, [records.Committed(snapshot) for snapshot in made])
            return self._record(change, agent_id)

        return self._leases.taking_back(namespace, agent_id, work)

    def roll_back(
        self,
        namespace: str,
        agent_id: str,
        version: int,
        kv_identity_hash: str | None = None,
        expected_head: int | None = None,
    ) -> records.SnapshotVersion:
        """Make an old version the newest again, as a new one. Raises NotFound, Conflict, FailedPrecondition."""
        query = check_query(agent_id, kv_identity_hash)

        def work(change: CatalogChange) -> records.SnapshotVersion:
            check_writable(agent_id, change.ownership_of(agent_id))
            retained, now = self._core.config.retained_versions, self._core.now_unix_ms()
            snapshot = change.roll_back(query, version, expected_head, retained, now)
            self._core.report(change, namespace, [records.Committed(snapshot)])
            return snapshot

        return self._leases.taking_back(namespace, agent_id, work)

    def delete(self, namespace: str, agent_id: str, force: bool = False) -> records.Deletion:
        """Forget an agent, or the copy here, with all versions. Raises NotFound, FailedPrecondition."""
        now = self._core.now_unix_ms()

        def work(change: CatalogChange) -> int:
            known = change.ownership_of(agent_id)
            if known.is_on_its_way:
                check_writable(agent_id, known)
            unshared_bytes = change.forget_agent(agent_id, force, now)
            self._core.report(change, namespace, [records.AgentDeleted(agent_id)])
            return unshared_bytes

        unshared_bytes = self._leases.taking_back(namespace, agent_id, work, frees_space=True)
        return records.Deletion(gone_by(now, self._core.grace_ms), unshared_bytes)

    def usage(self, namespace: str, agent_id: str) -> records.AgentUsage:
        """The bytes behind an agent's versions, and which of them are shared. Raises NotFound."""
        check_agent_id(agent_id)
        return self._core.read(namespace, lambda view: view.usage_of(agent_id))

    def _record(self, view: CatalogView, agent_id: str) -> records.AgentRecord:
        return view.get_agent(agent_id, self._core.config.retained_versions)

    def _expiring(self, namespace: str, agent: records.AgentRecord) -> records.AgentRecord:
        left = expiring.left_ms(agent, namespace, self._core.config)
        return agent if left is None else replace(agent, expires_unix_ms=self._core.now_unix_ms() + max(left, 0))
