"""How a manifest becomes a version: everything is looked at and written in one transaction, or nothing is.

Order of questions: did this commit already take effect? may this writer extend the line? is the head the one it knows?
are its blobs here, whole, and of exactly these tokens?
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvasir.block_file import FileIdentity
from kvasir.digest import Digest
from kvasir.errors import Conflict, FailedPrecondition

from cachestore_svc import agents, blob_rows, leases, versions
from cachestore_svc.blob_rows import BlobRow
from cachestore_svc.index import Rows
from cachestore_svc.manifests import ManifestFacts, NamedBlob, unfit, unfit_schema
from cachestore_svc.records import LeaseToken, Origin, SnapshotVersion


@dataclass(frozen=True, slots=True)
class Commit:
    """What a caller asks for, with its manifest read and checked against itself."""

    namespace: str
    agent_id: str
    manifest: Digest
    facts: ManifestFacts
    parent_version: int
    lease: LeaseToken | None
    origin: Origin
    origin_detail: str
    shared_hashes: Sequence[str]  # block hashes to bind, first block first
    default_retained: int


@dataclass(frozen=True, slots=True)
class Done:
    snapshot: SnapshotVersion
    is_new: bool


def commit(rows: Rows, asked: Commit, now_unix_ms: int) -> Done:
    """Raises Conflict, FailedPrecondition; see cachestore_svc.store.Store.commit."""
    namespace_id = blob_rows.make_namespace(rows, asked.namespace)
    manifest = _find_manifest(rows, namespace_id, asked.manifest)
    kv_hash = asked.facts.kv_identity_hash
    line = versions.find_line(rows, namespace_id, asked.agent_id, kv_hash)
    if line and (repeated := _already_done(rows, line.id, asked, manifest)):
        return Done(repeated, is_new=False)
    _check_lease(rows, namespace_id, asked, now_unix_ms)
    head = versions.head_of(rows, line.id) if line else 0
    if head != asked.parent_version:
        raise head_moved(head, asked.parent_version)
    named = _fitting_blobs(rows, namespace_id, asked.facts)
    agent = agents.make_agent(rows, namespace_id, asked.agent_id, now_unix_ms)
    line_id = versions.make_line(rows, agent.id, kv_hash, now_unix_ms)
    inherited = versions.named_ids(rows, versions.manifest_id_of(rows, line_id, head)) if asked.shared_hashes else ()
    versions.hold_manifest(rows, manifest, named, len(asked.facts.token_ids), asked.facts.request_id)
    new = versions.NewVersion(head, manifest.id, asked.origin, asked.origin_detail)
    added = versions.add_version(rows, line_id, new, now_unix_ms)
    retain(rows, agent, line_id, asked.default_retained)
    _bind(rows, namespace_id, asked.shared_hashes, named, inherited)
    return Done(added, is_new=True)


def retain(rows: Rows, agent: agents.AgentRow, line_id: int, default_retained: int) -> None:
    """Let a line's oldest versions go. A pinned agent keeps all of its own."""
    if not agent.is_pinned:
        versions.retain(rows, line_id, agent.retained_versions or default_retained)


def find_prefix(rows: Rows, namespace_id: int, kv_hash: str, block_hashes: Sequence[str]) -> list[BlobRow]:
    """Blobs of the longest bound prefix; it ends at the first that is not bound, or is damaged."""
    bound = rows.all(
        """SELECT wanted.key, blobs.hash, blobs.size_bytes FROM json_each(?) AS wanted
            JOIN prefixes ON prefixes.block_hash = wanted.value JOIN blobs ON blobs.id = prefixes.blob_id
            WHERE prefixes.namespace_id = ? AND blobs.kv_identity_hash = ? AND NOT blobs.is_damaged
            ORDER BY wanted.key""",
        json.dumps(list(block_hashes)),
        namespace_id,
        kv_hash,
    )
    # Up to the first gap: block hashes after it stand for tokens whose KV is not here.
    digests = [Digest(*digest) for place, (key, *digest) in enumerate(bound) if key == place]
    found = blob_rows.find_blobs(rows, namespace_id, digests)
    return [found[digest] for digest in digests if digest in found]


def head_moved(head: int, expected: int) -> Conflict:
    return Conflict(
        f"head: expected version {expected}, it is {head}", reason="HEAD_MOVED", metadata={"head_version": str(head)}
    )


