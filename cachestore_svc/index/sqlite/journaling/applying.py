"""Writes a journal's changes into the database: at a start perhaps the last group, at a recovery all of them.

What a version holds is read from its manifest; the rows of its blobs must be there.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kvasir.formats.digest import Digest

from cachestore_svc.facts.ownership import Ownership, OwnerState
from cachestore_svc.facts.records import LineKey, LineQuery, Origin
from cachestore_svc.index.ports.journal import ReadManifest, Unheld
from cachestore_svc.index.sqlite import agents, blobs, committing, versions
from cachestore_svc.index.sqlite.rights import leases, owners
from cachestore_svc.index.sqlite.rows import DETAIL, HASH, Rows
from cachestore_svc.journal.replay import Change, Version, VersionKey


def apply_changes(rows: Rows, read: ReadManifest, changes: Iterable[Change]) -> None:
    for kind, namespace, *rest in changes:
        if kind == "version":
            agent, kv_hash, number, *facts = rest
            hold_version(rows, read, namespace, agent, (kv_hash, number), Version._make(facts))
        else:
            _HOW[kind](rows, namespace, *rest)


def fence_changes(rows: Rows, changes: Iterable[Change]) -> None:
    for kind, namespace, agent, *rest in changes:
        is_taken_back = kind == "version" and Version._make(rest[2:]).origin != Origin.TURN
        if is_taken_back or kind in ("forget", "owner"):
            leases.fence_all(rows, LineQuery(namespace, agent))


def hold_version(rows: Rows, read: ReadManifest, namespace: str, agent_id: str, key: VersionKey, new: Version) -> None:
    kv_hash, number = key
    blobs.make_namespace(rows, namespace)
    manifest = blobs.find_blob(rows, namespace, Digest(new.manifest_hash, new.manifest_size_bytes))
    if manifest is None:
        raise Unheld(f"its manifest {new.manifest_hash} is not here")
    facts, shared = read(namespace, manifest.digest)
    found = blobs.find_blobs(rows, namespace, [need.digest for need in facts.named])
    if missing := next((need.digest for need in facts.named if need.digest not in found), None):
        raise Unheld(f"blob {missing} is not here")
    named = [found[need.digest] for need in facts.named]
    made = agents.make_agent(rows, namespace, agent_id, new.created_unix_ms)
    line_id = versions.make_line(rows, made.id, kv_hash, new.created_unix_ms)
    versions.hold_manifest(rows, manifest, named, len(facts.token_ids), facts.request_id)
    rows.run(
        "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
        *(line_id, number, new.parent_version, manifest.id, new.origin, DETAIL(new.origin_detail), new.created_unix_ms),
    )
    if new.origin == Origin.TURN:  # only an engine commits a turn
        committing.bind(rows, namespace, shared, named)


def _agent(rows: Rows, namespace: str, name: str, is_pinned: int, retained: int | None, created: int) -> None:
    agent = agents.make_agent(rows, namespace, name, created)
    rows.run(
        "UPDATE agents SET is_pinned = ?, retained_versions = ?, created_unix_ms = ? WHERE id = ?",
        *(is_pinned, retained, created, agent.id),
    )


def _forget(rows: Rows, namespace: str, name: str) -> None:
    agent = agents.find_agent(rows, namespace, name)
    if agent is not None:
        agents.delete(rows, agent)


def _label(rows: Rows, namespace: str, agent: str, name: str, value: str | None) -> None:
    found = agents.find_agent(rows, namespace, agent)
    if found is not None:
        agents.set_labels(rows, found.id, {name: value or ""})


def _drop(rows: Rows, namespace: str, agent: str, kv_hash: str, number: int) -> None:
    line = versions.find_line(rows, LineKey(namespace, agent, kv_hash))
    if line is None:
        return
    versions.drop_version(rows, line.id, number)
    if not versions.head_of(rows, line.id):
        rows.run("DELETE FROM lines WHERE id = ?", line.id)


def _brought(rows: Rows, namespace: str, hash_: str, value: int) -> None:
    """No mark is ever taken off: the journal records its end when its blob went, and so it goes here."""
    key = blobs.find_namespace(rows, namespace), HASH(hash_)
    if value:
        marked = "UPDATE blobs SET is_brought = MAX(is_brought, ?) WHERE namespace_id = ? AND hash = ?"
        rows.run(marked, value, *key)
    else:
        rows.run(
            f"DELETE FROM blobs WHERE namespace_id = ? AND hash = ? AND NOT {versions.IS_REFERENCED}",  # noqa: S608
            *key,
        )


def _owner(rows: Rows, namespace: str, agent: str, *facts: Any) -> None:
    state, generation, peer, move_id, since, was_owned, *lists = facts
    tells, had_by = (*lists, None)[:2]
    if had_by is None:  # of an older line
        had_by = " ".join(sorted({*owners.ownership_of(rows, namespace, agent).had_by, peer} - {""}))
    peers = tuple(tells.split()), tuple(had_by.split())
    known = Ownership(OwnerState(state), generation, peer, move_id, since, bool(was_owned), *peers)
    owners.set_ownership(rows, namespace, agent, known)


_HOW: dict[str, Callable[..., None]] = {
    "agent": _agent,
    "forget": _forget,
    "label": _label,
    "drop": _drop,
    "brought": _brought,
    "owner": _owner,
}
