"""The port to the index: the operations of a catalog of blobs, agents, versions, leases and events.

An operation is a function that the catalog runs in a transaction: it gets a `CatalogView` to read, or a `CatalogChange`
to write as well, and it takes effect as a whole or not at all. Every implementation passes
tests/cachestore/any_backend.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import (
    AgentRecord,
    AgentUsage,
    EventBatch,
    EventBody,
    EventCursor,
    LeaseToken,
    LineKey,
    LineQuery,
    Origin,
    SnapshotVersion,
)
from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.journal.journal import Journal
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Change, State, Version, VersionKey
from cachestore_svc.sealing.sealed_names import PlainNames

_Answer = TypeVar("_Answer")
# The store's own operations: opening, checking, collecting everywhere. No credential has this namespace.
HOUSE = ""
# Work on thousands of blobs is done in operations of this many each (a millisecond or two), so that other namespaces'
# operations come in between.
SLICE = 500
# Reads a manifest of a namespace and checks it: its facts, and its blocks that others may find, as the index has them.
ReadManifest = Callable[[str, Digest], tuple[ManifestFacts, Sequence[SharedBlock]]]
# The name or hash that a slice ends with, None when there was nothing left; and sums over the slice.
Sums = tuple[str | None, list[int]]


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """The catalog's entry of a blob. A manifest has no KV identity, place or tensors."""

    id: int  # the catalog's own number of the blob, never used again
    hash: str
    size_bytes: int
    kind: str
    kv_identity_hash: str | None
    start: int | None
    tokens: int | None
    chain: str | None
    schema_hash: str | None
    is_damaged: bool
    promised_unix_ms: int
    is_brought: bool  # by an archive or from another store, or computed on what was; see provenance
    window: int  # group of a block's or tail's layers; 0 for every other blob

    @property
    def digest(self) -> Digest:
        return Digest(self.hash, self.size_bytes)


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


class UnreleasedLease(NamedTuple):
    """A lease that was not given back, and the time for which it was last granted."""

    line: LineKey
    token: LeaseToken
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class History:
    """The event history of every namespace: its name, which changes when events were lost, and how much is kept."""

    incarnation: str
    kept_events: int


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Which agents of a namespace are wanted: those whose names begin with the prefix and that have all the labels."""

    namespace: str
    name_prefix: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Marks and promises older than these have rested."""

    marked_until_unix_ms: int
    promised_until_unix_ms: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction gave up."""

    freed: list[Digest]
    events: list[EventBody]
    versions: int


class NotEnough(Exception):
    """Giving up all that may go would not free enough; so nothing was given up."""


class Unheld(Exception):
    """A version's manifest, or a blob that it names, is not in the catalog. The message says which."""


