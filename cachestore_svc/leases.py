"""Leases: which inference service may extend a line, until when, and which late writers are fenced.

A lease ends by itself; its generation never goes back, not even when the agent is deleted. A writer whose generation
is not the newest was replaced while it slept, and is refused.
"""

from kvasir.errors import Conflict, FailedPrecondition, NotFound

from cachestore_svc.blob_rows import find_namespace, make_namespace
from cachestore_svc.index import Rows
from cachestore_svc.records import LeaseToken

_KEY = "namespace_id = ? AND agent_name = ? AND kv_identity_hash = ?"


def acquire(
    rows: Rows, namespace: str, agent: str, kv_hash: str, owner: str, ttl_ms: int, now_unix_ms: int
) -> tuple[LeaseToken, int]:
    """Take or prolong; the token and when it ends. Raises FailedPrecondition (LEASE_HELD)."""
    namespace_id = make_namespace(rows, namespace)
    held = _find(rows, namespace_id, agent, kv_hash)
    generation = 1
    if held:
        holder, newest, expires = held
        is_live = expires > now_unix_ms
        if is_live and holder != owner:
            raise _held_by(holder, expires)
        generation = newest if is_live else newest + 1
    rows.run(
        "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)",
        namespace_id,
        agent,
        kv_hash,
        owner,
        generation,
        now_unix_ms + ttl_ms,
    )
    return LeaseToken(owner, generation), now_unix_ms + ttl_ms


def set_expiry(rows: Rows, namespace: str, agent: str, kv_hash: str, token: LeaseToken, expires_unix_ms: int) -> None:
    """Prolong (or, with a time that is past, give back) one's own lease. Raises Conflict (LEASE_FENCED), NotFound."""
    namespace_id = find_namespace(rows, namespace)
    held = _find(rows, namespace_id, agent, kv_hash)
    if held is None:
        raise NotFound("there is no such lease")
    check_not_fenced(rows, namespace_id, agent, kv_hash, token)
    rows.run(f"UPDATE leases SET expires_unix_ms = ? WHERE {_KEY}", expires_unix_ms, namespace_id, agent, kv_hash)  # noqa: S608


def check_not_fenced(rows: Rows, namespace_id: int, agent: str, kv_hash: str, token: LeaseToken) -> None:
    """Raises Conflict (LEASE_FENCED) unless the token is of the newest generation. A lease that merely ended, and that
    nobody took, fences nobody: compare-and-swap protects the line."""
    held = _find(rows, namespace_id, agent, kv_hash)
    if held is None or (held[0], held[1]) != (token.owner, token.generation):
        newest = held[1] if held else 0
        raise Conflict(
            f"lease generation {token.generation} of {token.owner} is fenced: the newest is {newest}",
            reason="LEASE_FENCED",
            metadata={"generation": str(newest)},
        )


def check_not_held(rows: Rows, namespace_id: int, agent: str, kv_hash: str, now_unix_ms: int) -> None:
    """Raises FailedPrecondition (LEASE_HELD) when somebody has a live lease: for a turn that brings none."""
    held = _find(rows, namespace_id, agent, kv_hash)
    if held and held[2] > now_unix_ms:
        raise _held_by(held[0], held[2])


def _find(rows: Rows, namespace_id: int, agent: str, kv_hash: str) -> tuple[str, int, int] | None:
    found = rows.one(
        f"SELECT owner, generation, expires_unix_ms FROM leases WHERE {_KEY}",  # noqa: S608
        namespace_id,
        agent,
        kv_hash,
    )
    return (str(found[0]), int(found[1]), int(found[2])) if found else None


def _held_by(owner: str, expires_unix_ms: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the lease is held by {owner}",
        reason="LEASE_HELD",
        metadata={"owner": owner, "expires_unix_ms": str(expires_unix_ms)},
    )
