"""The store's questions and answers, as frozen data. Times are Unix milliseconds, sizes are bytes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from kvasir.formats import block_hash, frames
from kvasir.formats.digest import Digest
from kvasir.formats.manifest_checks import MAX_TEMPLATE_TIME_MS
from kvasir.options.store import StoreFiles, StoreLimits, StoreRetention

from cachestore_svc.facts.ownership import HERE, Ownership

BLOCK_TOKENS = block_hash.BLOCK_TOKENS
MAX_FRAME_BYTES = frames.FRAME_BYTES
MAX_DIGESTS_PER_REQUEST = 10_000
MAX_BLOCK_HASHES_PER_REQUEST = 10_000
MAX_GROUPS_PER_REQUEST = 16
MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
MAX_RETAINED_VERSIONS = 1000
MAX_VERSION = 1 << 53
MIN_LEASE_TTL_S = 1.0
MAX_LEASE_TTL_S = 600.0
DEFAULT_LEASE_TTL_S = 30.0
MAX_LEASES_PER_REQUEST = 10_000
MIB = 1 << 20
LAST_UNIX_MS = MAX_TEMPLATE_TIME_MS  # the end of the year 9999, the last that a Timestamp can express


@dataclass(frozen=True, kw_only=True)
class StoreConfig(StoreFiles, StoreRetention, StoreLimits):
    """What a store is opened with: its options, which explain each, and numbers that are no options."""

    ballast_bytes: int = 16 * MIB  # a file given up when the disk is full, so that deletes have room for the index
    event_history: int = 10_000  # kept per namespace, for watchers that come back
    sealed_namespaces: tuple[str, ...] = ()  # that the owner lists: never plain, whatever the data directory has

    def quota_of(self, namespace: str) -> int | None:
        """Reservations included."""
        return self.namespace_quota_bytes.get(namespace, self.quota_bytes)

    def expiry_of(self, namespace: str) -> float | None:
        """Seconds after which an unused agent is deleted; its label wins."""
        return self.namespace_expires_after_s.get(namespace, self.expires_after_s)


class BlobKind(StrEnum):
    TENSORS = "tensors"
    MANIFEST = "manifest"


class Origin(IntEnum):
    """Where a version came from. Numbers are those of the wire."""

    TURN = 1
    FORK = 2
    ROLLBACK = 3
    IMPORT = 4
    PULL = 5
    MOVE = 6


class LineKey(NamedTuple):
    """Names a line: one agent's versions under one KV identity. The line need not exist."""

    namespace: str
    agent_id: str
    kv_identity_hash: str


class LineQuery(NamedTuple):
    """A query for lines of an agent; without a KV identity for all, or, of one, that of the newest version."""

    agent_id: str
    kv_identity_hash: str | None = None


_VERSION_WORD = "version"
_WAKES = re.compile(r"(?:^|, )asleep, wakes in (\d+) ms$")


def named_version(version: int) -> str:
    """The detail of an origin that is another version of the agent."""
    return f"{_VERSION_WORD} {version}"


def detail_of_turn(base_version: int, handed_over_by: str, wake_ms: int | None) -> str:
    """The detail of a turn's origin. `base_version`: the earlier version that it goes on from; 0: its parent.
    `wake_ms`: of a version that fell asleep, how long its KV takes to compute.
    """
    details = [named_version(base_version)] if base_version else []
    details += [f"handed over by {handed_over_by}"] if handed_over_by else []
    return with_wake(", ".join(details), wake_ms)


def with_wake(detail: str, wake_ms: int | None) -> str:
    """The detail of an origin; of a version that is asleep also how long its KV takes to compute."""
    return detail if wake_ms is None else f"{detail}{', ' if detail else ''}asleep, wakes in {wake_ms} ms"


def wake_ms_of(detail: str) -> int | None:
    """The time that `with_wake` added."""
    found = _WAKES.search(detail)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class SnapshotVersion:
    agent_id: str
    kv_identity_hash: str
    version: int
    manifest: Digest
    parent_version: int  # 0 for the first
    token_count: int
    created_unix_ms: int
    total_bytes: int  # the manifest and every blob it names, shared ones included
    origin: Origin
    origin_detail: str = ""
    request_id: str = ""
    is_brought: bool = False  # rows of it came by import or pull, at any time
    is_text_own: bool = False  # of brought rows: moves from its owners alone brought them; see provenance

    @property
    def base_version(self) -> int:
        """The version of this agent whose memory it goes on from; 0 if that is none."""
        if self.origin in (Origin.FORK, Origin.IMPORT):
            return 0
        name, _, number = self.origin_detail.partition(", ")[0].partition(" ")
        is_named = self.origin in (Origin.TURN, Origin.ROLLBACK) and name == _VERSION_WORD
        return int(number) if is_named else self.parent_version


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    group: int  # 0: the layers that keep all tokens; n: those of window n
    first_block: int
    blocks: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A stored prefix that may be shared: of each wanted group the blocks that the token behind the prefix sees."""

    tokens: int  # a multiple of BLOCK_TOKENS
    groups: tuple[GroupBlocks, ...]

    def blocks_of(self, group: int) -> tuple[Digest, ...]:
        return next((each.blocks for each in self.groups if each.group == group), ())


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    snapshots: tuple[SnapshotVersion, ...]
    next_page_token: str  # "" when there is no more


@dataclass(frozen=True, slots=True)
class AgentRecord:
    agent_id: str
    labels: Mapping[str, str]
    is_pinned: bool
    retained_versions: int
    created_unix_ms: int
    used_unix_ms: int
    lines: tuple[SnapshotVersion, ...]
    unused_ms: int = 0  # counted by sweeps, of agents that may expire
    expires_unix_ms: int | None = None  # at the earliest; None: it stays
    ownership: Ownership = HERE

    @property
    def given_by(self) -> str:
        """The peer whose move brought the agent as it is; empty where it went on since."""
        peer, version = self.ownership.came
        return peer if self.lines and max(line.version for line in self.lines) == version else ""


@dataclass(frozen=True, slots=True)
class AgentPage:
    agents: tuple[AgentRecord, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class Deletion:
    """What deleting an agent will free, and when, if collection runs."""

    bytes_gone_by_unix_ms: int
    unshared_bytes: int


@dataclass(frozen=True, slots=True)
class WriteStatus:
    received_bytes: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class LeaseToken:
    owner: str
    generation: int


@dataclass(frozen=True, slots=True)
class Lease:
    token: LeaseToken
    expires_unix_ms: int  # for people; the holder counts from before its request, on a steady clock
    newest: SnapshotVersion | None  # of the agent, if it has any

    @property
    def head_version(self) -> int:
        return self.newest.version if self.newest is not None else 0


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease as its owner knows it, one of many on a line of the same KV identity."""

    agent_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class RenewedLeases:
    """The leases that were lost, and those prolonged although others wait for them. The rest was prolonged."""

    lost: tuple[HeldLease, ...]
    wanted: tuple[HeldLease, ...]


