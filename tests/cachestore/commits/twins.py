"""Two stores of one past, of which one knows no manifest: all that they answer and write is compared."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError

from cachestore_svc.blobs.known_manifests import KnownManifests
from cachestore_svc.index.catalog import HOUSE, CatalogView
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.store.store import Store
from tests.cachestore.any_backend.memory_blobs import MemoryBlobs
from tests.cachestore.core.lab import Lab, upload
from tests.made_models.synthetic import SyntheticSnapshot

PLAIN_NS, THIRD_NS, SEALED_NS = "default", "third", "other"
GRACE_S = 100.0
_OF_ONE_STORE = {"writers", "jobs", "inode"}  # tables and facts


@dataclass
class Twins:
    """Two stores of one past. The first one knows manifests of any length."""

    labs: Sequence[Lab]
    stores: list[Store] = field(default_factory=list)

    def open(self) -> None:
        for lab, least_tokens in zip(self.labs, (0, 1 << 30), strict=True):
            store = lab.open(grace_period_s=GRACE_S, retained_versions=3, evict_heads=True)
            store.snapshots._manifests = KnownManifests(least_tokens)
            self.stores.append(store)

    def close(self) -> None:
        while self.stores:
            self.stores.pop().close()

    def both(self, act: Callable[[Lab, Store], object]) -> object:
        """What both answered, or how both refused."""
        one, other = (_outcome(act, lab, store) for lab, store in zip(self.labs, self.stores, strict=True))
        assert one == other, (one, other)
        return one

    def commit(
        self, name: str, content: SyntheticSnapshot, parent: int, terms: CommitTerms, namespace: str = PLAIN_NS
    ) -> object:
        self.both(lambda _, store: upload(store, content, namespace))
        digest = content.manifest_digest
        return self.both(lambda _, store: store.snapshots.commit(namespace, name, digest, parent, terms))

    def compare(self) -> None:
        known, looked_up = map(tables, self.stores)
        different = {name: {*rows} ^ {*looked_up[name]} for name, rows in known.items() if rows != looked_up[name]}
        assert not different, different
        blobs, others = (sorted(lab.stored_hashes) for lab in self.labs)
        assert blobs == others


def _outcome(act: Callable[[Lab, Store], object], lab: Lab, store: Store) -> object:
    try:
        return act(lab, store)
    except KvasirError as error:
        return type(error).__name__, error.reason, str(error), dict(error.metadata)


def tables(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables."""

    def read(view: CatalogView) -> dict[str, list[tuple[Any, ...]]]:
        names = "SELECT name FROM sqlite_master WHERE type = 'table'"
        if store._core.journal is None:
            names = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"
        found = {name: view.all(f"SELECT * FROM {name}") for (name,) in view.all(names) if name not in _OF_ONE_STORE}
        return {
            name: sorted((row for row in rows if row[0] not in _OF_ONE_STORE), key=repr) for name, rows in found.items()
        }

    return store._core.catalog.read(HOUSE, read)


def twins_on(root: Path, new_catalog: Callable[[], str] = str) -> Twins:
    one = Lab(root / "one", kept_blobs=MemoryBlobs(), catalog=new_catalog()).seal(SEALED_NS)
    shutil.copytree(one.root, root / "other")  # with the same key
    other = Lab(root / "other", kept_blobs=MemoryBlobs(), catalog=new_catalog(), masters=one.masters, sealed=one.sealed)
    return Twins([one, other])
