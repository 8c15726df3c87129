"""The cache store: agents' memories by name, in one data directory. Start reading here.

A blob is written once and named by its bytes; a snapshot is visible only once its manifest commits. Every method acts
in one namespace, given first; what belongs to another does not exist. Methods block, may be called from any thread,
and raise the types of `kvasir.errors`.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Self

from kvasir.errors import Conflict, DataLoss, NotFound
from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id
from kvasir.server.wellness import Ailment

from cachestore_svc.blobs.backend import BlobBackend
from cachestore_svc.blobs.blob_writer import BlobWriter as BlobWriter
from cachestore_svc.blobs.blob_writer import NewBlob as NewBlob
from cachestore_svc.blobs.blob_writer import finish_all as finish_all
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.manifests import read_manifest, shared_blocks
from cachestore_svc.facts.limits import check_hash, check_labels, check_range, check_text
from cachestore_svc.facts.ownership import FIRST_MOVE, check_stays_itself, check_writable
from cachestore_svc.facts.records import (
    MAX_BLOCK_HASHES_PER_REQUEST,
    MAX_PAGE_SIZE,
    MAX_RETAINED_VERSIONS,
    MAX_VERSION,
    AgentDeleted,
    AgentPage,
    AgentRecord,
    AgentUpdated,
    AgentUsage,
    CheckReport,
    Committed,
    Deletion,
    EventBatch,
    EventCursor,
    FoundPrefix,
    GcReport,
    LeaseToken,
    LineKey,
    LineQuery,
    Origin,
    SnapshotPage,
    SnapshotVersion,
    Stats,
    StoreConfig,
    Totals,
    VerifyProgress,
    detail_of_turn,
)
from cachestore_svc.index import listing
from cachestore_svc.index.catalog import AgentFilter, CatalogChange, CatalogView, Commit, Done
from cachestore_svc.index.refusals import missing
from cachestore_svc.index.resting import gone_by
from cachestore_svc.recovery.opening import open_directory
from cachestore_svc.sealing.keys import MasterKey
from cachestore_svc.sealing.sealed_form import RandomBytes
from cachestore_svc.store import prefixes
from cachestore_svc.store.owners import OwnerStore
from cachestore_svc.upkeep import check, collecting, expiring, statistics
from cachestore_svc.upkeep.expiring import ExpiryReport
from cachestore_svc.upkeep.passed_time import ClockReading
from cachestore_svc.upkeep.scrubbing import Scrubbing

# A line's time of last use is written at most this often.
_USE_RESOLUTION_MS = 1000


class Store(OwnerStore):
    """Everything that the service serves, below gRPC. What it does with blobs alone is in BlobStore, with leases in
    LeaseStore, with moves in OwnerStore. An agent that is another store's can be read, forked and deleted here; all
    that extends or changes it raises FailedPrecondition (AGENT_MOVED, AGENT_MOVING)."""

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
        blobs: BlobBackend | None = None,
        masters: Sequence[MasterKey] = (),
        random_bytes: RandomBytes = secrets.token_bytes,
    ) -> "Store":
        """Lock the data directory, bring its database to today's form, and, if it `sweeps`, remove what a crash left.

        `clock` gives Unix seconds (`time.time`), `token_hex` gives so many random bytes in hex (`secrets.token_hex`),
        `steady` monotonic seconds. `blobs` keeps the blobs' bytes; None: files in the data directory. `masters`: the
        keys that open sealed namespaces; a namespace that none of them opens refuses every request. Raises Unavailable
        (LOCKED, with the pid that holds it) and FailedPrecondition (DATA_TOO_NEW; INDEX_MISSING: there are blobs but no
        database).
        """
        disk = disk or Disk()
        return cls(
            open_directory(
                config,
                clock,
                token_hex,
                disk,
                blobs,
                sweeps=sweeps,
                steady=steady,
                masters=masters,
                random_bytes=random_bytes,
            )
        )

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
        base_version: int = 0,
        handed_over_by: str = "",
        owner_generation: int | None = None,
    ) -> SnapshotVersion:
        """Make a stored manifest the agent's next version, in its line: all or nothing, durable on return.

        `bind_shared` (engine role only) lets other agents find the manifest's shareable blocks by block hash.
        `is_brought`: rows of it came from elsewhere, as those of an import or a pull do; see `provenance`.
        `base_version`: the earlier version that a turn went on from; 0: `parent_version`. `handed_over_by`: the peer
        whose engine began the turn.
        `owner_generation`: it comes from the agent's owner, of this generation, and may renew the copy here.
        Repeating a commit that took effect answers its version. Raises Conflict (HEAD_MOVED with "head_version", or
        LEASE_FENCED), FailedPrecondition (BLOB_MISSING, BLOB_UNFIT with "digest"; LEASE_HELD: another owner has it
        now) and InvalidArgument (manifest or name).
        """
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        check_range("parent_version", parent_version, 0, MAX_VERSION)
        check_range("base_version", base_version, 0, parent_version)
        facts = read_manifest(self._manifest_bytes(namespace, manifest))
        if origin is Origin.TURN:
            origin_detail = detail_of_turn(base_version if base_version != parent_version else 0, handed_over_by)
        asked = Commit(
            LineKey(namespace, agent_id, facts.kv_identity_hash),
            manifest,
            facts,
            parent_version,
            lease,
            origin,
            origin_detail,
            shared_blocks(facts, namespace) if bind_shared else (),
            self._core.config.retained_versions,
            is_brought,
            parent_manifest,
            owner_generation,
        )
        if origin is Origin.TURN:
            done = self._write(namespace, lambda change: self._commit(change, asked))
        else:
            done = self._taking_back(LineQuery(namespace, agent_id), lambda change: self._commit(change, asked))
        self._core.counters.add(namespace, "commits" if done.is_new else "commits_repeated")
        return done.snapshot

    def get_snapshot(
        self, namespace: str, agent_id: str, kv_identity_hash: str | None = None, version: int | None = None
    ) -> SnapshotVersion:
        """One version; by default the agent's newest. Counts as a use. Raises NotFound."""
        self._core.check_open(namespace)
        query = self._query(namespace, agent_id, kv_identity_hash)
        snapshot, used_unix_ms = self._read(namespace, lambda view: view.get_snapshot(query, version))
        now = self._core.now_unix_ms()
        # Also when the clock was set back: a use is a use.
        if abs(now - used_unix_ms) > _USE_RESOLUTION_MS:
            line = LineKey(namespace, agent_id, snapshot.kv_identity_hash)
            self._core.catalog.write_later(namespace, lambda change: change.use_line(line, now))
        return snapshot

    def list_snapshots(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        page_size: int = 0,
        page_token: str = "",
    ) -> SnapshotPage:
        """Versions of an agent, or of one of its lines, newest first. Raises NotFound, InvalidArgument (token)."""
        self._core.check_open(namespace)
        query = self._query(namespace, agent_id, kv_identity_hash)
        size = listing.page_size(page_size)
        return self._read(namespace, lambda view: listing.snapshots_page(view, query, size, page_token))

    def has_had(self, namespace: str, agent_id: str, manifest_hash: str) -> bool:
        """Whether a version of the agent was this manifest, also one that is not kept any more."""
        self._core.check_open(namespace)
        query = self._query(namespace, agent_id, None)
        return self._read(namespace, lambda view: view.has_had(query, manifest_hash))

    def find_prefix(self, namespace: str, kv_identity_hash: str, block_hashes: Sequence[str]) -> list[Digest]:
        """Digests of the longest stored, shareable prefix of a chain, of the layers that keep all tokens."""
        return list(self.find_prefix_of(namespace, kv_identity_hash, block_hashes, (0,)).blocks_of(0))

    def find_prefix_of(
        self, namespace: str, kv_identity_hash: str, block_hashes: Sequence[str], groups: Sequence[int]
    ) -> FoundPrefix:
        """The longest stored, shareable prefix of a chain in all these groups of layers, 0 for those that keep all
        tokens. Extends lifetimes. Raises InvalidArgument."""
        self._core.check_open(namespace)
        prefixes.check_groups(groups)
        check_range("block_hashes", len(block_hashes), 0, MAX_BLOCK_HASHES_PER_REQUEST)
        for field, hash_ in [
            ("kv_identity_hash", kv_identity_hash),
            *(("block_hashes", each) for each in block_hashes),
        ]:
            check_hash(hash_, field)
        found = prefixes.find_prefix(self._core, namespace, kv_identity_hash, block_hashes, groups)
        self._core.counters.add(namespace, "prefix_blocks_found", sum(len(each.blocks) for each in found.groups))
        return found

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
        self._core.check_open(namespace)
        check_text(name_prefix, "name_prefix")
        check_labels(labels or {})
        wanted = AgentFilter(namespace, name_prefix, labels or {})
        kept = self._core.config.retained_versions
        size = listing.page_size(page_size)
        page = listing.agents_page(self._core.catalog, wanted, size, page_token, kept)
        return AgentPage(tuple(self._expiring(namespace, agent) for agent in page.agents), page.next_page_token)

    def get_agent(self, namespace: str, agent_id: str) -> AgentRecord:
        """One agent. Raises NotFound."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        return self._expiring(namespace, self._read(namespace, lambda view: self._record(view, namespace, agent_id)))

    def update_agent(
        self,
        namespace: str,
        agent_id: str,
        labels: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
        retained_versions: int | None = None,
        *,
        replaces_labels: bool = False,
    ) -> AgentRecord:
        """Change what is given; an empty label value removes the label, and with `replaces_labels` so does an absent
        one. Raises NotFound, InvalidArgument."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        check_labels(labels or {})
        if retained_versions is not None:
            check_range("retained_versions", retained_versions, 1, MAX_RETAINED_VERSIONS)

        def work(change: CatalogChange) -> AgentRecord:
            self._check_writable(change, namespace, agent_id)
            before = self._record(change, namespace, agent_id).labels
            check_stays_itself(before, labels or {})
            removed = dict.fromkeys(before.keys() - {FIRST_MOVE}, "") if replaces_labels else {}
            change.update_agent(namespace, agent_id, {**removed, **(labels or {})}, is_pinned, retained_versions)
            self._core.report(change, namespace, [AgentUpdated(agent_id)])
            return self._record(change, namespace, agent_id)

        return self._expiring(namespace, self._write(namespace, work))

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
        self._core.check_open(namespace)
        source = self._query(namespace, source_agent_id, kv_identity_hash)
        check_agent_id(agent_id)

        def work(change: CatalogChange) -> AgentRecord:
            self._check_writable(change, namespace, agent_id)
            made = change.fork_agent(source, agent_id, version, self._core.now_unix_ms())
            self._core.report(change, namespace, [Committed(snapshot) for snapshot in made])
            return self._record(change, namespace, agent_id)

        return self._taking_back(LineQuery(namespace, agent_id), work)

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
        self._core.check_open(namespace)
        query = self._query(namespace, agent_id, kv_identity_hash)

        def work(change: CatalogChange) -> SnapshotVersion:
            self._check_writable(change, namespace, agent_id)
            retained, now = self._core.config.retained_versions, self._core.now_unix_ms()
            snapshot = change.roll_back(query, version, expected_head, retained, now)
            self._core.report(change, namespace, [Committed(snapshot)])
            return snapshot

        return self._taking_back(LineQuery(namespace, agent_id), work)

    def delete_agent(self, namespace: str, agent_id: str, force: bool = False) -> Deletion:
        """Forget an agent and all its versions at once; of one that is another store's, the copy here. Raises NotFound,
        FailedPrecondition (AGENT_PINNED; AGENT_MOVING; LEASE_HELD while an engine may still answer from it)."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        now = self._core.now_unix_ms()

        def work(change: CatalogChange) -> int:
            known = change.ownership_of(namespace, agent_id)
            if known.is_on_its_way:
                check_writable(agent_id, known)
            unshared_bytes = change.forget_agent(namespace, agent_id, force, now)
            self._core.report(change, namespace, [AgentDeleted(agent_id)])
            return unshared_bytes

        unshared_bytes = self._taking_back(LineQuery(namespace, agent_id), work, frees_space=True)
        return Deletion(gone_by(now, self._core.grace_ms), unshared_bytes)

    # --- events ---

    def events_after(self, namespace: str, cursor: EventCursor | None, limit: int = 1000) -> EventBatch:
        """Events after a cursor; None means "from now on" and answers the cursor of now. Raises InvalidArgument."""
        self._core.check_open(namespace)
        check_range("limit", limit, 1, MAX_PAGE_SIZE)
        return self._read(namespace, lambda view: view.events_after(self._core.history, namespace, cursor, limit))

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback(namespace)` after each commit that wrote events, on a thread of the store: it must only wake
        a reader (`loop.call_soon_threadsafe`). Returns what ends it."""
        return self._core.watchers.add(callback)

    # --- care ---

    def verify(self, namespace: str, agent_id: str | None = None) -> Iterator[VerifyProgress]:
        """Re-hash the blobs of an agent or of the namespace; the damaged are quarantined. Raises NotFound."""
        self._core.check_open(namespace)
        if agent_id is not None:
            check_agent_id(agent_id)

        def work(view: CatalogView) -> list[Digest]:
            return view.whole_blobs(namespace) if agent_id is None else view.held_digests(namespace, agent_id)

        return check.verify(self._core, namespace, self._read(namespace, work))

    @cached_property
    def scrubbing(self) -> Scrubbing:
        """Where the scrub in the background is."""
        return Scrubbing(self._core)

    def scrub(self) -> Iterator[VerifyProgress]:
        """`verify` for every namespace in turn. Those that are shut are left out: without a key their bytes prove
        nothing."""
        for namespace in self._core.open_namespaces():
            yield from self.verify(namespace)

    def collect_garbage(self, namespace: str | None = None, dry_run: bool = False) -> GcReport:
        """Mark unreferenced blobs and sweep those that rested a grace period; None: in every namespace."""
        return collecting.collect(self._core, namespace, dry_run)

    def expire_agents(self, now: ClockReading) -> ExpiryReport:
        """Delete agents that were unused for longer than the configuration or their label allows. Time since the last
        call counts as far as `now` proves that it passed. Called regularly, by one thread."""
        return expiring.expire(self._core, now)

    def check(self, repair: bool = False) -> CheckReport:
        """Walk index and files both ways, in every namespace; `repair` mends what it can."""
        return check.check(self._core, repair)

    def usage(self, namespace: str, agent_id: str) -> AgentUsage:
        """The bytes behind an agent's versions, and which of them are shared. Raises NotFound."""
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        return self._read(namespace, lambda view: view.usage_of(namespace, agent_id))

    def stats(self, namespace: str) -> Stats:
        """Sizes and counters. No side effect."""
        self._core.check_open(namespace)
        return statistics.stats_of(self._core, namespace)

    def totals(self) -> Totals:
        """Sizes of all namespaces, for the store's owner. Reads the whole index, in slices."""
        return statistics.totals_of(self._core)

    def written(self) -> Mapping[str, int | bool]:
        """Bytes of blobs that all namespaces wrote today (UTC), and the budget, for the store's owner."""
        budget = self._core.write_budget
        today = sum(budget.today().values())
        return {"today_bytes": today, "budget_bytes": budget.budget_bytes or 0, "is_spent": budget.is_spent}

    def counted(self) -> Mapping[str, int]:
        """Counts since the start, summed over namespaces."""
        return self._core.counters.of_all()

    def ailments(self) -> list[Ailment]:
        """What is wrong with the store, for its owner. Raises where the index does not answer."""
        return statistics.ailments_of(self._core)

    # --- inside ---

    def _manifest_bytes(self, namespace: str, manifest: Digest) -> memoryview:
        try:
            return self._core.read_blob(namespace, manifest)
        except (NotFound, DataLoss) as error:
            raise missing(manifest, "manifest") from error

    def _commit(self, change: CatalogChange, asked: Commit) -> Done:
        namespace = asked.line.namespace
        try:
            done = change.commit_version(asked, self._core.leases, self._core.now_unix_ms())
        except Conflict:
            self._core.counters.add(namespace, "conflicts")
            raise
        if done.is_new:
            self._core.report(change, namespace, [Committed(done.snapshot)])
        return done

    def _record(self, view: CatalogView, namespace: str, agent_id: str) -> AgentRecord:
        return view.get_agent(namespace, agent_id, self._core.config.retained_versions)

    def _expiring(self, namespace: str, agent: AgentRecord) -> AgentRecord:
        """The agent with the earliest time at which it may be deleted."""
        left = expiring.left_ms(agent, namespace, self._core.config)
        return agent if left is None else replace(agent, expires_unix_ms=self._core.now_unix_ms() + max(left, 0))

    def _query(self, namespace: str, agent_id: str, kv_identity_hash: str | None) -> LineQuery:
        check_agent_id(agent_id)
        if kv_identity_hash is not None:
            check_hash(kv_identity_hash, "kv_identity_hash")
        return LineQuery(namespace, agent_id, kv_identity_hash)