@dataclass(frozen=True, slots=True)
class EventCursor:
    """A place in a namespace's history. `incarnation` changes when history was lost."""

    incarnation: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Committed:
    snapshot: SnapshotVersion


@dataclass(frozen=True, slots=True)
class AgentDeleted:
    agent_id: str


@dataclass(frozen=True, slots=True)
class AgentUpdated:
    """Labels, pin or retention changed, or old versions were given up for quota."""

    agent_id: str


@dataclass(frozen=True, slots=True)
class BlobDamaged:
    digest: Digest


@dataclass(frozen=True, slots=True)
class LeaseWanted:
    """Somebody waits for a lease that its holder has: another owner, or a caller that `takes_back` the memory."""

    agent_id: str
    kv_identity_hash: str
    takes_back: bool


EventBody = Committed | AgentDeleted | AgentUpdated | BlobDamaged | LeaseWanted


@dataclass(frozen=True, slots=True)
class Event:
    cursor: EventCursor
    at_unix_ms: int
    body: EventBody


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events after a cursor, oldest first; go on from `cursor`. `is_lost`: some before these are gone."""

    events: tuple[Event, ...]
    cursor: EventCursor
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """How far a re-hash has come. `damaged` are those found since the last one; they are quarantined."""

    blobs_checked: int
    blobs_total: int
    damaged: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class ScrubState:
    began_unix_ms: int = 0
    ended_unix_ms: int = 0  # 0 while a pass is under way
    namespace: str = ""  # of the blob that was checked last, and the catalog's number of it
    number: int = 0
    blobs_checked: int = 0
    bytes_checked: int = 0
    blobs_damaged: int = 0
    blobs_repaired: int = 0


@dataclass(frozen=True, slots=True)
class GcReport:
    blobs_marked: int = 0
    blobs_swept: int = 0
    bytes_freed: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `check` found wrong. `problem` is stable and UPPER_SNAKE_CASE."""

    problem: str
    namespace: str
    detail: str
    is_repaired: bool = False


@dataclass(frozen=True, slots=True)
class CheckReport:
    findings: tuple[Finding, ...]
    namespaces: int
    blobs: int
    snapshots: int
    set_aside: int = 0  # files that no row names, resting until collection removes them

    @property
    def is_clean(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class LostVersion:
    agent_id: str
    kv_identity_hash: str
    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The part of one namespace that came back, and the part that did not."""

    namespace: str
    agents: int
    versions: int
    lost: tuple[LostVersion, ...]
    damaged_blobs: tuple[str, ...]  # hashes; in quarantine, engines compute them again
    with_damaged_blobs: tuple[tuple[str, int], ...]  # agents and versions that came back without some of these
    named_anew: tuple[str, ...]  # agents whose names are lost
    unclaimed: tuple[str, ...] = ()  # agents that may have moved, as far as is lost: nobody extends them before a claim


@dataclass(frozen=True, slots=True)
class RecoverReport:
    source: str  # where it was read what there had been
    namespaces: tuple[Recovered, ...]
    kept: tuple[str, ...]  # files of the old index, beside the new one
    has_whole_journal: bool = True  # there was a journal, and nothing of it is lost

    @property
    def is_complete(self) -> bool:
        return self.has_whole_journal and not any(
            each.lost or each.damaged_blobs or each.named_anew for each in self.namespaces
        )


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """The blobs that an agent's versions name, each counted once, and those that other agents' versions name too."""

    snapshot_count: int
    blob_count: int
    blob_bytes: int
    shared_blob_count: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of all namespaces together: sums of their `Stats`, but of those with damaged entries."""

    agent_count: int
    snapshot_count: int
    blob_count: int
    blob_bytes: int
    logical_bytes: int  # what the newest versions would take if nothing were shared
    reserved_bytes: int
    unreferenced_bytes: int
    damaged_blob_count: int
    free_disk_bytes: int
    written_today_bytes: int


@dataclass(frozen=True, slots=True)
class Stats(Totals):
    """The same of one namespace, its limits and its counters."""

    quota_bytes: int | None
    is_disk_full: bool
    write_budget_bytes: int | None
    counters: Mapping[str, int]
