"""Leases: which inference service may extend a line, and which late writers are fenced. One owner at a time has leases
of an agent. A generation never goes back, not even when the agent is deleted; a writer with an older one is refused.
How long a lease holds is behind `lease_ends`.
"""

from dataclasses import dataclass
from typing import Any

from kvasir.errors import Conflict, FailedPrecondition, NotFound

from cachestore_svc.facts.records import LeaseToken, LineKey, LineQuery
from cachestore_svc.index.sqlite.events import fact, set_fact
from cachestore_svc.index.sqlite.rights.lease_ends import Ends, LeaseEnds
from cachestore_svc.index.sqlite.rows import Rows, RowsAhead
from cachestore_svc.index.values import UnreleasedLease

_OF_AGENT = "namespace_id = :namespace AND agent_name = :agent_id"
_OF_LINES = f"{_OF_AGENT} AND (:kv_identity_hash IS NULL OR kv_identity_hash = :kv_identity_hash)"
_COLUMNS = "agent_name AS agent_id, kv_identity_hash, owner, generation, ttl_ms, is_released"
_FLOOR = "lease_floor"


@dataclass(frozen=True, slots=True)
class _Row:
    line: LineKey
    token: LeaseToken
    ttl_ms: int
    is_released: bool

    def left_s(self, live: Ends) -> float:
        return 0.0 if self.is_released else live.left_s(self.line, self.token, self.ttl_ms / 1000)


def acquire_lease(
    rows: Rows, line: LineKey, live: LeaseEnds, owner: str, ttl_ms: int, *, begins_anew: bool = False
) -> LeaseToken:
    """Take the lease of a line, or renew one's own. Any other owner is fenced; with `begins_anew` the owner's earlier
    leases of the agent, too. Raises FailedPrecondition (LEASE_HELD).
    """
    ends = live.within(rows)
    rows.make_namespace()
    look_ahead(RowsAhead(rows), line, live)
    _check_not_barred(ends, line)
    held = rows_of(rows, LineQuery(line.agent_id))
    _check_free(ends, held, owner)
    found = next((each for each in held if each.line == line), None)
    generation = 1 + int(fact(rows, _FLOOR) or 0)
    if found is not None:
        is_others = found.token.owner != owner
        generation = found.token.generation + (is_others or found.is_released or begins_anew)
    token = LeaseToken(owner, generation)
    if found is None or token != found.token:  # nobody else can have had it since this token was given
        for other in held:
            if other.line != line and (begins_anew or other.token.owner != owner):
                _fence(rows, other)
                ends.drop(other.line)
    _write(rows, _Row(line, token, ttl_ms, is_released=False))
    ends.grant(line, token, ttl_ms / 1000)
    return token


def look_ahead(rows: RowsAhead, line: LineKey, live: LeaseEnds) -> None:
    """Send the reads of `acquire_lease` with the next one."""
    if live.in_ram is None:
        ends = live.within(rows)
        ends.barred_s(line)
        ends.left_s(line, LeaseToken("", 0), 0.0)
        rows_of(rows, LineQuery(line.agent_id))
        fact(rows, _FLOOR)


def renew_lease(rows: Rows, line: LineKey, live: LeaseEnds, token: LeaseToken, ttl_ms: int) -> None:
    """Prolong one's own lease, if nobody took it. Raises Conflict, NotFound, FailedPrecondition (LEASE_HELD)."""
    ends = live.within(rows)
    _check_own(rows, line, token)
    _check_not_barred(ends, line)
    _write(rows, _Row(line, token, ttl_ms, is_released=False))
    ends.grant(line, token, ttl_ms / 1000)


def set_lease_floor(rows: Rows, generation: int) -> None:
    """No lease that is not known yet begins below this generation: where leases were lost, higher ones were given."""
    set_fact(rows, _FLOOR, str(generation))


def release_lease(rows: Rows, line: LineKey, live: LeaseEnds, token: LeaseToken) -> None:
    """Give back one's own lease. Raises Conflict (LEASE_FENCED), NotFound."""
    [found] = _check_own(rows, line, token)
    _write(rows, _Row(line, token, found.ttl_ms, is_released=True))
    live.within(rows).drop(line)


def fence_leases(rows: Rows, query: LineQuery, live: LeaseEnds) -> None:
    """Shut out every writer of these lines that began before now. Raises FailedPrecondition (LEASE_HELD): a live
    lease's holder may still answer from what is to be taken back.
    """
    ends, held = live.within(rows), rows_of(rows, query)
    _check_free(ends, held, None)
    for each in held:
        _fence(rows, each)
        ends.taken_back(each.line)


def fence_all(rows: Rows, agent_id: str) -> None:
    """Shut out every writer of the agent, whoever has leases: for a time at which none is live."""
    fenced = f"UPDATE leases SET generation = generation + 1, is_released = TRUE WHERE {_OF_AGENT}"  # noqa: S608
    rows.run(fenced, agent_id=agent_id)


