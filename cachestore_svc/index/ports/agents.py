"""Agents, their labels and their blobs, and the versions of their lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.facts import records
from cachestore_svc.index.live_leases import LiveLeases


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Which agents are wanted: those whose names begin with the prefix and that have all the labels."""

    name_prefix: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CommitTerms:
    """Where the memory of a commit comes from, and on which terms it becomes a version."""

    lease: records.LeaseToken | None = None
    origin: records.Origin = records.Origin.TURN
    origin_detail: str = ""  # of a turn: from the next two
    base_version: int = 0  # the earlier version that a turn went on from; 0: its parent
    handed_over_by: str = ""  # the peer whose engine began the turn
    parent_manifest: Digest | None = None  # what version `parent_version` must be; None: whatever it is
    owner_generation: int | None = None  # it comes from the agent's owner, of this generation, and may renew the copy
    is_brought: bool = False  # rows of it came from elsewhere, as those of an import or a pull do; see `provenance`
    is_text_own: bool = False  # of a move: at its source no archive and no copy had brought it
    bind_shared: bool = False  # other agents may find its shareable blocks by block hash


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a caller asks for, with its manifest read and checked against itself."""

    line: records.LineKey
    manifest: Digest
    facts: ManifestFacts
    parent_version: int
    terms: CommitTerms
    shared: Sequence[SharedBlock]  # blocks whose hashes to bind, by index
    default_retained: int


@dataclass(frozen=True, slots=True)
class Done:
    """The version that a commit made, now or (not `is_new`) when it was asked for before."""

    snapshot: records.SnapshotVersion
    is_new: bool


class AgentsView(Protocol):
    def get_agent(self, agent_id: str, default_retained: int) -> records.AgentRecord:
        """An agent with its labels and the newest version of each line. Raises NotFound."""

    def agents_after(
        self, wanted: AgentFilter, after: str, count: int, default_retained: int
    ) -> tuple[list[str], list[records.AgentRecord]]:
        """The `count` names that follow, fewer if they are the last; and which of these agents are wanted."""

    def held_digests(self, agent_id: str) -> list[Digest]:
        """Every blob that some version of the agent holds, but for those in quarantine. Raises NotFound."""

    def usage_of(self, agent_id: str) -> records.AgentUsage:
        """The blobs that the agent's versions name, and those that others' name too. Raises NotFound."""

    def get_snapshot(self, query: records.LineQuery, version: int | None) -> tuple[records.SnapshotVersion, int]:
        """The version of that number (None: the newest), and when its line was last used. Raises NotFound."""

    def newest_of(self, line: records.LineQuery | records.LineKey) -> records.SnapshotVersion | None:
        """The newest version of the line, or of the agent where no line is named, if there is any."""

    def snapshots_after(
        self, query: records.LineQuery, before: int, after_line: str, limit: int
    ) -> list[records.SnapshotVersion]:
        """Versions, newest first: below `before`, and of that number in lines behind `after_line`. Raises NotFound."""

    def is_held(self, manifest: Digest) -> bool:
        """Whether some version is this manifest."""

    def held_manifests(self) -> list[Digest]:
        """Manifests that some version is, those in quarantine left out."""

    def has_had(self, query: records.LineQuery, manifest_hash: str) -> bool:
        """Whether a version of the agent is or was this manifest, as far as dropped versions are remembered."""


class AgentsChange(AgentsView, Protocol):
    def update_agent(
        self, agent_id: str, labels: Mapping[str, str], is_pinned: bool | None, retained_versions: int | None
    ) -> None:
        """Change what is given. Raises NotFound, InvalidArgument."""

    def fork_agent(
        self, source: records.LineQuery, agent_id: str, version: int | None, now_unix_ms: int
    ) -> list[records.SnapshotVersion]:
        """The first versions of a new agent's lines. Raises NotFound, AlreadyExists, InvalidArgument."""

    def forget_agent(self, agent_id: str, force: bool, now_unix_ms: int) -> int:
        """Forget an agent and its lines; the bytes that nothing holds now. Raises NotFound, FailedPrecondition."""

    def count_unused(self, agent_id: str, passed_ms: int) -> None:
        """Add to an agent's unused time, or begin at 0 if it was used since. No effect if it is gone."""

    def commit_version(self, asked: Commit, live: LiveLeases, now_unix_ms: int) -> Done:
        """Make a manifest the line's next version. Raises Conflict, FailedPrecondition; see Store.commit."""

    def use_line(self, line: records.LineKey, now_unix_ms: int) -> None:
        """Note that the line was used."""

    def roll_back(
        self, query: records.LineQuery, version: int, expected_head: int | None, default_retained: int, now_unix_ms: int
    ) -> records.SnapshotVersion:
        """A new newest version that is an old one. Raises NotFound, Conflict, InvalidArgument."""
