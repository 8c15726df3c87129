"""Stores that have lived, for tests of what a recovery brings back."""

import shutil
from pathlib import Path

from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import Origin, RecoverReport, SnapshotVersion
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.recovering import recover
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Chance, Lab, publish, upload
from tests.made_models.synthetic import MIXED, SMALL, SyntheticAgent, SyntheticSnapshot

DATABASE = "kvasir.sqlite3"
OTHER_NS = "other"
MIXED_HASH = kv_identity_hash(MIXED)


def recovered(lab: Lab, *namespaces: str, disk: Disk | None = None) -> RecoverReport:
    means = Means(lab.clock, Chance(lab.chance.drawn + 1000), disk or Disk())  # type: ignore[attr-defined]
    return recover(lab.config(), means, namespaces, lambda *_: None)


class Life:
    """A store with turns, forks, rollbacks, labels, an import and garbage, and everything that it answered."""

    def __init__(self, lab: Lab) -> None:
        ada, bob = SyntheticAgent(MIXED, 1), SyntheticAgent(SMALL, 2)
        with lab.open() as store:
            for turn in range(4):
                self._publish(store, NS, "ada", ada.turn(300, is_prompt=True), turn)
            self._publish(store, NS, "ada", SyntheticAgent(SMALL, 7).turn(40), 4)
            self._publish(store, OTHER_NS, "bob", bob.turn(300), 0, Origin.IMPORT)
            self._publish(store, OTHER_NS, "bob", bob.turn(300), 1)
            store.agents.update(NS, "ada", labels={"x": "y"}, is_pinned=True, retained_versions=4)
            store.agents.fork(NS, "ada", "fork")
            store.agents.roll_back(NS, "ada", 2, MIXED_HASH)
            store.agents.fork(NS, "ada", "gone")
            store.agents.delete(NS, "gone")
            upload(store, SyntheticAgent(SMALL, 9).turn(300))
            self.lease = store.leases.acquire(NS, "ada", MIXED_HASH, "engine-1").token
            self.cursor = store.events.after(NS, None).cursor
            self.told = told(store)
            self.versions = [each for each in self.told if isinstance(each, SnapshotVersion)]
            self.bound = bound(store)
            self.root = lab.root.with_name("killed")
            shutil.copytree(lab.root, self.root)

    def _publish(
        self,
        store: Store,
        namespace: str,
        name: str,
        content: SyntheticSnapshot,
        parent: int,
        origin: Origin = Origin.TURN,
    ) -> None:
        publish(store, name, content, parent, namespace, bind_shared=True, origin=origin)


def told(store: Store) -> list[object]:
    """Everything that the store says of agents and versions but times of use, which may be lost."""
    found: list[object] = []
    for namespace in (NS, OTHER_NS):
        for agent in store.agents.page(namespace).agents:
            found.append((namespace, agent.agent_id, agent.labels, agent.is_pinned, agent.retained_versions))
            found += store.snapshots.page(namespace, agent.agent_id).snapshots
    return found


def bound(store: Store) -> list[object]:
    sql = "SELECT block_hash, blobs.hash FROM prefixes JOIN blobs ON blobs.id = blob_id ORDER BY block_hash"
    return store._core.catalog.read(NS, lambda rows: rows.all(sql))


def remove_database(root: Path) -> None:
    (root / DATABASE).unlink()


def remove_log(root: Path) -> None:
    (root / f"{DATABASE}-wal").unlink()


def remove_both(root: Path) -> None:
    remove_database(root)
    remove_log(root)
