"""Rows of owners: the owner of each agent, as far as this store knows. By name, because the fact outlives the agent."""

from cachestore_svc.facts.ownership import HERE, Ownership, OwnerState
from cachestore_svc.index.sqlite.blobs import find_namespace, make_namespace
from cachestore_svc.index.sqlite.rows import AGENT, PLAIN, Rows

_COLUMNS = "state, generation, peer, move_id, since_unix_ms, was_owned, tells, had_by"


def ownership_of(rows: Rows, namespace: str, agent_id: str) -> Ownership:
    found = rows.one(
        f"SELECT {_COLUMNS} FROM owners WHERE namespace_id = ? AND agent_name = ?",  # noqa: S608
        find_namespace(rows, namespace),
        AGENT(agent_id),
    )
    return _ownership(found) if found else HERE


def set_ownership(rows: Rows, namespace: str, agent_id: str, known: Ownership) -> None:
    """Write the fact, unless it is there already."""
    if known == ownership_of(rows, namespace, agent_id):
        return
    # An update, where there is a row: the journal's triggers see no REPLACE.
    rows.run(
        f"""INSERT INTO owners (namespace_id, agent_name, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
            ON CONFLICT (namespace_id, agent_name) DO UPDATE SET state = excluded.state,
            generation = excluded.generation, peer = excluded.peer, move_id = excluded.move_id,
            since_unix_ms = excluded.since_unix_ms, was_owned = excluded.was_owned, tells = excluded.tells,
            had_by = excluded.had_by""",  # noqa: S608
        *(make_namespace(rows, namespace), AGENT(agent_id), int(known.state), known.generation, PLAIN(known.peer)),
        *(PLAIN(known.move_id), known.since_unix_ms, known.was_owned),
        *(PLAIN(" ".join(peers)) for peers in (known.tells, known.had_by)),
    )


def all_owners(rows: Rows, namespace: str) -> list[tuple[str, Ownership]]:
    """Every fact, by the agent's name."""
    found = rows.all(
        f"SELECT agent_name, {_COLUMNS} FROM owners WHERE namespace_id = ? ORDER BY agent_name",  # noqa: S608
        find_namespace(rows, namespace),
    )
    return _by_agent(rows, found)


def unfinished_moves(rows: Rows, namespace: str) -> list[tuple[str, Ownership]]:
    found = rows.all(
        f"""SELECT agent_name, {_COLUMNS} FROM owners
            WHERE namespace_id = ? AND (state IN (?, ?) OR tells <> '') ORDER BY agent_name""",  # noqa: S608
        *(find_namespace(rows, namespace), int(OwnerState.MOVING), int(OwnerState.ARRIVING)),
    )
    return _by_agent(rows, found)


def count_owners(rows: Rows, namespace: str, peer: str) -> tuple[int, int]:
    found = rows.one(
        """SELECT COUNT(*), COALESCE(SUM(state = ? AND peer = ?), 0) FROM owners
            WHERE namespace_id = ? AND instr(' ' || replace(had_by, '?', '') || ' ', ?)""",
        *(int(OwnerState.MOVING), PLAIN(peer), find_namespace(rows, namespace), PLAIN(f" {peer} ")),
    )
    assert found is not None
    return int(found[0]), int(found[1])


def _by_agent(rows: Rows, found: list[tuple[object, ...]]) -> list[tuple[str, Ownership]]:
    return [(rows.opened(AGENT, str(agent_id)), _ownership(tuple(columns))) for agent_id, *columns in found]


def _ownership(columns: tuple[object, ...]) -> Ownership:
    state, generation, peer, move_id, since, was_owned, tells, had_by = columns
    return Ownership(
        OwnerState(int(str(state))), int(str(generation)), str(peer), str(move_id), int(str(since)),
        bool(was_owned), tuple(str(tells).split()), tuple(str(had_by).split()),
    )  # fmt: skip
