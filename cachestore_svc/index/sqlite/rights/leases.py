"""Leases: which inference service may extend a line, and which late writers are fenced.

One owner at a time has leases of an agent: a turn under another KV identity makes the agent's newest version, too.
A generation never goes back, not even when the agent is deleted. A writer whose generation is not the newest was
replaced in the meantime, and is refused. How long a lease holds is in `live_leases`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir.errors import Conflict, FailedPrecondition, NotFound

from cachestore_svc.facts.records import LeaseToken, LineKey, LineQuery
from cachestore_svc.index.live_leases import LiveLeases
from cachestore_svc.index.ports.rights import UnreleasedLease
from cachestore_svc.index.sqlite.blobs import find_namespace, make_namespace
from cachestore_svc.index.sqlite.events import fact, set_fact
from cachestore_svc.index.sqlite.rows import AGENT, PLAIN, Parameter, Rows, Text

_KEY = "namespace_id = ? AND agent_name = ? AND kv_identity_hash = ?"
_COLUMNS = "kv_identity_hash, owner, generation, ttl_ms, is_released"
_FLOOR = "lease_floor"


@dataclass(frozen=True, slots=True)
class _Row:
    kv_identity_hash: str
    token: LeaseToken
    ttl_ms: int
    is_released: bool


def acquire_lease(
    rows: Rows, line: LineKey, live: LiveLeases, owner: str, ttl_ms: int, *, begins_anew: bool = False
) -> LeaseToken:
    """Take the lease, or prolong one's own. Whoever else had the agent, by this line or another, is fenced.
    `begins_anew`: the owner's earlier leases of the agent belong to a process or a model that has ended, and are
    fenced, too. Raises FailedPrecondition (LEASE_HELD).
    """
    if barred_s := live.barred_s(line):
        raise held_by("a change of the agent that waits for it", barred_s)
    make_namespace(rows, line.namespace)
    _check_free(rows, live, line, owner)
    found = _find(rows, line)
    generation = 1 + _floor(rows)
    if found is not None:
        is_others = found.token.owner != owner
        generation = found.token.generation + (is_others or found.is_released or begins_anew)
    token = LeaseToken(owner, generation)
    if found is None or token != found.token:  # nobody else can have had it since this token was given
        for other, row in _rows_of(rows, LineQuery(line.namespace, line.agent_id)):
            if other != line and (begins_anew or row.token.owner != owner):
                _fence(rows, other, row)
                live.drop(other)
    _write(rows, line, token, ttl_ms, is_released=False)
    live.grant(line, token, ttl_ms / 1000)
    return token


def renew_lease(rows: Rows, line: LineKey, live: LiveLeases, token: LeaseToken, ttl_ms: int) -> None:
    """Prolong one's own lease, also one that ended and was not taken. Raises Conflict (LEASE_FENCED), NotFound,
    FailedPrecondition (LEASE_HELD: a change of the agent waits for it).
    """
    _check_own(rows, line, token)
    if barred_s := live.barred_s(line):
        raise held_by("a change of the agent that waits for it", barred_s)
    _write(rows, line, token, ttl_ms, is_released=False)
    live.grant(line, token, ttl_ms / 1000)


def set_lease_floor(rows: Rows, generation: int) -> None:
    """No lease that is not known yet begins below this generation: where leases were lost, higher ones were given."""
    set_fact(rows, _FLOOR, str(generation))


def release_lease(rows: Rows, line: LineKey, live: LiveLeases, token: LeaseToken) -> None:
    _check_own(rows, line, token)
    rows.run(f"UPDATE leases SET is_released = 1 WHERE {_KEY}", *_key(rows, line))  # noqa: S608
    live.drop(line)


def fence_leases(rows: Rows, query: LineQuery, live: LiveLeases) -> None:
    """Shut out every writer of these lines that began before now. Raises FailedPrecondition (LEASE_HELD) while one has
    a live lease: it may still answer from what is to be taken back.
    """
    held = list(_rows_of(rows, query))
    for line, found in held:
        if left_s := _left_s(live, line, found):
            raise held_by(found.token.owner, left_s)
    for line, found in held:
        _fence(rows, line, found)
        live.taken_back(line)


def fence_all(rows: Rows, query: LineQuery) -> None:
    """Shut out every writer of these lines, without regard to leases: for a time at which none is live."""
    rows.run(
        """UPDATE leases SET generation = generation + 1, is_released = 1
            WHERE namespace_id = ? AND agent_name = ? AND (? IS NULL OR kv_identity_hash = ?)""",
        *_any_of(rows, query),
    )


def held_leases(rows: Rows, query: LineQuery, live: LiveLeases) -> list[LineKey]:
    return [line for line, row in _rows_of(rows, query) if _left_s(live, line, row)]


def unreleased_leases(rows: Rows) -> list[UnreleasedLease]:
    found = rows.all(
        f"""SELECT namespaces.name, agent_name, {_COLUMNS}
            FROM leases JOIN namespaces ON namespaces.id = leases.namespace_id WHERE NOT is_released"""  # noqa: S608
    )
    return [_unreleased(namespace, agent_id, _row(columns)) for namespace, agent_id, *columns in found]


def check_not_fenced(rows: Rows, line: LineKey, token: LeaseToken) -> None:
    """Raises Conflict (LEASE_FENCED) unless the token is of the newest generation. A lease that merely
    ended, and was not taken, fences no writer: compare-and-swap protects the line."""
    found = _find(rows, line)
    if found is None or found.token != token:
        newest = found.token.generation if found else 0
        raise Conflict(
            f"lease generation {token.generation} of {token.owner} is fenced: the newest is {newest}",
            reason="LEASE_FENCED",
            metadata={"generation": str(newest)},
        )


def check_not_held(rows: Rows, live: LiveLeases, line: LineKey) -> None:
    """Raises FailedPrecondition (LEASE_HELD) while a lease of the agent is live: for a turn that brings none."""
    _check_free(rows, live, line, None)


def _check_free(rows: Rows, live: LiveLeases, line: LineKey, owner: str | None) -> None:
    """Raises FailedPrecondition (LEASE_HELD) while another than this owner has a live lease of the agent."""
    for each, found in _rows_of(rows, LineQuery(line.namespace, line.agent_id)):
        if found.token.owner != owner and (left_s := _left_s(live, each, found)):
            raise held_by(found.token.owner, left_s)


def held_by(owner: str, left_s: float) -> FailedPrecondition:
    return FailedPrecondition(
        f"the lease is held by {owner}",
        reason="LEASE_HELD",
        metadata={"owner": owner, "left_ms": str(int(left_s * 1000) + 1)},
    )


def _check_own(rows: Rows, line: LineKey, token: LeaseToken) -> None:
    """Raises Conflict (LEASE_FENCED), and NotFound when there never was a lease."""
    if _find(rows, line) is None:
        raise NotFound("there is no such lease", reason="LEASE_NOT_FOUND")
    check_not_fenced(rows, line, token)


def _left_s(live: LiveLeases, line: LineKey, row: _Row) -> float:
    return 0.0 if row.is_released else live.left_s(line, row.token, row.ttl_ms / 1000)


def _find(rows: Rows, line: LineKey) -> _Row | None:
    found = rows.one(f"SELECT {_COLUMNS} FROM leases WHERE {_KEY}", *_key(rows, line))  # noqa: S608
    return _row(found) if found else None


def _rows_of(rows: Rows, query: LineQuery) -> Iterator[tuple[LineKey, _Row]]:
    found = rows.all(
        f"""SELECT {_COLUMNS} FROM leases
            WHERE namespace_id = ? AND agent_name = ? AND (? IS NULL OR kv_identity_hash = ?)""",  # noqa: S608
        *_any_of(rows, query),
    )
    for row in map(_row, found):
        yield LineKey(query.namespace, query.agent_id, row.kv_identity_hash), row


def _key(rows: Rows, line: LineKey) -> tuple[int, Text, Text]:
    return find_namespace(rows, line.namespace), AGENT(line.agent_id), PLAIN(line.kv_identity_hash)


def _any_of(rows: Rows, query: LineQuery) -> tuple[Parameter, ...]:
    kv_hash = None if query.kv_identity_hash is None else PLAIN(query.kv_identity_hash)
    return find_namespace(rows, query.namespace), AGENT(query.agent_id), kv_hash, kv_hash


def _row(columns: tuple[object, ...] | list[object]) -> _Row:
    kv_hash, owner, generation, ttl_ms, is_released = columns
    return _Row(str(kv_hash), LeaseToken(str(owner), int(str(generation))), int(str(ttl_ms)), bool(is_released))


def _unreleased(namespace: str, agent_id: str, row: _Row) -> UnreleasedLease:
    return UnreleasedLease(LineKey(namespace, agent_id, row.kv_identity_hash), row.token, row.ttl_ms)


def _fence(rows: Rows, line: LineKey, row: _Row) -> None:
    """Let no late writer of this row's token extend the line."""
    fenced = LeaseToken(row.token.owner, row.token.generation + 1)
    _write(rows, line, fenced, row.ttl_ms, is_released=True)


def _write(rows: Rows, line: LineKey, token: LeaseToken, ttl_ms: int, *, is_released: bool) -> None:
    rows.run(
        "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)",
        *_key(rows, line),
        *(PLAIN(token.owner), token.generation, ttl_ms, is_released),
    )


def _floor(rows: Rows) -> int:
    return int(fact(rows, _FLOOR) or 0)
