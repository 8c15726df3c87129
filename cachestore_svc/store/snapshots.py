"""Versions of agents' lines: committed, read, listed."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from kvasir.errors import Conflict, DataLoss, NotFound
from kvasir.formats.digest import Digest
from kvasir.names import check_agent_id

from cachestore_svc.blobs.known_manifests import KnownManifest as KnownManifest
from cachestore_svc.blobs.known_manifests import KnownManifests
from cachestore_svc.blobs.known_manifests import bytes_of as bytes_of
from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import read_blob
from cachestore_svc.facts import records
from cachestore_svc.facts.limits import check_query, check_range
from cachestore_svc.index import listing
from cachestore_svc.index.catalog import SLICE, CatalogChange
from cachestore_svc.index.refusals import missing
from cachestore_svc.index.values import Commit, CommitTerms, Done
from cachestore_svc.store.leases import Leases

_USE_RESOLUTION_MS = 1000  # A line's time of last use is written at most this often
_OF_A_TURN = CommitTerms()


@dataclass(frozen=True, slots=True)
class EarlyCommit:
    """A commit that waits for blobs which are on their way, and the place for its outcome: until it begins, `answer`
    may be cancelled.
    """

    known: KnownManifest
    awaited: Sequence[Digest]
    answer: "Future[Done]"


class Snapshots:
    def __init__(self, core: Core, leases: Leases) -> None:
        self._core = core
        self._leases = leases
        self._manifests = KnownManifests()

    def known(
        self, namespace: str, manifest: Digest, data: memoryview | bytes = b"", *, bind_shared: bool = True
    ) -> KnownManifest:
        """Read a stored manifest for its commit. Raises FailedPrecondition (BLOB_MISSING) and InvalidArgument. `data`:
        bytes that came for it, perhaps others than its own.
        """
        try:
            is_its_own = len(data) == manifest.size_bytes and Digest.of(data) == manifest
            its_bytes = data if is_its_own else read_blob(self._core, namespace, manifest)
        except (NotFound, DataLoss) as error:
            raise missing(manifest, "manifest") from error
        return self._manifests.read(namespace, manifest, its_bytes, bind_shared=bind_shared)

    def commit(
        self,
        namespace: str,
        agent_id: str,
        manifest: Digest,
        parent_version: int,
        terms: CommitTerms = _OF_A_TURN,
        known: KnownManifest | None = None,
    ) -> records.SnapshotVersion:
        """Make a stored manifest the agent's next version, in its line: all or nothing, durable on return. Repeating a
        commit that took effect answers its version. Raises Conflict (HEAD_MOVED with "head_version", or LEASE_FENCED),
        FailedPrecondition (BLOB_MISSING, BLOB_UNFIT with "digest"; LEASE_HELD: another owner has it now) and
        InvalidArgument (manifest or name). `known`: the manifest, where it has been read.
        """
        return self._committed(self._asked(namespace, agent_id, manifest, parent_version, terms, known))

    def commit_early(
        self,
        namespace: str,
        early: EarlyCommit,
        agent_id: str,
        manifest: Digest,
        parent_version: int,
        terms: CommitTerms,
    ) -> None:
        """As `commit`, of a turn, once the last awaited blob is listed: in the same transaction, if that is possible.
        Other blobs of the manifest must be there.
        """
        asked = self._asked(namespace, agent_id, manifest, parent_version, terms, early.known)
        self._core.early_commits.add(
            namespace,
            early.awaited,
            lambda: self._core.catalog.write_later(namespace, partial(self._commit, asked=asked)),
            lambda: self._listed(namespace, early.awaited),
            early.answer,
        )

    def _listed(self, namespace: str, blobs: Sequence[Digest]) -> Collection[Digest]:
        """Those of the blobs that are listed, with all that are being listed now: reads overtake writes."""
        slices = (blobs[start : start + SLICE] for start in range(0, len(blobs), SLICE))
        return [digest for some in slices for digest in self._core.write(namespace, partial(_found, some))]

    def _asked(
        self,
        namespace: str,
        agent_id: str,
        manifest: Digest,
        parent_version: int,
        terms: CommitTerms,
        known: KnownManifest | None,
    ) -> Commit:
        self._core.check_open(namespace)
        check_agent_id(agent_id)
        check_range("parent_version", parent_version, 0, records.MAX_VERSION)
        check_range("base_version", terms.base_version, 0, parent_version)
        known = known or self.known(namespace, manifest, bind_shared=terms.bind_shared)
        facts = known.facts
        if terms.origin is records.Origin.TURN:
            base_version = terms.base_version if terms.base_version != parent_version else 0
            detail = records.detail_of_turn(base_version, terms.handed_over_by, facts.wake_ms)
        else:
            detail = records.with_wake(terms.origin_detail, facts.wake_ms)
        terms = replace(terms, origin_detail=detail)
        line = records.LineKey(namespace, agent_id, facts.kv_identity_hash)
        shared = known.shared if terms.bind_shared else ()
        kept = self._core.config.retained_versions
        return Commit(line, manifest, facts, parent_version, terms, shared, kept)

    def _committed(self, asked: Commit) -> records.SnapshotVersion:
        namespace = asked.line.namespace
        if asked.terms.origin is records.Origin.TURN:
            done = self._core.write(namespace, partial(self._commit, asked=asked))
        else:
            work = partial(self._commit, asked=asked)
            done = self._leases.taking_back(namespace, asked.line.agent_id, work)
        return done.snapshot

    def get(
        self, namespace: str, agent_id: str, kv_identity_hash: str | None = None, version: int | None = None
    ) -> records.SnapshotVersion:
        """One version; by default the agent's newest. Counts as a use. Raises NotFound."""
        query = check_query(agent_id, kv_identity_hash)
        snapshot, used_unix_ms = self._core.read(namespace, lambda view: view.get_snapshot(query, version))
        now = self._core.now_unix_ms()
        # Also when the clock was set back: a use is a use.
        if abs(now - used_unix_ms) > _USE_RESOLUTION_MS:
            line = records.LineKey(namespace, agent_id, snapshot.kv_identity_hash)
            self._core.catalog.write_later(namespace, lambda change: change.use_line(line, now))
        return snapshot

    def page(
        self,
        namespace: str,
        agent_id: str,
        kv_identity_hash: str | None = None,
        page_size: int = 0,
        page_token: str = "",
    ) -> records.SnapshotPage:
        """Versions of an agent, or of one of its lines, newest first. Raises NotFound, InvalidArgument (token)."""
        query = check_query(agent_id, kv_identity_hash)
        size = listing.page_size(page_size)
        return self._core.read(namespace, lambda view: listing.snapshots_page(view, query, size, page_token))

    def has_had(self, namespace: str, agent_id: str, manifest_hash: str) -> bool:
        """Whether a version of the agent was this manifest, also one that is not kept any more."""
        query = check_query(agent_id)
        return self._core.read(namespace, lambda view: view.has_had(query, manifest_hash))

    def _commit(self, change: CatalogChange, asked: Commit) -> Done:
        namespace = asked.line.namespace
        try:
            done = change.commit_version(asked, self._core.leases, self._core.now_unix_ms())
        except Conflict:
            self._core.counters.add(namespace, "conflicts")
            raise
        if done.is_new:
            self._core.report(change, namespace, [records.Committed(done.snapshot)])
        name = "commits" if done.is_new else "commits_repeated"
        change.after_commit(lambda: self._core.counters.add(namespace, name))
        return done


def _found(blobs: Sequence[Digest], change: CatalogChange) -> Collection[Digest]:
    return change.find_blobs(blobs)