def _find_manifest(rows: Rows, namespace_id: int, digest: Digest) -> BlobRow:
    found = blob_rows.find_blob(rows, namespace_id, digest)
    if found is None:
        raise missing(digest, "manifest")
    if found.is_damaged:
        raise missing(digest, "manifest (damaged)")
    if found.kind != "manifest":
        raise _unfit(digest, f"kind: expected manifest, found {found.kind}")
    return found


def _already_done(rows: Rows, line_id: int, asked: Commit, manifest: BlobRow) -> SnapshotVersion | None:
    """The version that this very commit made before, if it did."""
    found = versions.find_version(rows, line_id, asked.parent_version + 1)
    if found is None or found.parent_version != asked.parent_version or found.manifest != manifest.digest:
        return None
    return found


def _check_lease(rows: Rows, namespace_id: int, asked: Commit, now_unix_ms: int) -> None:
    kv_hash = asked.facts.kv_identity_hash
    if asked.lease is not None:
        leases.check_not_fenced(rows, namespace_id, asked.agent_id, kv_hash, asked.lease)
    elif asked.origin is Origin.TURN:
        leases.check_not_held(rows, namespace_id, asked.agent_id, kv_hash, now_unix_ms)


def _fitting_blobs(rows: Rows, namespace_id: int, facts: ManifestFacts) -> list[BlobRow]:
    """Rows of all blobs that the manifest names, in its order. Raises FailedPrecondition naming the first that is
    missing, damaged, or not what the manifest says."""
    found = blob_rows.find_blobs(rows, namespace_id, [need.digest for need in facts.named])
    schemas: dict[str, str] = {}
    for need in facts.named:
        row = found.get(need.digest)
        if row is None:
            raise missing(need.digest, f"{need.kind} at token {need.start}")
        if row.is_damaged:
            raise missing(need.digest, f"{need.kind} at token {need.start} (damaged)")
        if problem := _misfit(rows, row, need, facts, schemas):
            raise _unfit(need.digest, problem)
    return [found[need.digest] for need in facts.named]


def _misfit(rows: Rows, row: BlobRow, need: NamedBlob, facts: ManifestFacts, schemas: dict[str, str]) -> str | None:
    if row.kv_identity_hash is None or row.start is None or row.tokens is None or row.chain is None:
        return f"kind: expected {need.kind}, found {row.kind}"
    identity = FileIdentity(row.kind, row.kv_identity_hash, row.start, row.tokens, row.chain)
    schema = row.schema_hash or ""
    if schema not in schemas:
        schemas[schema] = blob_rows.schema_of(rows, schema)
    return unfit(need, identity, facts) or unfit_schema(need, schemas[schema], facts.kv_identity)


def _bind(
    rows: Rows, namespace_id: int, block_hashes: Sequence[str], named: Sequence[BlobRow], inherited: Collection[int]
) -> None:
    """The first binding of a block hash wins, for as long as its blob is here and whole.

    A block `inherited` from the parent that the parent did not bind was imported or pulled. Nobody here computed it, so
    the turn that extends it must not make it everybody's, nor what was computed on top of it.
    """
    bound = _bound_blobs(rows, namespace_id, block_hashes) if inherited else {}
    for block_hash, blob in zip(block_hashes, named, strict=False):
        if blob.id in inherited and bound.get(block_hash) != blob.id:
            return
        rows.run(
            """INSERT INTO prefixes VALUES (?, ?, ?) ON CONFLICT (namespace_id, block_hash)
                DO UPDATE SET blob_id = excluded.blob_id
                WHERE (SELECT is_damaged FROM blobs WHERE id = prefixes.blob_id)""",
            namespace_id,
            block_hash,
            blob.id,
        )


def _bound_blobs(rows: Rows, namespace_id: int, block_hashes: Sequence[str]) -> dict[str, int]:
    """Blob ids by the block hashes that are bound."""
    found = rows.all(
        """SELECT block_hash, blob_id FROM prefixes
            WHERE namespace_id = ? AND block_hash IN (SELECT value FROM json_each(?))""",
        namespace_id,
        json.dumps(list(block_hashes)),
    )
    return {str(block_hash): int(str(blob_id)) for block_hash, blob_id in found}


def missing(digest: Digest, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{what}: blob {digest} is not here; write it and commit again",
        reason="BLOB_MISSING",
        metadata={"digest": digest.hash},
    )


def _unfit(digest: Digest, problem: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"blob {digest} does not fit its manifest: {problem}",
        reason="BLOB_UNFIT",
        metadata={"digest": digest.hash},
    )
