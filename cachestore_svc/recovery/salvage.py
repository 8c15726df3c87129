"""Evidence for an index that is rebuilt: the journal, the old index where that is damaged, and complete blobs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvasir.errors import InvalidArgument, KvasirError
from kvasir.formats.block_file import FileIdentity
from kvasir.formats.digest import Digest, is_hash
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

from cachestore_svc.blobs.backend import Aside, BlobBackend, NamespaceBlobs
from cachestore_svc.blobs.blob_checks import BlobFacts, check_for
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock, read_manifest, shareable_hashes, shared_blocks
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.index.catalog import CatalogChange
from cachestore_svc.index.refusals import reading_damage
from cachestore_svc.index.sqlite.database.looking import looking_at
from cachestore_svc.index.values import ReadManifest
from cachestore_svc.journal import journal, journal_lines
from cachestore_svc.journal.replay import Agent, Change, Namespace, State, Version
from cachestore_svc.recovery import looking
from cachestore_svc.sealing.sealed_names import REQUEST, PlainNames
from cachestore_svc.sealing.seals import Seals


@dataclass
class Evidence:
    """The agents and versions that there were, and the sources for them."""

    state: State = field(default_factory=dict)
    is_whole: bool = False  # nothing else was there, and every mark of what was brought is known
    sources: list[str] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)  # names that any source knows


def gather_evidence(database: Path, blobs: BlobBackend, disk: Disk) -> Evidence:
    """Read the journal, and the old index where the journal is not whole."""
    evidence = Evidence()
    found = journal.read(database.with_name(journal.NAME), disk, salvages=True)
    if found is not None and found.is_readable and (not found.state or looking.lies_here(found.state, blobs)):
        evidence.state, lost = found.state, _lost(found, database, disk)
        evidence.is_whole = not lost
        evidence.sources.append(f"the journal{lost}")
    if not evidence.is_whole:
        _read_index(evidence, database, blobs, disk)
    evidence.namespaces |= evidence.state.keys()
    return evidence


def _lost(found: journal_lines.Parsed, database: Path, disk: Disk) -> str:
    """The part that a journal lacks, in words; "" when it is whole, as far as its old index shows."""
    if found.damaged_lines:
        return f", but for {found.damaged_lines} damaged lines"
    if found.torn_bytes:
        return ", but for its last line, which is cut"
    with contextlib.suppress(KvasirError):
        if disk.size_bytes(database):
            with looking_at(database, disk) as view, reading_damage():
                store, position = view.journal_position() or ("", found.position)
            if store == found.store and position.sequence > found.position.sequence:
                return f", but for its last {position.sequence - found.position.sequence} commits"
    return ""


def _read_index(evidence: Evidence, database: Path, blobs: BlobBackend, disk: Disk) -> None:
    if not disk.size_bytes(database):
        return
    try:
        with looking_at(database, disk) as view, reading_damage():
            state = view.state_anyway()
            names = set(view.namespaces_anyway())
    except KvasirError:
        return
    if state and looking.lies_here(state, blobs):
        evidence.sources.append("the old index")
        evidence.namespaces |= names
        _add(evidence.state, state)


def _add(state: State, found: State) -> None:
    """Add from an index of unknown age the facts that a damaged journal lacks."""
    for name, space in found.items():
        into = state.setdefault(name, Namespace())
        into.brought |= space.brought
        for agent_name, facts in space.owners.items():
            # The state, then the generation, which never goes back.
            into.owners[agent_name] = max(into.owners.get(agent_name, facts), facts, key=lambda known: int(known[1]))
        for agent_name, agent in space.agents.items():
            known = into.agents.setdefault(agent_name, Agent(agent.facts, agent.labels))
            known.facts = known.facts or agent.facts
            known.versions = agent.versions | known.versions


class Found:
    """The blobs of a namespace as found, with those set aside. Digests and facts are as the index has them, sealed."""

    def __init__(self, blobs: NamespaceBlobs, names: PlainNames) -> None:
        self._blobs = blobs
        self.names = names

    def hashes(self) -> list[str]:
        listing = self._blobs.list()
        return sorted({*map(self.names.hash, listing.blobs), *(aside.hash for aside in listing.asides)})

    def whole(self, digest: Digest, kind: BlobKind) -> BlobFacts | None:
        """The facts of a blob, if its bytes are whole. A blob that was set aside gets its name back."""
        for data, aside in self._copies(digest):
            try:
                check = check_for(kind, digest.size_bytes)
                check.feed(data)
                facts = check.finish()
            except InvalidArgument:
                continue
            if aside is not None:
                self._blobs.restore(aside)
            return seal_blob(self.names, facts)
        return None

    def manifest(self, digest: Digest) -> ManifestFacts | None:
        found = self._read_manifest(digest)
        return None if found is None else seal_manifest(self.names, found)

    def held(self, namespace: str, digest: Digest) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
        """A manifest that was found before: its facts, and its blocks that others may find."""
        found = self._read_manifest(digest)
        assert found is not None, "it was read before"
        return as_index_has_it(self.names, namespace, found)

    def as_manifest(self, hash_: str) -> Digest | None:
        """The digest of a blob that is a whole manifest; None for every other."""
        plain_hash = self.names.open_digest(Digest(hash_, 0)).hash
        for data, _ in self._blobs.unverified(plain_hash, MAX_MANIFEST_BYTES):
            if Digest.of(data).hash == plain_hash:  # other copies have the same bytes
                digest = Digest(hash_, len(data))
                return digest if self.manifest(digest) else None
        return None

    def _read_manifest(self, digest: Digest) -> ManifestFacts | None:
        for data, _ in self._copies(digest):
            try:
                return read_manifest(data)
            except InvalidArgument:
                return None
        return None

    def _copies(self, digest: Digest) -> Iterator[tuple[memoryview, Aside | None]]:
        """Bytes that are the digest's, where they lie under its name or aside."""
        plain = self.names.open_digest(digest)
        for data, aside in self._blobs.unverified(plain.hash, plain.size_bytes):
            if Digest.of(data) == plain:
                yield data, aside


