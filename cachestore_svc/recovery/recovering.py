"""Rebuilds a lost index beside the old one, from the journal, the manifests and the blob files, all verified; then
replaces it. A version whose manifest is whole comes back, though a blob of it be gone: that one is in quarantine, and
engines compute it again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition
from kvasir.formats.block_file import HeaderError
from kvasir.formats.digest import Digest, is_hash
from kvasir.formats.tensor_layouts import Layout, expected_state_tensors, expected_tensors

from cachestore_svc.blobs.backend import has_any, unknown_places
from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.blobs.manifests import ManifestFacts, NamedBlob, SharedBlock
from cachestore_svc.facts.ownership import OwnerState, had_before
from cachestore_svc.facts.records import BlobKind, LostVersion, Origin, Recovered, RecoverReport, StoreConfig
from cachestore_svc.index.catalog import HOUSE, CatalogChange, SqliteCatalog
from cachestore_svc.journal import journal, journal_lines
from cachestore_svc.journal.journal import Journal
from cachestore_svc.journal.replay import Agent, Namespace, Version, VersionKey
from cachestore_svc.recovery import salvage
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.recovery.opening import DATABASE, locked
from cachestore_svc.sealing.key_files import KeyFiles
from cachestore_svc.sealing.keys import MasterKey
from cachestore_svc.sealing.sealed_blobs import SealedBackend
from cachestore_svc.sealing.sealed_names import AGENT, PlainNames
from cachestore_svc.sealing.seals import Seals

_NEW_SUFFIX = ".recovering"
_DATABASE_SUFFIXES = ("", "-wal", "-shm")
_PER_COMMIT = 200
_USUAL = ("default",)  # namespaces that a store is likely to have

Say = Callable[[str, int, int], None]


@dataclass
class _RebuiltNamespace:
    name: str
    state: Namespace
    found: salvage.Found
    manifests: set[Digest] = field(default_factory=set)
    # Not the manifests themselves: all of them together may be more than fits in memory.
    named: dict[Digest, NamedBlob] = field(default_factory=dict)
    identities: dict[str, identity_pb2.KvIdentity] = field(default_factory=dict)
    lost: list[LostVersion] = field(default_factory=list)
    named_anew: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    damaged: set[Digest] = field(default_factory=set)
    with_damaged: set[tuple[str, int]] = field(default_factory=set)


def recover(
    config: StoreConfig, means: Means, namespaces: Sequence[str], say: Say, masters: Sequence[MasterKey] = ()
) -> RecoverReport:
    """Rebuild the index and put it in place; the old one is kept beside it. `namespaces`: names that may be needed
    where no journal has them. `say` gets the item that is being read: its kind, its number, and how many there are.
    Raises Unavailable (LOCKED) and FailedPrecondition (NAMESPACE_UNKNOWN: there are blobs of a namespace without a
    name; NOTHING_TO_RECOVER; NAMESPACE_SEALED: no key opens a namespace that would be lost).
    """
    with locked(config, means.disk):
        seals = Seals(KeyFiles(config.data_dir, means.disk).read(), masters, config.sealed_namespaces)
        blobs = SealedBackend(blobs_of(config, means.disk, only_looks=True), seals, means.random_bytes)
        return _Recovery(config, means, say, blobs).run(namespaces)


class _Recovery:
    def __init__(self, config: StoreConfig, means: Means, say: Say, blobs: SealedBackend) -> None:
        self._data_dir = config.data_dir
        self._config = config
        self._now = means.now_unix_ms()
        self._disk = means.disk
        self._say = say
        self._database = config.data_dir / DATABASE
        self._log = config.data_dir / journal.NAME
        self._new_log = config.data_dir / (journal.NAME + _NEW_SUFFIX)
        self._sealed = blobs
        self._blobs = blobs.sealed
        self._store = means.token_hex(8)

    def run(self, namespaces: Sequence[str]) -> RecoverReport:
        self._end_unfinished()
        evidence = salvage.gather_evidence(self._database, self._blobs, self._disk)
        if not evidence.is_whole:
            known = {*namespaces, *_USUAL, *self._config.namespace_quota_bytes, *evidence.namespaces}
            self._check_all_named(known)
            unnamed = (name for name in sorted(known - evidence.state.keys()) if self._blobs.of(name).exists())
            evidence.state |= {name: Namespace() for name in unnamed}
            evidence.sources.append("manifests")
        if not evidence.state and not has_any(self._blobs):
            raise FailedPrecondition(f"{self._data_dir} holds nothing to recover", reason="NOTHING_TO_RECOVER")
        for name in evidence.state:
            self._sealed.seals.check_open(name)
        spaces = [self._space(name, evidence.state[name], evidence.is_whole) for name in sorted(evidence.state)]
        new = self._database.with_name(DATABASE + _NEW_SUFFIX)
        state = self._build(new, spaces)
        kept = self._put_in_place(new, state)
        return RecoverReport(" and ".join(evidence.sources), tuple(map(_report_of, spaces)), kept, evidence.is_whole)

    def _check_all_named(self, known: set[str]) -> None:
        unknown = [blobs.place for blobs in unknown_places(self._blobs, lambda: known) if blobs.list().blobs]
        if unknown:
            raise FailedPrecondition(
                f"{self._blobs.where}/{unknown[0]} holds blobs of a namespace whose name is in neither journal nor "
                "index: name it with --namespace, or move the directory away",
                reason="NAMESPACE_UNKNOWN",
            )

    # --- what there is ---

    def _space(self, name: str, state: Namespace, is_whole: bool) -> _RebuiltNamespace:
        names = self._sealed.seals.names_of(name)
        space = _RebuiltNamespace(name, state, salvage.Found(self._sealed.of(name), names))
        known = set(state.agents)
        state.owners = {
            agent: _with_had_by(facts, state.agents.get(agent), names) for agent, facts in state.owners.items()
        }
        if not is_whole:
            self._rename_lost(space)
        versions = list(_versions_of(state))
        for number, (agent, key, version) in enumerate(versions, start=1):
            self._say(f"manifests of {name}", number, len(versions))
            if problem := self._read_manifest(space, version):
                del state.agents[agent].versions[key]
                space.lost.append(LostVersion(space.found.names.open_text(agent), key[0], key[1], problem))
        state.agents = {agent: facts for agent, facts in state.agents.items() if facts.versions}
        if not is_whole:
            # Provenance is lost, so every blob counts as imported.
            state.brought, state.own_texts = {digest.hash for digest in (*space.manifests, *space.named)}, set()
            # Ownership is lost, too: an agent stays read-only until a peer confirms its owner. Agents that this
            # recovery named belong to this store.
            held = {agent: _held(state.owners.get(agent), self._now) for agent in known & state.agents.keys()}
            state.owners |= held
            space.unclaimed += [
                space.found.names.open_text(agent) for agent, facts in held.items() if facts[0] != OwnerState.MOVED
            ]
        return space

    def _rename_lost(self, space: _RebuiltNamespace) -> None:
        self._say(f"files of {space.name}", 0, 1)
        for agent, version in salvage.unnamed_versions(space.found, space.state).items():
            facts = space.found.manifest(Digest(version.manifest_hash, version.manifest_size_bytes))
            assert facts is not None
            made = version._replace(origin=int(Origin.IMPORT), created_unix_ms=self._now)
            name = space.found.names.text(AGENT, agent)
            space.state.agents[name] = Agent((0, None, self._now), {}, {(facts.kv_identity_hash, 1): made})
            space.named_anew.append(agent)

    def _read_manifest(self, space: _RebuiltNamespace, version: Version) -> str:
        """Why a version cannot come back; "" when it can."""
        if not is_hash(str(version.manifest_hash)):
            return "its manifest's digest is damaged"
        digest = Digest(version.manifest_hash, version.manifest_size_bytes)
        if digest not in space.manifests:
            facts = space.found.manifest(digest)
            if facts is None:
                return f"its manifest {digest.hash} is missing or damaged"
            space.manifests.add(digest)
            space.identities[facts.kv_identity_hash] = facts.kv_identity
            space.named |= {blob.digest: blob for blob in facts.named}
        return ""

    # --- the new index ---

    def _build(
        self, new: Path, spaces: Iterable[_RebuiltNamespace]
    ) -> "tuple[journal_lines.Position, dict[str, Namespace]]":
        for suffix in _DATABASE_SUFFIXES:
            self._disk.remove(Path(f"{new}{suffix}"))
        ballast = Ballast(self._data_dir / "ballast", 0, self._disk)
        catalog = SqliteCatalog(new, self._disk, ballast, lambda: self._now)
        try:
            for space in spaces:
                self._list_blobs(catalog, space)
                self._hold_versions(catalog, space)
            position = journal_lines.begin(self._store)
            catalog.write(HOUSE, partial(self._finish, position))
            return position, catalog.read(HOUSE, lambda view: view.state())
        finally:
            catalog.close()

    def _finish(self, position: journal_lines.Position, change: CatalogChange) -> None:
        change.set_journal_position(self._store, position)
        # No generation that was ever given may come again: they grow by one at a time, and time runs faster.
        change.set_lease_floor(self._now)

    def _list_blobs(self, catalog: SqliteCatalog, space: _RebuiltNamespace) -> None:
        digests = [*space.manifests, *space.named]
        for start in range(0, len(digests), _PER_COMMIT):
            self._say(f"blobs of {space.name}", start, len(digests))
            batch = [(digest, self._facts_of(space, digest)) for digest in digests[start : start + _PER_COMMIT]]
            catalog.write(space.name, partial(self._insert, space, batch))

    def _facts_of(self, space: _RebuiltNamespace, digest: Digest) -> BlobFacts:
        """The facts of a blob. One that is not whole is noted as damaged; its manifest then gives the facts."""
        named = space.named.get(digest)
        found = space.found.whole(digest, BlobKind.TENSORS if named else BlobKind.MANIFEST)
        if found is not None:
            return found
        assert named is not None, "manifests were read before"
        space.damaged.add(digest)
        return _as_named(named, space.identities[named.file.kv_identity_hash])

    def _insert(self, space: _RebuiltNamespace, batch: list[tuple[Digest, BlobFacts]], change: CatalogChange) -> None:
        change.add_blobs(batch, self._now)
        for digest, _ in batch:
            if digest in space.damaged:
                change.set_damaged(digest, True)
            if mark := space.state.mark_of(digest.hash):
                change.apply_changes(_cannot_read, [["brought", space.name, digest.hash, mark]])

    def _hold_versions(self, catalog: SqliteCatalog, space: _RebuiltNamespace) -> None:
        for batch in _batches(list(_versions_of(space.state))):
            catalog.write(space.name, partial(_hold, space, batch))
        for batch in _batches(list(space.state.agents.items())):
            catalog.write(HOUSE, partial(_describe, space, batch))
        facts = space.state.owners.items()
        for owners in _batches([["owner", space.name, agent, *known] for agent, known in facts]):
            catalog.write(HOUSE, lambda change, owners=owners: change.apply_changes(_cannot_read, owners))  # type: ignore[misc]

    # --- taking its place ---

    def _put_in_place(self, new: Path, built: "tuple[journal_lines.Position, dict[str, Namespace]]") -> tuple[str, ...]:
        """The database first and the journal last: until then a start refuses, and this can be done again. While the
        old database is away, the new one has its name's suffix, by which the next recovery finds it."""
        position, state = built
        log, new_log, disk = self._log, self._new_log, self._disk
        old = self._free_suffix()
        ready = new.with_name(new.name + old)
        disk.rename(new, ready)
        Journal.begin(new_log, disk, self._store, position, state).close()
        kept = [self._move_away(Path(f"{self._database}{suffix}"), old, suffix) for suffix in _DATABASE_SUFFIXES]
        disk.rename(ready, self._database)
        disk.fsync_directory(self._data_dir)
        kept.append(self._move_away(log, old, ""))
        disk.rename(new_log, log)
        disk.fsync_directory(self._data_dir)
        return tuple(name for name in kept if name)

    def _end_unfinished(self) -> None:
        """What a recovery that died had moved away is evidence for this one, too: without its new database in place the
        old one comes back, and its new journal takes its place where only that was missing."""
        disk, names = self._disk, set(self._disk.names(self._data_dir))
        for ready in (name for name in names if name.startswith(f"{DATABASE}{_NEW_SUFFIX}.")):
            old = ready.removeprefix(DATABASE + _NEW_SUFFIX)
            for suffix in reversed(_DATABASE_SUFFIXES):  # the database last: until it is back, this is done again
                kept = f"{DATABASE}{old}{suffix}"
                if DATABASE not in names and kept in names:
                    disk.rename(self._data_dir / kept, self._data_dir / f"{DATABASE}{suffix}")
            disk.fsync_directory(self._data_dir)  # before the sign that the old one was away is gone
            disk.remove(self._new_log)
            disk.remove(self._data_dir / ready)
        if DATABASE in names and not disk.has(self._log) and disk.has(self._new_log):
            disk.rename(self._new_log, self._log)
        disk.fsync_directory(self._data_dir)

    def _free_suffix(self) -> str:
        when = datetime.fromtimestamp(self._now / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        taken = set(self._disk.names(self._data_dir))
        suffixes = (f".before-{when}", *(f".before-{when}-{number}" for number in range(2, 1000)))
        return next(each for each in suffixes if not any(each in name for name in taken))

    def _move_away(self, path: Path, suffix: str, end: str) -> str:
        """The name that a file of the old store has now; "" when there was none. Its log keeps its database's name."""
        if path.name not in self._disk.names(self._data_dir):
            return ""
        kept = path.with_name(path.name.removesuffix(end) + suffix + end)
        self._disk.rename(path, kept)
        return kept.name


def _hold(space: _RebuiltNamespace, batch: "list[tuple[str, VersionKey, Version]]", change: CatalogChange) -> None:
    def read(namespace: str, digest: Digest) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
        facts, shared = space.found.held(namespace, digest)
        if not space.damaged.isdisjoint(blob.digest for blob in facts.named):
            space.with_damaged.add((space.found.names.open_text(agent), key[1]))
        return facts, shared

    for agent, key, version in batch:
        change.hold_version(read, agent, key, version)


def _describe(space: _RebuiltNamespace, batch: list[tuple[str, Agent]], change: CatalogChange) -> None:
    for name, agent in batch:
        changes = [["label", space.name, name, label, value] for label, value in agent.labels.items()]
        if agent.facts:
            changes.append(["agent", space.name, name, *agent.facts])
        change.apply_changes(_cannot_read, changes)


def _with_had_by(facts: tuple[Any, ...], agent: Agent | None, names: PlainNames) -> tuple[Any, ...]:
    """The fact of an owner; what an older one lacks is filled in."""
    *before, had_by = facts
    if had_by is None:
        versions = agent.versions.values() if agent is not None else ()
        moves = [names.open_text(each.origin_detail) for each in versions if each.origin == Origin.MOVE]
        had_by = had_before(before[0], before[2], before[3], moves)
    return *before, had_by


def _held(facts: tuple[Any, ...] | None, now_unix_ms: int) -> tuple[Any, ...]:
    """The fact of an owner whose last change may be lost: as of a move to nobody, which a claim undoes."""
    if facts is not None and facts[0] == OwnerState.MOVED:
        return facts
    # A move that was under way may have been decided since: it is neither undone nor taken up again. Its generation is
    # the other store's, if that owns the agent now. One to nobody is of an earlier recovery, and is as this makes it.
    generation, tells = (facts[1], facts[6]) if facts is not None else (0, "")
    if facts is not None and facts[0] in (OwnerState.MOVING, OwnerState.ARRIVING) and facts[2]:
        generation -= 1
    return int(OwnerState.MOVING), generation, "", "", now_unix_ms, 0, tells, ""


def _cannot_read(namespace: str, digest: Digest) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
    raise AssertionError(f"{digest} of {namespace} is not needed")


def _versions_of(state: Namespace) -> "Iterator[tuple[str, VersionKey, Version]]":
    for agent, facts in sorted(state.agents.items()):
        for key in sorted(facts.versions):
            yield agent, key, facts.versions[key]


def _as_named(need: NamedBlob, kv_identity: identity_pb2.KvIdentity) -> BlobFacts:
    """The facts that a blob which is not whole must have, by the manifest that names it."""
    file = need.file
    try:
        if file.kind == "state":
            specs = expected_state_tensors(kv_identity)
        else:
            specs = expected_tensors(kv_identity, file.tokens, file.window)
        return BlobFacts(file.kind, file, Layout(specs).text)
    except HeaderError:
        return BlobFacts(file.kind, file, "")


def _report_of(space: _RebuiltNamespace) -> Recovered:
    return Recovered(
        namespace=space.name,
        agents=len(space.state.agents),
        versions=sum(len(agent.versions) for agent in space.state.agents.values()),
        lost=tuple(space.lost),
        damaged_blobs=tuple(sorted(digest.hash for digest in space.damaged)),
        with_damaged_blobs=tuple(sorted(space.with_damaged)),
        named_anew=tuple(space.named_anew),
        unclaimed=tuple(sorted(space.unclaimed)),
    )


def _batches(things: list) -> Iterator[list]:  # type: ignore[type-arg]
    iterator = iter(things)
    return iter(lambda: list(islice(iterator, _PER_COMMIT)), [])