class CatalogView(Protocol):
    """What an operation may read. A namespace that holds nothing answers as an empty one."""

    # --- blobs ---

    def namespaces(self) -> list[str]:
        """Names of all namespaces, sorted."""

    def stored_bytes(self) -> dict[str, int]:
        """Bytes of all blobs, by namespace."""

    def find_blob(self, namespace: str, digest: Digest) -> BlobEntry | None:
        """The blob's entry, damaged or not."""

    def find_blobs(self, namespace: str, digests: Iterable[Digest]) -> dict[Digest, BlobEntry]:
        """The entries of listed blobs, damaged ones too. A digest whose size is another blob's finds nothing."""

    def has_hash(self, namespace: str, hash_: str) -> bool:
        """Whether the namespace lists a blob of this hash, damaged or not."""

    def all_hashes(self) -> set[str]:
        """Hashes of the blobs of every namespace, damaged ones too."""

    def hashes_of(self, namespace: str) -> set[str]:
        """Hashes of the namespace's blobs, damaged ones too."""

    def whole_blobs(self, namespace: str) -> list[Digest]:
        """Every blob that is not in quarantine."""

    def damaged_blobs(self, namespace: str) -> list[Digest]:
        """Every blob in quarantine."""

    def blobs_after(self, namespace: str, number: int, limit: int) -> list[tuple[int, Digest]]:
        """Blobs behind one by the catalog's number, with their own; those in quarantine too."""

    def bound_blobs(self, namespace: str, kv_hash: str, block_hashes: Sequence[str]) -> dict[str, BlobEntry]:
        """Blobs by those of the block hashes that are bound to one which is whole and was not brought."""

    def count_unheld(self, namespace: str) -> tuple[int, int]:
        """How many unheld blobs are not marked yet, and the bytes of all that nothing holds."""

    def rested(self, namespace: str, deadlines: Deadlines, limit: int) -> list[tuple[int, Digest]]:
        """Marked blobs that may go, at most `limit` (-1: all): still unheld, and neither marked nor promised lately."""

    # --- agents and versions ---

    def get_agent(self, namespace: str, agent_id: str, default_retained: int) -> AgentRecord:
        """An agent with its labels and the newest version of each line. Raises NotFound."""

    def agents_after(
        self, wanted: AgentFilter, after: str, count: int, default_retained: int
    ) -> tuple[list[str], list[AgentRecord]]:
        """The `count` names that follow, fewer if they are the last; and which of these agents are wanted."""

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

    def held_digests(self, namespace: str, agent_id: str) -> list[Digest]:
        """Every blob that some version of the agent holds, manifests too, but for those in quarantine. Raises
        NotFound."""

    def usage_of(self, namespace: str, agent_id: str) -> AgentUsage:
        """The blobs that the agent's versions name, and those that others' name too. Raises NotFound."""

    def named_after(self, namespace: str, manifest: Digest, position: int, limit: int) -> list[tuple[int, Digest]]:
        """Blobs that a manifest names behind a position, with theirs."""

    def is_held(self, namespace: str, manifest: Digest) -> bool:
        """Whether some version is this manifest."""

    def held_manifests(self, namespace: str) -> list[Digest]:
        """Manifests that some version is, those in quarantine left out."""

    def names_others(self, namespace: str, manifest: Digest, named: Sequence[Digest]) -> bool:
        """Whether a manifest that is held holds on to other blobs than these."""

    # --- sums ---

    def sums_of_agents(self, namespace: str, after: str) -> Sums:
        """Agents, versions, and bytes of the newest versions, over the next SLICE agents after `after`.

        Also returns the last agent's name.
        """

    def sums_of_blobs(self, namespace: str, after: str) -> Sums:
        """Blobs, their bytes, how many are damaged, and bytes that nothing holds, over the next SLICE hashes after
        `after`. Also returns the last hash.
        """

    def counts(self, namespace: str) -> tuple[int, int]:
        """Blobs and versions of a namespace, all in one operation."""

    def written(self, day: int) -> dict[str, int]:
        """Bytes of blobs written on a day (UTC, counted from 1970), by namespace."""

    # --- leases and events ---

    def unreleased_leases(self) -> list[UnreleasedLease]:
        """Leases of all lines that were not released. How long each had still to go at the last end is not known."""

    def held_leases(self, query: LineQuery, live: LiveLeases) -> list[LineKey]:
        """Lines of an agent whose lease is live."""

    def ownership_of(self, namespace: str, agent_id: str) -> Ownership:
        """What is known of an agent's owner; HERE where nothing is. The agent need not exist."""

    def owners(self, namespace: str) -> list[tuple[str, Ownership]]:
        """All facts about owners, by agent; also of agents that are gone."""

    def count_owners(self, namespace: str, peer: str) -> tuple[int, int]:
        """Facts about owners that a peer has a part in, and agents that are on their way to it."""

    def unfinished_moves(self, namespace: str) -> list[tuple[str, Ownership]]:
        """Agents that are on their way, or whose owner must still be announced, and their facts."""

    def events_after(self, history: History, namespace: str, cursor: EventCursor | None, limit: int) -> EventBatch:
        """Events after a cursor. One of another incarnation, of the future, or too old has lost some."""

    def fact(self, name: str) -> str | None:
        """What the store noted under this name, if it did. No namespace and nothing of one belongs there."""

    # --- the journal, and damage ---

    def journal_position(self) -> tuple[str, Position] | None:
        """The journal's store and how far the index followed it; None when it never had a journal."""

    def state(self) -> State:
        """Everything that the journal records, as the index has it now."""

    def state_anyway(self) -> State:
        """The same where text is damaged: it is then read as what it resembles."""

    def namespaces_anyway(self) -> list[str]:
        """Names of all namespaces, where text is damaged, too."""

    def incarnation(self, inode: str) -> str | None:
        """The name of the event history; None when there is none, or when it was written under another inode."""

    def has_tables(self) -> bool:
        """Whether this is a store's index at all."""

    def is_too_new(self) -> bool:
        """Whether a later Kvasir changed its form."""

    def wrong_indexes(self) -> bool:
        """Whether look-ups may miss entries that the tables have. Raises DataLoss (INDEX_DAMAGED) when the tables
        themselves are damaged."""

    def integrity_problems(self) -> list[str]:
        """Faults of tables and look-ups, in words."""

    def dangling_rows(self) -> list[str]:
        """Entries that name an entry that is not there, in words."""


