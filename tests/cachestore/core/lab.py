"""What the store's tests share: a store on a directory, a clock that stands until it is moved, and a way to publish."""

import contextlib
import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3
from kvasir.clients.handed_files import HandedFiles
from kvasir.formats.blob_place import namespace_place
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import BlobBackend, NamespaceBlobs
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.local_directory import LocalDirectory
from cachestore_svc.config import read_settings
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import BlobKind, LeaseToken, LineQuery, Origin, SnapshotVersion, StoreConfig
from cachestore_svc.index.catalog import CatalogView
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.recovery.means import Means
from cachestore_svc.sealing.key_files import KeyFiles
from cachestore_svc.sealing.keys import MasterKey, new_record
from cachestore_svc.sealing.sealed_blobs import SealedBackend
from cachestore_svc.sealing.seals import Seals
from cachestore_svc.store.blobs import NewBlob, finish_all
from cachestore_svc.store.store import Store
from tests.made_models.synthetic import SyntheticSnapshot
from tests.running import own_notes  # noqa: F401
from tests.running.postgres import set_clock_of

NS = "default"
MIB = 1 << 20


def anybody(_: Ownership) -> None:
    """May say anything of any agent: for tests of what a word does."""


@dataclass
class Clock:
    """Unix seconds that pass only when told, and that somebody may set; and seconds that nobody sets."""

    now_s: float = 1_800_000_000.0
    set_by_s: float = 0.0
    databases: set[str] = field(default_factory=set)  # those whose clock is this one, too
    databases_set_by_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s + self.set_by_s

    def steady(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for url in self.databases:
            set_clock_of(url, self.now_s + self.databases_set_by_s)


@dataclass
class Chance:
    """Hex digits that are the same in every run."""

    drawn: int = 0

    def __call__(self, count: int) -> str:
        self.drawn += 1
        return hashlib.blake2b(str(self.drawn).encode(), digest_size=count).hexdigest()


@dataclass
class Lab:
    """A data directory that may be opened again and again."""

    root: Path
    clock: Clock = field(default_factory=Clock)
    chance: Callable[[int], str] = field(default_factory=Chance)
    kept_blobs: BlobBackend | None = None  # None: they lie in the directory
    masters: Sequence[MasterKey] = ()
    sealed: tuple[str, ...] = ()  # namespaces
    catalog: str = ""  # the database's address; "": a file in the directory

    def open(self, disk: Disk | None = None, **settings: object) -> Store:
        opened = Store.open(self.config(**settings), self.means(disk), blobs=self.kept_blobs, masters=self.masters)
        if self.has_lease_ends:
            self.clock.databases.add(self.catalog)
            self.clock.pass_s(0)
        return opened

    def means(self, disk: Disk | None = None) -> Means:
        return Means(self.clock, self.chance, disk or Disk(), self.clock.steady)

    @property
    def has_lease_ends(self) -> bool:
        """Whether the catalog knows the ends of leases, and a clock."""
        return self.catalog.startswith("postgresql:")

    def seal(self, *namespaces: str) -> "Lab":
        """The lab, in which these namespaces are sealed from their beginning."""
        if not self.masters:
            self.masters = [MasterKey(b"m" * 32, "the lab")]
        self.sealed = namespaces
        for namespace in namespaces:
            KeyFiles(self.root, Disk()).begin(new_record(namespace, self.masters[0], secrets.token_bytes, 0))
        return self

    def config(self, **settings: object) -> StoreConfig:
        """The configuration of a small store, with these settings in place of its own."""
        usual = read_settings({"data_dir": self.root, "catalog": self.catalog or None}).store_config()
        return replace(usual, **{"free_disk_reserve_bytes": 0, "ballast_bytes": 64 << 10, **settings})  # type: ignore[arg-type]

    @property
    def blobs(self) -> BlobBackend:
        """Where the store's blobs lie, whatever it is."""
        seals = Seals(KeyFiles(self.root, Disk()).read(), self.masters)
        kept = self.kept_blobs or LocalDirectory(self.root / "namespaces", Disk())
        return SealedBackend(kept, seals, secrets.token_bytes)

    @property
    def stored_hashes(self) -> list[str]:
        """Hashes of all blobs that lie there, once for each namespace."""
        return [hash_ for each in self._namespaces for hash_ in each.list().blobs]

    @property
    def part_hashes(self) -> list[str]:
        """Hashes of the blobs that are not whole yet."""
        return [hash_ for each in self._namespaces for hash_ in each.list().parts]

    @property
    def _namespaces(self) -> "list[NamespaceBlobs]":
        """The blobs of each namespace, under the names that its readers know."""
        sealed = {namespace_place(name): self.blobs.of(name) for name in self.sealed}
        return [sealed.get(each.place, each) for each in self.blobs.all()]

    def overwrite(self, digest: Digest, data: bytes, namespace: str = NS) -> None:
        """Damage a blob: let it have other bytes."""
        blobs = self.blobs.of(namespace)
        blobs.remove_part(digest.hash)
        part = blobs.begin(digest.hash)
        assert not b"".join(part.pieces())
        part.append(data)
        part.sync()
        part.close()
        blobs.publish({digest.hash: 0})
        blobs.remove_part(digest.hash)

    def file_of(self, digest: Digest, namespace: str = NS) -> Path:
        """The file of a blob, plain or sealed."""
        names = Seals(KeyFiles(self.root, Disk()).read(), self.masters).names_of(namespace)
        hash_ = names.digest(digest).hash
        return self.directory_of(namespace) / "blobs" / hash_[:2] / hash_

    def directory_of(self, namespace: str) -> Path:
        return self.root / "namespaces" / blake3(namespace.encode()).hexdigest()[:32]

    @property
    def blob_files(self) -> dict[str, Path]:
        """Every blob's file by its hash, over all namespaces."""
        return {path.name: path for path in self.root.glob("namespaces/*/blobs/??/*") if path.suffix != ".part"}


def run_sql(lab: Lab, *statements: str) -> None:
    """Change the database of a store that is closed."""
    connection = sqlite3.connect(lab.root / "kvasir.sqlite3")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def write(store: Store, digest: Digest, data: bytes, kind: BlobKind, namespace: str = NS, frame: int = MIB) -> None:
    """Send one blob in frames, from where an earlier try stopped."""
    with store.blobs.open_writer(namespace, digest, kind) as writer:
        while writer.received_bytes < len(data):
            start = writer.received_bytes
            writer.write(start, data[start : start + frame])
        writer.finish()


def hand(store: Store, digest: Digest, token: str, namespace: str = NS) -> None:
    """Let the store take a file that lies in its directory for them."""
    [writer] = store.blobs.open_writers(namespace, [NewBlob(digest, BlobKind.TENSORS, token)])
    if isinstance(writer, Exception):
        raise writer
    with writer:
        writer.finish()


def hand_all(lab: Lab, store: Store, snapshot: SyntheticSnapshot, namespace: str = NS) -> None:
    """Write a turn's blobs as an engine on the store's host does: as files, which the store takes as one group, with
    the manifest; and send those that it does not take."""
    files, blobs, manifest = HandedFiles(lab.root, namespace), snapshot.new_blobs, snapshot.manifest_digest
    if store.blobs.receive_files(namespace):
        missing = store.blobs.find_missing(namespace, list(blobs))
        tokens = [files.new_token() for _ in missing]
        for digest, token in zip(missing, tokens, strict=True):
            files.write(token, blobs[digest])
        new = [NewBlob(manifest, BlobKind.MANIFEST, comes_whole=True, data=snapshot.manifest_bytes)]
        new += [NewBlob(digest, BlobKind.TENSORS, token) for digest, token in zip(missing, tokens, strict=True)]
        with contextlib.ExitStack() as exits:
            opened = store.blobs.open_writers(namespace, new)
            writers = [exits.enter_context(each) for each in opened if not isinstance(each, Exception)]
            finish_all(writers)
        for token in tokens:
            files.forget(token)
    write_all(store, blobs, namespace)


def write_all(store: Store, blobs: Mapping[Digest, bytes], namespace: str = NS) -> None:
    for digest in store.blobs.find_missing(namespace, list(blobs)):
        write(store, digest, blobs[digest], BlobKind.TENSORS, namespace)


def upload(store: Store, snapshot: SyntheticSnapshot, namespace: str = NS) -> None:
    """Write what a turn made, but do not commit it."""
    write_all(store, snapshot.new_blobs, namespace)
    write(store, snapshot.manifest_digest, snapshot.manifest_bytes, BlobKind.MANIFEST, namespace)


def publish(
    store: Store,
    agent_id: str,
    snapshot: SyntheticSnapshot,
    parent_version: int,
    namespace: str = NS,
    lease: LeaseToken | None = None,
    bind_shared: bool = False,
    origin: Origin = Origin.TURN,
    base_version: int = 0,
) -> SnapshotVersion:
    """What an engine does at the end of a turn."""
    upload(store, snapshot, namespace)
    digest = snapshot.manifest_digest
    terms = CommitTerms(lease, origin, bind_shared=bind_shared, base_version=base_version)
    return store.snapshots.commit(namespace, agent_id, digest, parent_version, terms)


def prefix_of(store: Store, namespace: str, kv_hash: str, block_hashes: Sequence[str]) -> list[Digest]:
    """Digests of the longest stored, shareable prefix of a chain, of the layers that keep all tokens."""
    return list(store.prefixes.find(namespace, kv_hash, block_hashes).blocks_of(0))


def damaged(store: Store, namespace: str = NS) -> list[Digest]:
    """Blobs in quarantine."""
    return store._core.catalog.read(namespace, lambda view: view.damaged_blobs())


def snapshot_digests(
    store: Store, namespace: str, agent_id: str, kv_identity_hash: str | None = None, version: int | None = None
) -> list[Digest]:
    """The blobs that a version holds, in its manifest's order. Raises NotFound."""

    def work(view: CatalogView) -> list[Digest]:
        snapshot, _ = view.get_snapshot(LineQuery(agent_id, kv_identity_hash), version)
        return [digest for _, digest in view.named_after(snapshot.manifest, -1, 1_000_000)]

    return store._core.catalog.read(namespace, work)


def assert_restores(store: Store, snapshot: SnapshotVersion, expected: SyntheticSnapshot, namespace: str = NS) -> None:
    """The version is whole: its manifest's bytes are those published, and every blob can be read."""
    assert bytes(store.blobs.read(namespace, snapshot.manifest)) == expected.manifest_bytes
    digests = snapshot_digests(store, namespace, snapshot.agent_id, snapshot.kv_identity_hash, snapshot.version)
    assert digests == expected.digests
    for digest in digests:
        assert Digest.of(store.blobs.read(namespace, digest)) == digest
