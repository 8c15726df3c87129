"""The transaction of an operation in a sealed namespace: the operation sees plain names, the tables get sealed ones.

So the index, its log and the journal, which catches what the tables get, hold no name, text or hash of the namespace. A
verb that is not here has nothing to seal; tests/cachestore/sealing compares this list with the port.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import (
    AgentDeleted,
    AgentRecord,
    AgentUpdated,
    AgentUsage,
    BlobDamaged,
    Committed,
    EventBatch,
    EventBody,
    EventCursor,
    LeaseToken,
    LeaseWanted,
    LineKey,
    LineQuery,
    SnapshotVersion,
)
from cachestore_svc.index.catalog import (
    AgentFilter,
    BlobEntry,
    Commit,
    Deadlines,
    Done,
    Evicted,
    History,
)
from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.index.sqlite.blobs import entries_of, find_namespace
from cachestore_svc.index.sqlite.sealed.sealed_leases import SealedLiveLeases
from cachestore_svc.index.sqlite.transaction import SqliteTransaction
from cachestore_svc.sealing.sealed_facts import (
    AGENT,
    DETAIL,
    LABEL,
    REQUEST,
    VALUE,
    seal_blob,
    seal_manifest,
    seal_shared,
)
from cachestore_svc.sealing.sealed_names import SealedNames

_Line = TypeVar("_Line", LineKey, LineQuery)


class SealedTransaction(SqliteTransaction):
    """Implements `CatalogChange`, with the names of sealed namespaces sealed."""

    def __init__(self, connection: sqlite3.Connection, names: SealedNames) -> None:
        super().__init__(connection)
        self._names = names

    def plain(self, text: str) -> str:
        return self._names.open_text(text)

    def told(self, error: BaseException) -> BaseException:
        if isinstance(error, KvasirError):
            error.message = self.plain(error.message)
            error.args = (error.message,)
            error.metadata = {name: self.plain(value) for name, value in error.metadata.items()}
        return error

    # --- blobs ---

    def find_blob(self, namespace: str, digest: Digest) -> BlobEntry | None:
        return self.find_blobs(namespace, [digest]).get(digest)

    def find_blobs(self, namespace: str, digests: Iterable[Digest]) -> dict[Digest, BlobEntry]:
        wanted = list(digests)
        plain = dict(zip(self._names.hashes(digest.hash for digest in wanted), wanted, strict=True))
        found = ((plain[blob.hash], blob) for blob in entries_of(self, namespace, list(plain)))
        return {
            digest: replace(blob, hash=digest.hash) for digest, blob in found if blob.size_bytes == digest.size_bytes
        }

    def has_hash(self, namespace: str, hash_: str) -> bool:
        return super().has_hash(namespace, self._names.hash(hash_))

    def whole_blobs(self, namespace: str) -> list[Digest]:
        return self._opened(super().whole_blobs(namespace))

    def damaged_blobs(self, namespace: str) -> list[Digest]:
        return self._opened(super().damaged_blobs(namespace))

    def blobs_after(self, namespace: str, number: int, limit: int) -> list[tuple[int, Digest]]:
        return self._opened_after(super().blobs_after(namespace, number, limit))

    def add_blob(self, namespace: str, digest: Digest, facts: BlobFacts, now_unix_ms: int) -> bool:
        return super().add_blob(namespace, self._names.digest(digest), seal_blob(self._names, facts), now_unix_ms)

    def set_damaged(self, namespace: str, digest: Digest, is_damaged: bool) -> bool:
        return super().set_damaged(namespace, self._names.digest(digest), is_damaged)

    def bound_blobs(self, namespace: str, kv_hash: str, block_hashes: Sequence[str]) -> dict[str, BlobEntry]:
        sealed = {self._names.keyed(hash_): hash_ for hash_ in block_hashes}
        found = super().bound_blobs(namespace, kv_hash, list(sealed))
        return {sealed[each]: replace(blob, hash=self._names.open_hash(blob.hash)) for each, blob in found.items()}

    def rested(self, namespace: str, deadlines: Deadlines, limit: int) -> list[tuple[int, Digest]]:
        return self._opened_after(super().rested(namespace, deadlines, limit))

    def evict(
        self, namespace: str, wanted_bytes: int, evict_heads: bool, now_unix_ms: int, deadlines: Deadlines
    ) -> Evicted:
        gone = super().evict(namespace, wanted_bytes, evict_heads, now_unix_ms, deadlines)
        return replace(gone, freed=self._opened(gone.freed), events=[self._open_event(body) for body in gone.events])

    # --- agents and versions ---

    def get_agent(self, namespace: str, agent_id: str, default_retained: int) -> AgentRecord:
        return self._open_agent(super().get_agent(namespace, self._agent(agent_id), default_retained))

    def agents_after(
        self, wanted: AgentFilter, after: str, count: int, default_retained: int
    ) -> tuple[list[str], list[AgentRecord]]:
        """The tables are not in the order of plain names, so each page looks at all of them."""
        sealed = self.all("SELECT name FROM agents WHERE namespace_id = ?", find_namespace(self, wanted.namespace))
        prefix = wanted.name_prefix
        names = sorted(name for (each,) in sealed if (name := self.plain(each)) > after and name.startswith(prefix))
        looked_at = names[:count]
        agents = [self.get_agent(wanted.namespace, name, default_retained) for name in looked_at]
        labels = wanted.labels.items()
        return looked_at, [agent for agent in agents if labels <= agent.labels.items()]

    def update_agent(
        self,
        namespace: str,
        agent_id: str,
        labels: Mapping[str, str],
        is_pinned: bool | None,
        retained_versions: int | None,
    ) -> None:
        text = self._names.text
        sealed = {text(LABEL, name): text(VALUE, value) for name, value in labels.items()}
        super().update_agent(namespace, self._agent(agent_id), sealed, is_pinned, retained_versions)

    def forget_agent(self, namespace: str, agent_id: str, force: bool, now_unix_ms: int) -> int:
        return super().forget_agent(namespace, self._agent(agent_id), force, now_unix_ms)

    def held_digests(self, namespace: str, agent_id: str) -> list[Digest]:
        return self._opened(super().held_digests(namespace, self._agent(agent_id)))

    def usage_of(self, namespace: str, agent_id: str) -> AgentUsage:
        return super().usage_of(namespace, self._agent(agent_id))

    def count_unused(self, namespace: str, agent_id: str, passed_ms: int) -> None:
        super().count_unused(namespace, self._agent(agent_id), passed_ms)

    def commit_version(self, asked: Commit, live: LiveLeases, now_unix_ms: int) -> Done:
        names, before = self._names, asked.parent_manifest
        sealed = replace(
            asked,
            line=self._line(asked.line),
            manifest=names.digest(asked.manifest),
            facts=seal_manifest(names, asked.facts),
            origin_detail=names.text(DETAIL, asked.origin_detail),
            shared=seal_shared(names, asked.shared),
            parent_manifest=None if before is None else names.digest(before),
        )
        try:
            done = super().commit_version(sealed, SealedLiveLeases(live, names), now_unix_ms)
        except KvasirError as error:
            digests = [asked.manifest, *(need.digest for need in asked.facts.named)]
            plain = {names.hash(digest.hash): digest.hash for digest in digests}
            if (hash_ := error.metadata.get("digest", "")) in plain:
                error.message = error.message.replace(hash_, plain[hash_])
                error.metadata["digest"] = plain[hash_]
            raise
        return replace(done, snapshot=self._open_snapshot(done.snapshot))

    def fork_agent(
        self, source: LineQuery, agent_id: str, version: int | None, now_unix_ms: int
    ) -> list[SnapshotVersion]:
        made = super().fork_agent(self._line(source), self._agent(agent_id), version, now_unix_ms)
        return [self._open_snapshot(each) for each in made]

    def roll_back(
        self, query: LineQuery, version: int, expected_head: int | None, default_retained: int, now_unix_ms: int
    ) -> SnapshotVersion:
        line = self._line(query)
        return self._open_snapshot(super().roll_back(line, version, expected_head, default_retained, now_unix_ms))

    def get_snapshot(self, query: LineQuery, version: int | None) -> tuple[SnapshotVersion, int]:
        snapshot, used_unix_ms = super().get_snapshot(self._line(query), version)
        return self._open_snapshot(snapshot), used_unix_ms

    def newest_of(self, line: LineQuery | LineKey) -> SnapshotVersion | None:
        found = super().newest_of(line._replace(agent_id=self._agent(line.agent_id)))
        return None if found is None else self._open_snapshot(found)

    def has_had(self, query: LineQuery, manifest_hash: str) -> bool:
        return super().has_had(self._line(query), self._names.hash(manifest_hash))

    def snapshots_after(self, query: LineQuery, before: int, after_line: str, limit: int) -> list[SnapshotVersion]:
        found = super().snapshots_after(self._line(query), before, after_line, limit)
        return [self._open_snapshot(each) for each in found]

    def use_line(self, line: LineKey, now_unix_ms: int) -> None:
        super().use_line(self._line(line), now_unix_ms)

    def named_after(self, namespace: str, manifest: Digest, position: int, limit: int) -> list[tuple[int, Digest]]:
        return self._opened_after(super().named_after(namespace, self._names.digest(manifest), position, limit))

    def is_held(self, namespace: str, manifest: Digest) -> bool:
        return super().is_held(namespace, self._names.digest(manifest))

    def held_manifests(self, namespace: str) -> list[Digest]:
        return self._opened(super().held_manifests(namespace))

    def names_others(self, namespace: str, manifest: Digest, named: Sequence[Digest]) -> bool:
        return super().names_others(namespace, self._names.digest(manifest), self._sealed(named))

    def hold_anew(self, namespace: str, manifest: Digest, named: Sequence[Digest]) -> None:
        super().hold_anew(namespace, self._names.digest(manifest), self._sealed(named))

    # --- leases and events ---

    def acquire_lease(
        self, line: LineKey, live: LiveLeases, owner: str, ttl_ms: int, *, begins_anew: bool = False
    ) -> LeaseToken:
        sealed = SealedLiveLeases(live, self._names)
        return super().acquire_lease(self._line(line), sealed, owner, ttl_ms, begins_anew=begins_anew)

    def renew_lease(self, line: LineKey, live: LiveLeases, token: LeaseToken, ttl_ms: int) -> None:
        super().renew_lease(self._line(line), SealedLiveLeases(live, self._names), token, ttl_ms)

    def release_lease(self, line: LineKey, live: LiveLeases, token: LeaseToken) -> None:
        super().release_lease(self._line(line), SealedLiveLeases(live, self._names), token)

    def fence_leases(self, query: LineQuery, live: LiveLeases) -> None:
        super().fence_leases(self._line(query), SealedLiveLeases(live, self._names))

    def held_leases(self, query: LineQuery, live: LiveLeases) -> list[LineKey]:
        held = super().held_leases(self._line(query), SealedLiveLeases(live, self._names))
        return [line._replace(agent_id=self.plain(line.agent_id)) for line in held]

    def ownership_of(self, namespace: str, agent_id: str) -> Ownership:
        return super().ownership_of(namespace, self._agent(agent_id))

    def set_ownership(self, namespace: str, agent_id: str, known: Ownership) -> None:
        super().set_ownership(namespace, self._agent(agent_id), known)

    def owners(self, namespace: str) -> list[tuple[str, Ownership]]:
        return [(self.plain(name), known) for name, known in super().owners(namespace)]

    def unfinished_moves(self, namespace: str) -> list[tuple[str, Ownership]]:
        return [(self.plain(name), known) for name, known in super().unfinished_moves(namespace)]

    def add_events(self, history: History, namespace: str, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
        super().add_events(history, namespace, [self._seal_event(body) for body in bodies], now_unix_ms)

    def events_after(self, history: History, namespace: str, cursor: EventCursor | None, limit: int) -> EventBatch:
        batch = super().events_after(history, namespace, cursor, limit)
        return replace(batch, events=tuple(replace(each, body=self._open_event(each.body)) for each in batch.events))

    # --- sealing and opening ---

    def _agent(self, agent_id: str) -> str:
        return self._names.text(AGENT, agent_id)

    def _line(self, line: _Line) -> _Line:
        return line._replace(agent_id=self._agent(line.agent_id))

    def _sealed(self, plain: Sequence[Digest]) -> list[Digest]:
        hashes = self._names.hashes(digest.hash for digest in plain)
        return [Digest(hash_, digest.size_bytes) for hash_, digest in zip(hashes, plain, strict=True)]

    def _opened(self, sealed: Sequence[Digest]) -> list[Digest]:
        hashes = self._names.open_hashes(digest.hash for digest in sealed)
        return [Digest(hash_, digest.size_bytes) for hash_, digest in zip(hashes, sealed, strict=True)]

    def _opened_after(self, sealed: Sequence[tuple[int, Digest]]) -> list[tuple[int, Digest]]:
        opened = self._opened([digest for _, digest in sealed])
        return [(number, digest) for (number, _), digest in zip(sealed, opened, strict=True)]

    def _open_agent(self, sealed: AgentRecord) -> AgentRecord:
        labels = {self.plain(name): self.plain(value) for name, value in sealed.labels.items()}
        return replace(
            sealed,
            agent_id=self.plain(sealed.agent_id),
            labels=dict(sorted(labels.items())),
            lines=tuple(self._open_snapshot(line) for line in sealed.lines),
        )

    def _open_snapshot(self, sealed: SnapshotVersion) -> SnapshotVersion:
        return replace(
            sealed,
            agent_id=self.plain(sealed.agent_id),
            manifest=self._names.open_digest(sealed.manifest),
            origin_detail=self.plain(sealed.origin_detail),
            request_id=self.plain(sealed.request_id),
        )

    def _seal_snapshot(self, snapshot: SnapshotVersion) -> SnapshotVersion:
        return replace(
            snapshot,
            agent_id=self._agent(snapshot.agent_id),
            manifest=self._names.digest(snapshot.manifest),
            origin_detail=self._names.text(DETAIL, snapshot.origin_detail),
            request_id=self._names.text(REQUEST, snapshot.request_id),
        )

    def _seal_event(self, body: EventBody) -> EventBody:
        match body:
            case Committed():
                return Committed(self._seal_snapshot(body.snapshot))
            case BlobDamaged():
                return BlobDamaged(self._names.digest(body.digest))
            case AgentDeleted() | AgentUpdated() | LeaseWanted():
                return replace(body, agent_id=self._agent(body.agent_id))

    def _open_event(self, body: EventBody) -> EventBody:
        match body:
            case Committed():
                return Committed(self._open_snapshot(body.snapshot))
            case BlobDamaged():
                return BlobDamaged(self._names.open_digest(body.digest))
            case AgentDeleted() | AgentUpdated() | LeaseWanted():
                return replace(body, agent_id=self.plain(body.agent_id))