class CatalogChange(CatalogView, Protocol):
    """What an operation may read and write. Nothing of it is visible before all of it is durable."""

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` on the catalog's thread once the operation is durable; it must be quick and must not raise."""

    # --- blobs ---

    def add_blobs(self, namespace: str, blobs: Sequence[tuple[Digest, BlobFacts]], now_unix_ms: int) -> list[bool]:
        """List blobs whose files are durable. False for each that replaces a damaged one, whose rest then begins
        again."""

    def promise(self, blobs: Sequence[BlobEntry], now_unix_ms: int) -> None:
        """Note that a caller relies on these."""

    def set_damaged(self, namespace: str, digest: Digest, is_damaged: bool) -> bool:
        """Quarantine a blob, or take it out. True when that changed something."""

    def mark_unheld(self, namespace: str, now_unix_ms: int) -> int:
        """Mark the blobs that nothing holds; how many were not marked before."""

    def count_written(self, namespace: str, day: int, size_bytes: int) -> None:
        """Add to the bytes written on a day."""

    def remove_blobs(self, blob_ids: Sequence[int]) -> None:
        """Unlist blobs that nothing holds."""

    def remove_unused_schemas(self) -> None:
        """Forget tensor schemas that no blob has."""

    def evict(
        self, namespace: str, wanted_bytes: int, evict_heads: bool, now_unix_ms: int, deadlines: Deadlines
    ) -> Evicted:
        """Give up versions until their blobs free enough at once. Raises NotEnough, which undoes all of it."""

    # --- agents and versions ---

    def commit_version(self, asked: Commit, live: LiveLeases, now_unix_ms: int) -> Done:
        """Make a manifest the line's next version. Raises Conflict, FailedPrecondition; see Store.commit."""

    def use_line(self, line: LineKey, now_unix_ms: int) -> None:
        """Note that the line was used."""

    def update_agent(
        self,
        namespace: str,
        agent_id: str,
        labels: Mapping[str, str],
        is_pinned: bool | None,
        retained_versions: int | None,
    ) -> None:
        """Change what is given. Raises NotFound, InvalidArgument."""

    def fork_agent(
        self, source: LineQuery, agent_id: str, version: int | None, now_unix_ms: int
    ) -> list[SnapshotVersion]:
        """The first versions of a new agent's lines. Raises NotFound, AlreadyExists, InvalidArgument."""

    def roll_back(
        self, query: LineQuery, version: int, expected_head: int | None, default_retained: int, now_unix_ms: int
    ) -> SnapshotVersion:
        """A new newest version that is an old one. Raises NotFound, Conflict, InvalidArgument."""

    def forget_agent(self, namespace: str, agent_id: str, force: bool, now_unix_ms: int) -> int:
        """Forget an agent and its lines, and mark what nothing holds any more; the bytes of that. Raises NotFound, and
        FailedPrecondition (AGENT_PINNED) unless `force`."""

    def count_unused(self, namespace: str, agent_id: str, passed_ms: int) -> None:
        """Add to an agent's unused time; an agent that was used since the last count starts from 0. No effect if it is
        gone."""

    def hold_anew(self, namespace: str, manifest: Digest, named: Sequence[Digest]) -> None:
        """Rewrite a manifest's references to those of its blobs that are listed."""

    # --- leases and events ---

    def acquire_lease(
        self, line: LineKey, live: LiveLeases, owner: str, ttl_ms: int, *, begins_anew: bool = False
    ) -> LeaseToken:
        """Take the lease of a line, or prolong one's own. Raises FailedPrecondition (LEASE_HELD)."""

    def renew_lease(self, line: LineKey, live: LiveLeases, token: LeaseToken, ttl_ms: int) -> None:
        """Prolong one's own lease, also one that ended and was not taken. Raises Conflict (LEASE_FENCED), NotFound,
        FailedPrecondition (LEASE_HELD)."""

    def release_lease(self, line: LineKey, live: LiveLeases, token: LeaseToken) -> None:
        """Give back one's own lease. Raises Conflict (LEASE_FENCED), NotFound."""

    def fence_leases(self, query: LineQuery, live: LiveLeases) -> None:
        """Shut out every writer of these lines that began before now. Raises FailedPrecondition (LEASE_HELD)."""

    def set_lease_floor(self, generation: int) -> None:
        """No lease that is not known yet begins below this generation."""

    def set_ownership(self, namespace: str, agent_id: str, known: Ownership) -> None:
        """Write what is known of an agent's owner."""

    def add_events(self, history: History, namespace: str, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
        """Add events, and let go of the oldest beyond the limit."""

    def set_fact(self, name: str, value: str) -> None:
        """Note something of the store's own. A recovery forgets it."""

    # --- the journal ---

    def apply_changes(self, read: ReadManifest, changes: Iterable[Change]) -> None:
        """Let changes of a journal happen. Raises Unheld, and what `read` raises."""

    def fence_changes(self, changes: Iterable[Change]) -> None:
        """Shut out late writers of what these changes took back: leases are not in the journal."""

    def hold_version(self, read: ReadManifest, namespace: str, agent_id: str, key: VersionKey, new: Version) -> None:
        """Write a version with the number that it had. Raises Unheld, and what `read` raises."""

    def set_journal_position(self, store: str, reached: Position) -> None:
        """Note how far the index followed its journal."""

    def begin_incarnation(self, inode: str, name: str) -> str:
        """Give the event history a name; that name."""

    def forget_incarnation(self) -> None:
        """The history lost events: the next start gives it another name."""


class Catalog(Protocol):
    """Runs operations: namespaces in turn, and the reads and the writes of each in the order they came. A read sees
    every write that was acknowledged before it was asked, and no write that is not durable.
    """

    is_migrated: bool  # opening it changed its form

    def read(self, namespace: str, work: Callable[[CatalogView], _Answer]) -> _Answer:
        """The answer of `work`, asked for by the namespace (HOUSE: by the store itself)."""

    def write(self, namespace: str, work: Callable[[CatalogChange], _Answer], *, frees_space: bool = False) -> _Answer:
        """The answer of `work`, once it is durable. All of it took effect, or, when this raises, nothing.

        `work` may run twice, so it touches nothing else. `frees_space` lets it use the ballast of a full disk.
        """

    def write_later(self, namespace: str, work: Callable[[CatalogChange], None]) -> None:
        """Write without waiting and without an answer; for what may be lost, such as times of last use."""

    def record_with(self, journal: Journal) -> None:
        """From now on write to the journal what each commit changes of agents and versions, before it commits."""

    def seal(self, names_of: Callable[[str], PlainNames]) -> None:
        """From now on what a sealed namespace asks has plain names, and its entries have sealed ones."""

    def keep_out(self, damage: Mapping[str, str]) -> None:
        """From now on refuse all that these namespaces ask: their entries are damaged, in these words."""

    @property
    def damage(self) -> Mapping[str, str]:
        """Namespaces whose entries are damaged, and how."""

    def rebuild_indexes(self) -> None:
        """Rebuild look-ups from the tables. Raises DataLoss when these contradict themselves."""

    def close(self) -> bool:
        """Finish the operations that wait. False when it was closed before."""
