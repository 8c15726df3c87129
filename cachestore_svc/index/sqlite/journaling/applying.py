"""Writes a journal's changes into the database; a version's blobs are read from its manifest, and must have rows."""

from collections.abc import Callable, Iterable
from typing import Any

from kvasir.formats.digest import Digest

from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import LineQuery, Origin
from cachestore_svc.index.sqlite import agents, blobs, committing, versions
from cachestore_svc.index.sqlite.rights import leases, owners
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.index.values import ReadManifest, Unheld
from cachestore_svc.journal.replay import Change, Version, VersionKey


def apply_changes(rows: Rows, read: ReadManifest, changes: Iterable[Change]) -> None:
    """Let changes of a journal happen. Raises Unheld, and as `read`."""
    for kind, namespace, *rest in changes:
        if kind == "version":
            agent, kv_hash, number, *facts = rest
            hold_version(rows.of(namespace), read, agent, (kv_hash, number), Version._make(facts))
        else:
            _HOW[kind](rows.of(namespace), *rest)


def fence_changes(rows: Rows, changes: Iterable[Change]) -> None:
    """Shut out late writers of memories that these changes took back: leases are not in the journal."""
    for kind, namespace, agent, *rest in changes:
        is_taken_back = kind == "version" and Version._make(rest[2:]).origin != Origin.TURN
        if is_taken_back or kind in ("forget", "owner"):
            leases.fence_all(rows.of(namespace), agent)


def hold_version(rows: Rows, read: ReadManifest, agent_id: str, key: VersionKey, new: Version) -> None:
    """Write a version with the number that it had. Raises Unheld, and as `read`."""
    kv_hash, number = key
    manifest = blobs.find_blob(rows, Digest(new.manifest_hash, new.manifest_size_bytes))
    if manifest is None:
        raise Unheld(f"its manifest {new.manifest_hash} is not here")
    facts, shared = read(rows.namespace, manifest.digest)
    found = blobs.find_blobs(rows, [need.digest for need in facts.named])
    if missing := next((need.digest for need in facts.named if need.digest not in found), None):
        raise Unheld(f"blob {missing} is not here")
    named = [found[need.digest] for need in facts.named]
    agent = agents.make_agent(rows, agent_id, new.created_unix_ms)
    line_id = versions.make_line(rows, agent.id, kv_hash, new.created_unix_ms)
    versions.hold_manifest(rows, manifest, facts, named)
    made = new.parent_version, manifest.id, new.origin, new.origin_detail, new.created_unix_ms
    versions.put_version(rows, "INSERT OR REPLACE", line_id, number, made)
    if new.origin == Origin.TURN:  # only an engine commits a turn
        committing.bind(rows, shared, dict(enumerate(named)), committing.bound_now(rows, shared))


def _agent(rows: Rows, name: str, is_pinned: int, retained: int | None, created: int) -> None:
    agent = agents.make_agent(rows, name, created)
    facts = "is_pinned = :is_pinned, retained_versions = :retained, created_unix_ms = :created"
    described = f"UPDATE agents SET {facts} WHERE id = :agent"  # noqa: S608
    rows.run(described, is_pinned=is_pinned, retained=retained, created=created, agent=agent.id)


def _forget(rows: Rows, name: str) -> None:
    if agent := agents.find_agent(rows, name):
        agents.delete(rows, agent)


def _label(rows: Rows, agent: str, name: str, value: str | None) -> None:
    if found := agents.find_agent(rows, agent):
        agents.set_labels(rows, found.id, {name: value or ""})


def _drop(rows: Rows, agent: str, kv_hash: str, number: int) -> None:
    if line := versions.find_line(rows, LineQuery(agent, kv_hash)):
        versions.drop_version(rows, line.id, number)
        if not versions.head_of(rows, line.id):
            rows.run("DELETE FROM lines WHERE id = :line", line=line.id)


def _brought(rows: Rows, hash_: str, value: int) -> None:
    """No mark is ever taken off: the journal records its end when its blob went, and so it goes here."""
    which = "namespace_id = :namespace AND hash = :hash"
    if value:
        marked = f"UPDATE blobs SET is_brought = MAX(is_brought, :value) WHERE {which}"  # noqa: S608
        rows.run(marked, value=value, hash=hash_)
    else:
        rows.run(f"DELETE FROM blobs WHERE {which} AND NOT {versions.IS_REFERENCED}", hash=hash_)  # noqa: S608


def _owner(rows: Rows, agent: str, *facts: Any) -> None:
    state, generation, peer, move_id, since, was_owned, *lists = facts
    tells, had_by = (*lists, None)[:2]
    if had_by is None:  # of an older line
        had_by = " ".join(sorted({*owners.ownership_of(rows, agent).had_by, peer} - {""}))
    peers = tuple(tells.split()), tuple(had_by.split())
    known = Ownership(OwnerState(state), generation, peer, move_id, since, bool(was_owned), *peers)
    owners.set_ownership(rows, agent, known)


_HOW: dict[str, Callable[..., None]] = {
    "agent": _agent,
    "forget": _forget,
    "label": _label,
    "drop": _drop,
    "brought": _brought,
    "owner": _owner,
}
