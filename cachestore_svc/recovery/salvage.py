"""Evidence for an index that is built anew: the content of journal and old index, and the blobs that are whole.

The journal comes first. Where it is damaged or gone the old index adds what it can still say; manifests that
no version names then come back under names of their own, because a manifest does not say whose memory it is.
"""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from kvasir.errors import InvalidArgument, KvasirError
from kvasir.formats.digest import Digest, is_hash
from kvasir.formats.manifest import MAX_MANIFEST_BYTES

from cachestore_svc.blobs.backend import BlobBackend, NamespaceBlobs
from cachestore_svc.blobs.blob_checks import BlobFacts, check_for
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.damage import reading_damage
from cachestore_svc.index.sqlite.looking import looking_at
from cachestore_svc.journal import journal, journal_lines
from cachestore_svc.journal.replay import Agent, Namespace, State, Version
from cachestore_svc.manifests import ManifestFacts, read_manifest
from cachestore_svc.records import BlobKind
from cachestore_svc.recovery import looking


@dataclass
class Evidence:
    """The agents and versions that there were, and the sources that say so."""

    state: State = field(default_factory=dict)
    is_whole: bool = False  # nothing else was there, and every mark of what was brought is known
    sources: list[str] = field(default_factory=list)
    namespaces: set[str] = field(default_factory=set)  # names that any source knows


def gather_evidence(database: Path, blobs: BlobBackend, disk: Disk) -> Evidence:
    """Ask the journal, and the old index where the journal is not whole."""
    evidence = Evidence()
    found = journal.read(database.with_name(journal.NAME), disk, salvages=True)
    if found is not None and found.is_readable and (not found.state or looking.lies_here(found.state, blobs)):
        evidence.state, lost = found.state, _lost(found, database, disk)
        evidence.is_whole = not lost
        evidence.sources.append(f"the journal{lost}")
    if not evidence.is_whole:
        _ask_index(evidence, database, blobs, disk)
    evidence.namespaces |= evidence.state.keys()
    return evidence


def _lost(found: journal_lines.Parsed, database: Path, disk: Disk) -> str:
    """The part that a journal lacks, in words; "" when it is whole, as far as its old index can say."""
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


def _ask_index(evidence: Evidence, database: Path, blobs: BlobBackend, disk: Disk) -> None:
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
    """Add what a damaged journal does not say, of what an index of unknown age does."""
    for name, space in found.items():
        into = state.setdefault(name, Namespace())
        into.brought |= space.brought
        for agent_name, agent in space.agents.items():
            known = into.agents.setdefault(agent_name, Agent(agent.facts, agent.labels))
            known.facts = known.facts or agent.facts
            known.versions = agent.versions | known.versions


class Found:
    """The blobs of one namespace as they were found, those set aside among them."""

    def __init__(self, blobs: NamespaceBlobs) -> None:
        self._blobs = blobs
        listing = blobs.list()
        self._hashes = listing.blobs | {aside.hash for aside in listing.asides}

    def hashes(self) -> list[str]:
        """Every hash that a blob has or had as its name."""
        return sorted(self._hashes)

    def whole(self, digest: Digest, kind: BlobKind) -> BlobFacts | None:
        """The facts of a blob, if its bytes are whole. A blob that was set aside gets its name back."""
        for data, aside in self._blobs.unverified(digest.hash, digest.size_bytes):
            if Digest.of(data) != digest:
                continue
            try:
                check = check_for(kind, digest.size_bytes)
                check.feed(data)
                facts = check.finish()
            except InvalidArgument:
                continue
            if aside is not None:
                self._blobs.restore(aside)
            return facts
        return None

    def manifest(self, digest: Digest) -> ManifestFacts | None:
        """The facts of a manifest, if its bytes are here and whole."""
        for data, _ in self._blobs.unverified(digest.hash, digest.size_bytes):
            if Digest.of(data) == digest:
                try:
                    return read_manifest(data)
                except InvalidArgument:
                    return None
        return None

    def as_manifest(self, hash_: str) -> Digest | None:
        """The digest of a blob that is a whole manifest; None for every other."""
        for data, _ in self._blobs.unverified(hash_, MAX_MANIFEST_BYTES):
            digest = Digest.of(data)
            if digest.hash == hash_:  # other copies have the same bytes
                return digest if self.manifest(digest) else None
        return None


def unnamed_versions(found_blobs: Found, space: Namespace) -> dict[str, Version]:
    """Versions for manifests that no version is, by the names of agents that they get. Their rest is unknown."""
    named = {version.manifest_hash for agent in space.agents.values() for version in agent.versions.values()}
    found: dict[str, Version] = {}
    for hash_ in found_blobs.hashes():
        digest = found_blobs.as_manifest(hash_) if hash_ not in named and is_hash(hash_) else None
        if digest is not None:
            found[_free_name(hash_, {*space.agents, *found})] = Version(
                0, digest.hash, digest.size_bytes, 0, "recovered from its manifest", 0, ""
            )
    return found


def _free_name(hash_: str, taken: set[str]) -> str:
    return next(name for digits in range(12, len(hash_) + 1) if (name := f"recovered-{hash_[:digits]}") not in taken)
