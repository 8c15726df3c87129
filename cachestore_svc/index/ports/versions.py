"""Versions of agents' lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.facts.records import LeaseToken, LineKey, LineQuery, Origin, SnapshotVersion
from cachestore_svc.index.live_leases import LiveLeases


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a caller asks for, with its manifest read and checked against itself."""

    line: LineKey
    manifest: Digest
    facts: ManifestFacts
    parent_version: int
    lease: LeaseToken | None
    origin: Origin
    origin_detail: str
    shared: Sequence[SharedBlock]  # blocks whose hashes to bind, by index
    default_retained: int
    is_brought: bool = False  # its writer knows that rows of it came from elsewhere
    parent_manifest: Digest | None = None  # what version `parent_version` must be; None: whatever it is
    owner_generation: int | None = None  # it comes from the agent's owner, of this generation
    is_text_own: bool = False  # of a move: at its source no archive and no copy had brought it


@dataclass(frozen=True, slots=True)
class Done:
    """The version that a commit made, now or (not `is_new`) when it was asked for before."""

    snapshot: SnapshotVersion
    is_new: bool


class VersionsView(Protocol):
    def get_snapshot(self, query: LineQuery, version: int | None) -> tuple[SnapshotVersion, int]:
        """The version of that number (None: the newest), and when its line was last used. Raises NotFound."""

    def newest_of(self, line: LineQuery | LineKey) -> SnapshotVersion | None:
        """The newest version of the line, or of the agent where no line is named, if there is any."""

    def snapshots_after(self, query: LineQuery, before: int, after_line: str, limit: int) -> list[SnapshotVersion]:
        """Versions of an agent, or of one of its lines, newest first: those below `before`, and that of this number in
        lines behind `after_line`. Raises NotFound."""

    def has_had(self, query: LineQuery, manifest_hash: str) -> bool:
        """Whether a version of the agent is or was this manifest. Of versions that are not kept, its last thousand and
        those that another store brought are remembered."""


class VersionsChange(VersionsView, Protocol):
    def commit_version(self, asked: Commit, live: LiveLeases, now_unix_ms: int) -> Done:
        """Make a manifest the line's next version. Raises Conflict, FailedPrecondition; see Store.commit."""

    def use_line(self, line: LineKey, now_unix_ms: int) -> None:
        """Note that the line was used."""

    def roll_back(
        self, query: LineQuery, version: int, expected_head: int | None, default_retained: int, now_unix_ms: int
    ) -> SnapshotVersion:
        """A new newest version that is an old one. Raises NotFound, Conflict, InvalidArgument."""
