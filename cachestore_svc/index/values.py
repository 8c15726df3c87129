"""What the catalog's verbs take and give beside records: entries of blobs, commits, deadlines, the history."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.formats.block_file import FileIdentity
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.facts import records
from cachestore_svc.facts.records import EventBody, LeaseToken, LineKey

INCARNATION = "incarnation"  # a fact: the name of the history of events
HOUSE = ""  # The store's own operations: opening, checking, collecting everywhere. No credential has this namespace.
# Work on thousands of blobs is done in operations of this many each (a millisecond or two), so that other namespaces'
# operations come in between.
SLICE = 500


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
    parent_manifest: Digest | None = None  # the manifest that `parent_version` must have; None: any
    owner_generation: int | None = None  # it comes from the agent's owner, of this generation, and may renew the copy
    is_brought: bool = False  # rows of it came from elsewhere, as those of an import or a pull do; see `provenance`
    is_text_own: bool = False  # of a move: at its source no archive and no copy had brought it
    bind_shared: bool = False  # other agents may find its shareable blocks by block hash


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a caller wants, with its manifest read and checked against itself."""

    line: records.LineKey
    manifest: Digest
    facts: ManifestFacts
    parent_version: int
    terms: CommitTerms
    shared: Sequence[SharedBlock]  # blocks whose hashes to bind, by index
    default_retained: int


@dataclass(frozen=True, slots=True)
class Done:
    """The version that a commit made, now or (not `is_new`) when it was made before."""

    snapshot: records.SnapshotVersion
    is_new: bool


class BlobEntry(NamedTuple):  # a line's commit makes hundreds: a frozen dataclass takes six times as long
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
    is_brought: int  # 0; by an archive or from another store, or computed on what was: see provenance
    window: int  # group of a block's or tail's layers; 0 for every other blob

    @property
    def digest(self) -> Digest:
        return Digest(self.hash, self.size_bytes)

    @property
    def file(self) -> FileIdentity | None:
        """The header's facts of a tensor file; None for a manifest."""
        if self.kv_identity_hash is None or self.start is None or self.tokens is None or self.chain is None:
            return None
        return FileIdentity(self.kind, self.kv_identity_hash, self.start, self.tokens, self.chain, self.window)


# Reads a manifest of a namespace and checks it: its facts, and its blocks that others may find, as the index has them.
ReadManifest = Callable[[str, Digest], tuple[ManifestFacts, Sequence[SharedBlock]]]


class Unheld(Exception):
    """A version's manifest, or a blob that it names, is not in the catalog. The message names it."""


class UnreleasedLease(NamedTuple):
    line: LineKey
    token: LeaseToken
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Marks and promises older than these have rested."""

    marked_until_unix_ms: int
    promised_until_unix_ms: int


@dataclass(frozen=True, slots=True)
class Evicted:
    freed: list[Digest]
    events: list[EventBody]
    versions: int


class NotEnough(Exception):
    """Giving up all that may go would not free enough; so nothing was given up."""


# The name or hash that a slice ends with, None when there was nothing left; and sums over the slice.
Sums = tuple[str | None, list[int]]


def rested_at(now_unix_ms: int, grace_ms: int) -> Deadlines:
    """Promises are renewed only from an eighth of the grace period on (see `needs_promise`): so they rest for more."""
    return Deadlines(now_unix_ms - grace_ms, now_unix_ms - grace_ms - grace_ms // 8)


def gone_by(now_unix_ms: int, grace_ms: int) -> int:
    return now_unix_ms + grace_ms + grace_ms // 8


def needs_promise(promised_unix_ms: int, now_unix_ms: int, grace_ms: int) -> bool:
    return promised_unix_ms <= now_unix_ms - grace_ms // 8