def fence_all_leases(rows: Rows) -> None:
    """Release the leases of all lines, whether live or not, and shut out their holders."""
    rows.run("UPDATE leases SET generation = generation + 1, is_released = TRUE WHERE NOT is_released")


def held_leases(rows: Rows, query: LineQuery, live: LeaseEnds) -> list[LineKey]:
    """Lines of an agent whose lease is live."""
    return [each.line for each in rows_of(rows, query) if each.left_s(live.within(rows))]


def unreleased_leases(rows: Rows) -> list[UnreleasedLease]:
    """Leases of all lines that were not released. How long each had still to go at the last end is not known."""
    found = rows.all(
        f"""SELECT namespaces.name, {_COLUMNS}
            FROM leases JOIN namespaces ON namespaces.id = leases.namespace_id WHERE NOT is_released"""  # noqa: S608
    )
    unreleased = (_row(namespace, columns) for namespace, *columns in found)
    return [UnreleasedLease(each.line, each.token, each.ttl_ms) for each in unreleased]


def longest_lease_ms(rows: Rows) -> int:
    """The longest time that any of all leases has; 0 where there is none."""
    return rows.number("SELECT MAX(ttl_ms) FROM leases")


def check_not_fenced(rows: Rows, line: LineKey, token: LeaseToken) -> list[_Row]:
    """The lease's row. Raises Conflict (LEASE_FENCED) unless the token is the newest, though it may have ended."""
    found = rows_of(rows, LineQuery(*line[1:]))
    if not found or found[0].token != token:
        newest = found[0].token.generation if found else 0
        raise Conflict(
            f"lease generation {token.generation} of {token.owner} is fenced: the newest is {newest}",
            reason="LEASE_FENCED",
            metadata={"generation": str(newest)},
        )
    return found


def check_not_held(rows: Rows, live: LeaseEnds, line: LineKey) -> None:
    """Raises FailedPrecondition (LEASE_HELD) while a lease of the agent is live: for a turn that brings none."""
    _check_free(live.within(rows), rows_of(rows, LineQuery(line.agent_id)), None)


def _check_free(live: Ends, held: list[_Row], owner: str | None) -> None:
    """Raises FailedPrecondition (LEASE_HELD) while one of these is live that is another's than this owner's."""
    for each in held:
        if each.token.owner != owner and (left_s := each.left_s(live)):
            raise _held_by(each.token.owner, left_s)


def _check_not_barred(live: Ends, line: LineKey) -> None:
    if barred_s := live.barred_s(line):
        raise _held_by("a change of the agent that waits for it, or by an owner of which a lost commit knew", barred_s)


def _held_by(owner: str, left_s: float) -> FailedPrecondition:
    return FailedPrecondition(
        f"the lease is held by {owner}",
        reason="LEASE_HELD",
        metadata={"owner": owner, "left_ms": str(int(left_s * 1000) + 1)},
    )


def _check_own(rows: Rows, line: LineKey, token: LeaseToken) -> list[_Row]:
    """The lease's row. Raises Conflict (LEASE_FENCED), and NotFound when there never was a lease."""
    if not rows_of(rows, LineQuery(*line[1:])):
        raise NotFound("there is no such lease", reason="LEASE_NOT_FOUND")
    return check_not_fenced(rows, line, token)


def rows_of(rows: Rows, query: LineQuery) -> list[_Row]:
    """Leases of a line, or of all lines of an agent, those that ended too."""
    leases = f"SELECT {_COLUMNS} FROM leases WHERE {_OF_LINES}"  # noqa: S608
    return [_row(rows.namespace, columns) for columns in rows.all(leases, **query._asdict())]


def _row(namespace: str, columns: Any) -> _Row:
    agent_id, kv_hash, owner, generation, ttl_ms, is_released = columns
    return _Row(LineKey(namespace, agent_id, kv_hash), LeaseToken(owner, generation), ttl_ms, bool(is_released))


def _fence(rows: Rows, row: _Row) -> None:
    _write(rows, _Row(row.line, LeaseToken(row.token.owner, row.token.generation + 1), row.ttl_ms, is_released=True))


def _write(rows: Rows, row: _Row) -> None:
    _, agent_id, kv_hash = row.line
    written = """INSERT INTO leases
        VALUES (:namespace, :agent_id, :kv_identity_hash, :owner, :generation, :ttl_ms, :is_released)
        ON CONFLICT (namespace_id, agent_name, kv_identity_hash) DO UPDATE SET owner = excluded.owner,
        generation = excluded.generation, ttl_ms = excluded.ttl_ms, is_released = excluded.is_released"""
    about = {"generation": row.token.generation, "ttl_ms": row.ttl_ms, "is_released": row.is_released}
    rows.later(written, agent_id=agent_id, kv_identity_hash=kv_hash, owner=row.token.owner, **about)
