"""The cache store: agents' memories by name, in one data directory. Start reading here.

A blob is written once and named by its bytes; a snapshot is visible only once its manifest commits. Every method acts
in one namespace, given first; what belongs to another does not exist. Methods block, may be called from any thread,
and raise the types of `kvasir.errors`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvasir.digest import Digest

from cachestore_svc.disk import Disk
from cachestore_svc.records import (
    DEFAULT_LEASE_TTL_S,
    AgentPage,
    AgentRecord,
    BlobKind,
    CheckReport,
    Deletion,
    EventBatch,
    EventCursor,
    GcReport,
    Lease,
    LeaseToken,
    Origin,
    SnapshotPage,
    SnapshotVersion,
    Stats,
    StoreConfig,
    VerifyProgress,
    WriteStatus,
)


class BlobWriter(Protocol):
    """One blob on its way in. Used as a context manager; leaving it without `finish` keeps the part for resumption."""

    @property
    def is_stored(self) -> bool:
        """The store had it already: `write` and `finish` then do nothing."""

    @property
    def received_bytes(self) -> int:
        """Where the next `write` must begin; what an interrupted write left counts."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Append bytes. The tensor header is checked as soon as it is whole, before any further byte is kept.

        Raises InvalidArgument (offset is not `received_bytes`, more bytes than the digest says, header refused) and
        ResourceExhausted (disk full). After a refused header the part is gone.
        """

    def finish(self) -> None:
        """Verify, make durable, and list the blob. On return it survives a crash.

        Raises InvalidArgument (DIGEST_MISMATCH: bytes are missing or are not the digest's; the part is gone unless
        bytes are only missing) and ResourceExhausted.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store:
    """Everything that the service serves, below gRPC."""

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        clock: Callable[[], float],
        token_hex: Callable[[int], str],
        disk: Disk | None = None,
    ) -> "Store":
        """Lock the data directory, bring its database to today's form, and sweep what a crash left.

        `clock` tells Unix seconds (`time.time`), `token_hex` gives so many random bytes in hex (`secrets.token_hex`).
        Raises Unavailable (LOCKED, with the pid that holds it) and FailedPrecondition (DATA_TOO_NEW).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Finish what is queued, then let go of the data directory. Further calls raise Unavailable."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- blobs ---

    def find_missing(self, namespace: str, digests: Sequence[Digest]) -> list[Digest]:
        """Those that the namespace lacks or holds damaged, in the order asked. Extends the others' lifetimes."""
        raise NotImplementedError

    def open_writer(self, namespace: str, digest: Digest, kind: BlobKind) -> BlobWriter:
        """Reserve room for a blob and begin, or go on, writing it.

        A full quota first gives up what eviction may. Raises ResourceExhausted (QUOTA_FULL, DISK_FULL, with numbers),
        FailedPrecondition (WRITE_IN_PROGRESS: another writer has it open) and InvalidArgument (BLOB_TOO_LARGE).
        """
        raise NotImplementedError

    def write_status(self, namespace: str, digest: Digest) -> WriteStatus:
        """How much of a blob has arrived. No side effect."""
        raise NotImplementedError

    def read_blob(self, namespace: str, digest: Digest) -> memoryview:
        """The blob's bytes, verified. Raises NotFound, and DataLoss (metadata "digest") when they are damaged: the
        blob is then quarantined, an event says so, and a later write may replace it."""
        raise NotImplementedError

    def damaged(self, namespace: str) -> list[Digest]:
        """Blobs in quarantine."""
        raise NotImplementedError

    # --- snapshots ---

    def commit(
        self,
        namespace: str,
        agent_id: str,
        manifest: Digest,
        parent_version: int,
        lease: LeaseToken | None = None,
        bind_shared: bool = False,
        origin: Origin = Origin.TURN,
        origin_detail: str = "",
    ) -> SnapshotVersion:
        """Make a stored manifest the next version of its line: all or nothing, durable on return.

        `bind_shared` (engine role only) lets other agents find the manifest's shareable blocks by block hash.
        Repeating a commit that took effect answers its version. Raises Conflict (HEAD_MOVED with "head_version", or
        LEASE_FENCED), FailedPrecondition (BLOB_MISSING, BLOB_UNFIT with "digest"; LEASE_HELD: another owner has it
        now) and InvalidArgument (manifest or name).
        """
        raise NotImplementedError

    def get_snapshot(
        self, namespace: str, agent_id: str, kv_identity_hash: str | None = None, version: int | None = None
    ) -> SnapshotVersion:
        """One version; by default the newest of the line used last. Counts as a use. Raises NotFound."""
        raise NotImplementedError

    def list_snapshots(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        page_size: int = 0,
        page_token: str = "",
    ) -> SnapshotPage:
        """Versions of an agent's lines, newest first within each line. Raises NotFound, InvalidArgument (token)."""
        raise NotImplementedError

    def snapshot_digests(
        self, namespace: str, agent_id: str, kv_identity_hash: str | None = None, version: int | None = None
    ) -> list[Digest]:
        """The blobs that a version's manifest names, in its order: blocks, tail, states; each once. Raises NotFound."""
        raise NotImplementedError

    def find_prefix(self, namespace: str, kv_identity_hash: str, block_hashes: Sequence[str]) -> list[Digest]:
        """Digests of the longest stored, shareable prefix of a chain. Extends lifetimes. Raises InvalidArgument."""
        raise NotImplementedError

    # --- agents ---

    def list_agents(
        self,
        namespace: str,
        page_size: int = 0,
        page_token: str = "",
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> AgentPage:
        """Agents by name, those that have all the labels. Raises InvalidArgument (token, page size)."""
        raise NotImplementedError

    def get_agent(self, namespace: str, agent_id: str) -> AgentRecord:
        """One agent. Raises NotFound."""
        raise NotImplementedError

    def update_agent(
        self,
        namespace: str,
        agent_id: str,
        labels: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
        retained_versions: int | None = None,
    ) -> AgentRecord:
        """Change what is given; an empty label value removes the label. Raises NotFound, InvalidArgument."""
        raise NotImplementedError

    def fork_agent(
        self,
        namespace: str,
        source_agent_id: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        version: int | None = None,
    ) -> AgentRecord:
        """Start an agent whose first versions are those of another. Copies no blob. Raises NotFound, AlreadyExists."""
        raise NotImplementedError

    def rollback_agent(
        self,
        namespace: str,
        agent_id: str,
        version: int,
        kv_identity_hash: str | None = None,
        expected_head: int | None = None,
    ) -> SnapshotVersion:
        """Make an old version the newest again, as a new version. Raises NotFound, Conflict (head moved)."""
        raise NotImplementedError

    def delete_agent(self, namespace: str, agent_id: str, force: bool = False) -> Deletion:
        """Forget an agent and all its versions at once. Raises NotFound, FailedPrecondition (AGENT_PINNED)."""
        raise NotImplementedError

    # --- leases ---

    def acquire_lease(
        self, namespace: str, agent_id: str, kv_identity_hash: str, owner: str, ttl_s: float = DEFAULT_LEASE_TTL_S
    ) -> Lease:
        """Take the right to extend a line; it need not exist yet. The owner of a live lease gets it prolonged. Raises
        FailedPrecondition (LEASE_HELD with "owner" and "expires_unix_ms")."""
        raise NotImplementedError

    def renew_lease(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str,
        token: LeaseToken,
        ttl_s: float = DEFAULT_LEASE_TTL_S,
    ) -> Lease:
        """Prolong a lease, also one that ended and that nobody else took. Raises Conflict (LEASE_FENCED), NotFound."""
        raise NotImplementedError

    def release_lease(self, namespace: str, agent_id: str, kv_identity_hash: str, token: LeaseToken) -> None:
        """Give a lease back; its generation stays remembered. Raises Conflict (LEASE_FENCED), NotFound."""
        raise NotImplementedError

    # --- events ---

    def events_after(self, namespace: str, cursor: EventCursor | None, limit: int = 1000) -> EventBatch:
        """Events after a cursor; None means "from now on" and answers the cursor of now. Raises InvalidArgument."""
        raise NotImplementedError

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback(namespace)` after each commit that wrote events, on a thread of the store: it must only wake
        somebody (`loop.call_soon_threadsafe`). Returns what ends it."""
        raise NotImplementedError

    # --- care ---

    def verify(self, namespace: str, agent_id: str | None = None) -> Iterator[VerifyProgress]:
        """Re-hash the blobs of an agent or of the namespace; the damaged are quarantined. Raises NotFound."""
        raise NotImplementedError

    def scrub(self) -> Iterator[VerifyProgress]:
        """`verify` for every namespace in turn."""
        raise NotImplementedError

    def collect_garbage(self, namespace: str | None = None, dry_run: bool = False) -> GcReport:
        """Mark unreferenced blobs and sweep those that rested a grace period; None: in every namespace."""
        raise NotImplementedError

    def check(self, repair: bool = False) -> CheckReport:
        """Walk index and files both ways, in every namespace; `repair` mends what it can."""
        raise NotImplementedError

    def stats(self, namespace: str) -> Stats:
        """Sizes and counters. No side effect."""
        raise NotImplementedError
