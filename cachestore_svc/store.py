"""The cache store: agents' memories by name, in one data directory. Start reading here.

A blob is written once and named by its bytes; a snapshot is visible only once its manifest commits. Every method acts
in one namespace, given first; what belongs to another does not exist. Methods block, may be called from any thread,
and raise the types of `kvasir.errors`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from kvasir.errors import Conflict, DataLoss, FailedPrecondition, NotFound
from kvasir.formats.block_hash import block_hash_chain
from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id, check_namespace

from cachestore_svc.blobs.blob_writer import BlobWriter as BlobWriter
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.sqlite import agents, committing, garbage, lineage, listing, versions
from cachestore_svc.index.sqlite.blob_rows import all_blobs, find_namespace
from cachestore_svc.index.sqlite.index import SLICE, Rows
from cachestore_svc.lease_store import LeaseStore
from cachestore_svc.limits import check_hash, check_range, check_text
from cachestore_svc.manifests import read_manifest
from cachestore_svc.records import (
    BLOCK_TOKENS,
    MAX_BLOCK_HASHES_PER_REQUEST,
    MAX_PAGE_SIZE,
    MAX_RETAINED_VERSIONS,
    MAX_VERSION,
    AgentDeleted,
    AgentPage,
    AgentRecord,
    AgentUpdated,
    CheckReport,
    Committed,
    Deletion,
    EventBatch,
    EventCursor,
    GcReport,
    LeaseToken,
    Origin,
    SnapshotPage,
    SnapshotVersion,
    Stats,
    StoreConfig,
    VerifyProgress,
)
from cachestore_svc.recovery.opening import open_directory
from cachestore_svc.upkeep import check, collecting, statistics

# A line's time of last use is written at most this often.
_USE_RESOLUTION_MS = 1000


class Store(LeaseStore):
    """Everything that the service serves, below gRPC. What it does with blobs alone is in BlobStore, with leases in
    LeaseStore."""

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        clock: Callable[[], float],
        token_hex: Callable[[int], str],
        disk: Disk | None = None,
        *,
        sweeps: bool = True,
        steady: Callable[[], float] = time.monotonic,
    ) -> "Store":
        """Lock the data directory, bring its database to today's form, and, if it `sweeps`, remove what a crash left.

        `clock` tells Unix seconds (`time.time`), `token_hex` gives so many random bytes in hex (`secrets.token_hex`),
        `steady` seconds that nobody sets.
        Raises Unavailable (LOCKED, with the pid that holds it) and FailedPrecondition (DATA_TOO_NEW; INDEX_MISSING:
        there are blobs but no database).
        """
        return cls(open_directory(config, clock, token_hex, disk or Disk(), sweeps=sweeps, steady=steady))

    def close(self) -> None:
        """Finish what is queued, then let go of the data directory. Further calls raise Unavailable."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        *,
        is_brought: bool = False,
        parent_manifest: Digest | None = None,
    ) -> SnapshotVersion:
        """Make a stored manifest the next version of its line: all or nothing, durable on return.

        `bind_shared` (engine role only) lets other agents find the manifest's shareable blocks by block hash.
        `is_brought`: rows of it came from elsewhere, as those of an import or a pull do; see `provenance`.
        Repeating a commit that took effect answers its version. Raises Conflict (HEAD_MOVED with "head_version", or
        LEASE_FENCED), FailedPrecondition (BLOB_MISSING, BLOB_UNFIT with "digest"; LEASE_HELD: another owner has it
        now) and InvalidArgument (manifest or name).
        """
        check_namespace(namespace)
        check_agent_id(agent_id)
        check_range("parent_version", parent_version, 0, MAX_VERSION)
        facts = read_manifest(self._manifest_bytes(namespace, manifest))
        committing.check_states(self._core.index, namespace, facts)
        shared = facts.token_ids[: facts.shareable_blocks * BLOCK_TOKENS] if bind_shared else []
        asked = committing.Commit(
            namespace,
            agent_id,
            manifest,
            facts,
            parent_version,
            lease,
            origin,
            origin_detail,
            block_hash_chain(namespace, facts.kv_identity_hash, shared),
            self._core.config.retained_versions,
            is_brought,
            parent_manifest,
        )
        if origin is Origin.TURN:
            done = self._write(namespace, lambda rows: self._commit(rows, asked))
        else:
            done = self._taking_back(
                namespace, agent_id, facts.kv_identity_hash, lambda rows: self._commit(rows, asked)
            )
        self._core.counters.add(namespace, "commits" if done.is_new else "commits_repeated")
        return done.snapshot

    def get_snapshot(
        self, namespace: str, agent_id: str, kv_identity_hash: str | None = None, version: int | None = None
    ) -> SnapshotVersion:
        """One version; by default the newest of the line used last. Counts as a use. Raises NotFound."""
        check_namespace(namespace)
        self._check_line(agent_id, kv_identity_hash)
        line, snapshot = self._read(
            namespace, lambda rows: self._snapshot(rows, namespace, agent_id, kv_identity_hash, version)
        )
        now = self._core.now_unix_ms()
        if now - line.used_unix_ms > _USE_RESOLUTION_MS:
            self._core.index.write_later(namespace, lambda rows: versions.use_line(rows, line.id, now))
        return snapshot

    def list_snapshots(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        page_size: int = 0,
        page_token: str = "",
    ) -> SnapshotPage:
        """Versions of an agent's lines, newest first within each line. Raises NotFound, InvalidArgument (token)."""
        check_namespace(namespace)
        self._check_line(agent_id, kv_identity_hash)
        size = listing.page_size(page_size)
        return self._read(
            namespace, lambda rows: listing.snapshots(rows, namespace, agent_id, kv_identity_hash, size, page_token)
        )

    def find_prefix(self, namespace: str, kv_identity_hash: str, block_hashes: Sequence[str]) -> list[Digest]:
        """Digests of the longest stored, shareable prefix of a chain. Extends lifetimes. Raises InvalidArgument."""
        check_namespace(namespace)
        check_range("block_hashes", len(block_hashes), 0, MAX_BLOCK_HASHES_PER_REQUEST)
        for field, hash_ in [
            ("kv_identity_hash", kv_identity_hash),
            *(("block_hashes", each) for each in block_hashes),
        ]:
            check_hash(hash_, field)
        found: list[Digest] = []
        for start in range(0, len(block_hashes), SLICE):
            some = block_hashes[start : start + SLICE]
            found += self._prefix_of(namespace, kv_identity_hash, some)
            if len(found) < start + len(some):
                break
        self._core.counters.add(namespace, "prefix_blocks_found", len(found))
        return found

    def _prefix_of(self, namespace: str, kv_identity_hash: str, block_hashes: Sequence[str]) -> list[Digest]:
        found = self._core.promised(
            namespace, lambda rows, space: committing.find_prefix(rows, space, kv_identity_hash, block_hashes)
        )
        return [blob.digest for blob in found]

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
        check_namespace(namespace)
        check_text(name_prefix, "name_prefix")
        agents.check_labels(labels or {})
        wanted = listing.AgentFilter(namespace, name_prefix, labels or {})
        size, after = listing.page_size(page_size), listing.page_place(page_token)
        kept = self._core.config.retained_versions
        return listing.agents_page(partial(self._read, namespace), wanted, after, size, kept)

    def get_agent(self, namespace: str, agent_id: str) -> AgentRecord:
        """One agent. Raises NotFound."""
        check_namespace(namespace)
        check_agent_id(agent_id)
        return self._read(namespace, lambda rows: self._record(rows, namespace, agent_id))

    def update_agent(
        self,
        namespace: str,
        agent_id: str,
        labels: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
        retained_versions: int | None = None,
    ) -> AgentRecord:
        """Change what is given; an empty label value removes the label. Raises NotFound, InvalidArgument."""
        check_namespace(namespace)
        check_agent_id(agent_id)
        agents.check_labels(labels or {})
        if retained_versions is not None:
            check_range("retained_versions", retained_versions, 1, MAX_RETAINED_VERSIONS)

        def work(rows: Rows) -> AgentRecord:
            agent = agents.get_agent(rows, find_namespace(rows, namespace), agent_id)
            agents.update(rows, agent, labels or {}, is_pinned, retained_versions)
            self._core.tell(rows, namespace, [AgentUpdated(agent_id)])
            return self._record(rows, namespace, agent_id)

        return self._write(namespace, work)

    def fork_agent(
        self,
        namespace: str,
        source_agent_id: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        version: int | None = None,
    ) -> AgentRecord:
        """Start an agent whose first versions are those of another. Copies no blob. Raises NotFound, AlreadyExists, and
        FailedPrecondition (LEASE_HELD) while an engine may answer under the new name."""
        check_namespace(namespace)
        self._check_line(source_agent_id, kv_identity_hash)
        check_agent_id(agent_id)

        def work(rows: Rows) -> AgentRecord:
            made = lineage.fork(
                rows, namespace, source_agent_id, agent_id, kv_identity_hash, version, self._core.now_unix_ms()
            )
            self._core.tell(rows, namespace, [Committed(snapshot) for snapshot in made])
            return self._record(rows, namespace, agent_id)

        return self._taking_back(namespace, agent_id, None, work)

    def rollback_agent(
        self,
        namespace: str,
        agent_id: str,
        version: int,
        kv_identity_hash: str | None = None,
        expected_head: int | None = None,
    ) -> SnapshotVersion:
        """Make an old version the newest again, as a new version. Raises NotFound, Conflict (head moved),
        FailedPrecondition (LEASE_HELD) while an engine may still answer from what is taken back."""
        check_namespace(namespace)
        self._check_line(agent_id, kv_identity_hash)

        def work(rows: Rows) -> SnapshotVersion:
            snapshot = lineage.roll_back(
                rows,
                namespace,
                agent_id,
                kv_identity_hash,
                version,
                expected_head,
                self._core.config.retained_versions,
                self._core.now_unix_ms(),
            )
            self._core.tell(rows, namespace, [Committed(snapshot)])
            return snapshot

        return self._taking_back(namespace, agent_id, kv_identity_hash, work)

    def delete_agent(self, namespace: str, agent_id: str, force: bool = False) -> Deletion:
        """Forget an agent and all its versions at once. Raises NotFound, FailedPrecondition (AGENT_PINNED; LEASE_HELD
        while an engine may still answer from what is taken back)."""
        check_namespace(namespace)
        check_agent_id(agent_id)
        now = self._core.now_unix_ms()

        def work(rows: Rows) -> int:
            agent = agents.get_agent(rows, find_namespace(rows, namespace), agent_id)
            if agent.is_pinned and not force:
                raise FailedPrecondition("the agent is pinned", reason="AGENT_PINNED")
            unheld = agents.delete_agent(rows, agent)
            garbage.mark(rows, unheld, now)
            self._core.tell(rows, namespace, [AgentDeleted(agent_id)])
            return garbage.bytes_of(rows, unheld)

        unshared = self._taking_back(namespace, agent_id, None, work, frees_space=True)
        return Deletion(garbage.gone_by(now, self._core.grace_ms), unshared)

    # --- events ---

    def events_after(self, namespace: str, cursor: EventCursor | None, limit: int = 1000) -> EventBatch:
        """Events after a cursor; None means "from now on" and answers the cursor of now. Raises InvalidArgument."""
        check_namespace(namespace)
        check_range("limit", limit, 1, MAX_PAGE_SIZE)
        return self._read(namespace, lambda rows: self._core.history.after(rows, namespace, cursor, limit))

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback(namespace)` after each commit that wrote events, on a thread of the store: it must only wake
        somebody (`loop.call_soon_threadsafe`). Returns what ends it."""
        return self._core.watchers.add(callback)

    # --- care ---

    def verify(self, namespace: str, agent_id: str | None = None) -> Iterator[VerifyProgress]:
        """Re-hash the blobs of an agent or of the namespace; the damaged are quarantined. Raises NotFound."""
        check_namespace(namespace)
        if agent_id is not None:
            check_agent_id(agent_id)

        def work(rows: Rows) -> list[Digest]:
            space = find_namespace(rows, namespace)
            if agent_id is None:
                return all_blobs(rows, space)
            return agents.held_digests(rows, agents.get_agent(rows, space, agent_id))

        return check.verify(self._core, namespace, self._read(namespace, work))

    def scrub(self) -> Iterator[VerifyProgress]:
        """`verify` for every namespace in turn."""
        for namespace in self._core.sound_namespaces():
            yield from self.verify(namespace)

    def collect_garbage(self, namespace: str | None = None, dry_run: bool = False) -> GcReport:
        """Mark unreferenced blobs and sweep those that rested a grace period; None: in every namespace."""
        return collecting.collect(self._core, namespace, dry_run)

    def check(self, repair: bool = False) -> CheckReport:
        """Walk index and files both ways, in every namespace; `repair` mends what it can."""
        return check.check(self._core, repair)

    def stats(self, namespace: str) -> Stats:
        """Sizes and counters. No side effect."""
        check_namespace(namespace)
        return statistics.of(self._core, namespace)

    # --- inside ---

    def _manifest_bytes(self, namespace: str, manifest: Digest) -> memoryview:
        try:
            return self._core.read_blob(namespace, manifest)
        except (NotFound, DataLoss) as error:
            raise committing.missing(manifest, "manifest") from error

    def _commit(self, rows: Rows, asked: committing.Commit) -> committing.Done:
        try:
            done = committing.commit(rows, asked, self._core.leases, self._core.now_unix_ms())
        except Conflict:
            self._core.counters.add(asked.namespace, "conflicts")
            raise
        if done.is_new:
            self._core.tell(rows, asked.namespace, [Committed(done.snapshot)])
        return done

    def _snapshot(
        self, rows: Rows, namespace: str, agent_id: str, kv_hash: str | None, version: int | None
    ) -> tuple[versions.Line, SnapshotVersion]:
        line = versions.get_line(rows, find_namespace(rows, namespace), agent_id, kv_hash)
        return line, versions.get_version(rows, line, version)

    def _record(self, rows: Rows, namespace: str, agent_id: str) -> AgentRecord:
        agent = agents.get_agent(rows, find_namespace(rows, namespace), agent_id)
        return agents.record(rows, agent, self._core.config.retained_versions)

    def _check_line(self, agent_id: str, kv_hash: str | None) -> None:
        check_agent_id(agent_id)
        if kv_hash is not None:
            check_hash(kv_hash, "kv_identity_hash")