def unnamed_versions(found_blobs: Found, space: Namespace) -> dict[str, Version]:
    """Versions for manifests that no version is, by the names of agents that they get. Their rest is unknown."""
    named = {version.manifest_hash for agent in space.agents.values() for version in agent.versions.values()}
    found: dict[str, Version] = {}
    for hash_ in found_blobs.hashes():
        digest = found_blobs.as_manifest(hash_) if hash_ not in named and is_hash(hash_) else None
        if digest is not None:
            name = _free_name(hash_, {*map(found_blobs.names.open_text, space.agents), *found})
            found[name] = Version(0, digest.hash, digest.size_bytes, 0, "recovered from its manifest", 0, "")
    return found


def _free_name(hash_: str, taken: set[str]) -> str:
    return next(name for digits in range(12, len(hash_) + 1) if (name := f"recovered-{hash_[:digits]}") not in taken)


def manifest_reader(backend: BlobBackend, seals: Seals) -> ReadManifest:
    """Reads manifests of any namespace. `backend` opens what is sealed."""

    def read(namespace: str, digest: Digest) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
        names = seals.names_of(namespace)
        return as_index_has_it(names, namespace, read_manifest(backend.of(namespace).read(names.open_digest(digest))))

    return read


def list_again(
    change: CatalogChange,
    found: Callable[[str], Found],
    read: ReadManifest,
    changes: Iterable[Change],
    now_unix_ms: int,
) -> None:
    """Give rows to whole blobs of these versions that have none: a commit may share its transaction with the blobs that
    it waited for. `found`: by namespace. Raises as `read`.
    """
    for kind, namespace, *facts in changes:
        if kind != "version":
            continue
        version, rows = Version._make(facts[3:]), change.of(namespace)
        manifest = Digest(version.manifest_hash, version.manifest_size_bytes)
        named = [each.digest for each in read(namespace, manifest)[0].named]
        listed = rows.find_blobs([manifest, *named])
        lacking = [each for each in dict.fromkeys([manifest, *named]) if each not in listed]
        if not lacking:
            continue
        here = found(namespace)
        kinds = {manifest: BlobKind.MANIFEST}
        whole = [(each, here.whole(each, kinds.get(each, BlobKind.TENSORS))) for each in lacking]
        rows.add_blobs([(each, facts) for each, facts in whole if facts is not None], now_unix_ms)


def as_index_has_it(
    names: PlainNames, namespace: str, facts: ManifestFacts
) -> tuple[ManifestFacts, Sequence[SharedBlock]]:
    """A manifest's facts, and its blocks that others may find."""
    shared = shared_blocks(facts, shareable_hashes(facts, namespace))
    return seal_manifest(names, facts), [replace(each, block_hash=names.keyed(each.block_hash)) for each in shared]


def seal_blob(names: PlainNames, facts: BlobFacts) -> BlobFacts:
    if facts.identity is None:
        return facts
    return replace(facts, identity=_sealed(names, facts.identity))


def seal_manifest(names: PlainNames, facts: ManifestFacts) -> ManifestFacts:
    """The facts of a manifest as the index has them, but for its token ids, which no index keeps."""
    named = (replace(need, digest=names.digest(need.digest), file=_sealed(names, need.file)) for need in facts.named)
    return replace(facts, request_id=names.text(REQUEST, facts.request_id), named=tuple(named))


def _sealed(names: PlainNames, file: FileIdentity) -> FileIdentity:
    return replace(file, chain=names.keyed(file.chain))
