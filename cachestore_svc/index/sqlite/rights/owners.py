"""Rows of owners: the owner of each agent, as far as this store knows. By name, because the fact outlives the agent."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cachestore_svc.facts.ownership import HERE, Ownership, OwnerState
from cachestore_svc.index.sqlite.rows import Rows, Value

_COLUMNS = ("state", "generation", "peer", "move_id", "since_unix_ms", "was_owned", "tells", "had_by")
_SELECT = f"SELECT agent_name AS agent_id, {', '.join(_COLUMNS)} FROM owners WHERE namespace_id = :namespace"  # noqa: S608
# An update, where there is a row: the journal's triggers see no REPLACE.
_UPSERT = f"""INSERT INTO owners (namespace_id, agent_name, {", ".join(_COLUMNS)})
    VALUES (:namespace, :agent_id, {", ".join(f":{name}" for name in _COLUMNS)})
    ON CONFLICT (namespace_id, agent_name) DO UPDATE
    SET {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)}"""  # noqa: S608


def ownership_of(rows: Rows, agent_id: str) -> Ownership:
    """What is known of an agent's owner; HERE where nothing is. The agent need not exist."""
    return owners_of(rows, [agent_id]).get(agent_id, HERE)


def owners_of(rows: Rows, agents: Sequence[str]) -> dict[str, Ownership]:
    """The same of many agents by one statement; of some of them nothing is known."""
    return dict(_facts(rows, "AND agent_name IN (SELECT value FROM json_each(:agent_id))", agent_id=agents))


def set_ownership(rows: Rows, agent_id: str, known: Ownership) -> None:
    """Write what is known of an agent's owner."""
    if known != ownership_of(rows, agent_id):
        rows.make_namespace()
        facts = asdict(known) | {"tells": " ".join(known.tells), "had_by": " ".join(known.had_by)}
        rows.run(_UPSERT, agent_id=agent_id, **facts)


def all_owners(rows: Rows) -> list[tuple[str, Ownership]]:
    """All facts about owners, by agent; also of agents that are gone."""
    return _facts(rows, "ORDER BY agent_name")


def unfinished_moves(rows: Rows) -> list[tuple[str, Ownership]]:
    """Agents that are on their way, or whose owner must still be announced, and their facts."""
    under_way = f"state IN ({OwnerState.MOVING:d}, {OwnerState.ARRIVING:d})"
    return _facts(rows, f"AND ({under_way} OR tells <> '') ORDER BY agent_name")


def count_owners(rows: Rows, peer: str) -> tuple[int, int]:
    """Facts about owners that a peer has a part in, and agents that are on their way to it."""
    [(facts, moving)] = rows.all(
        f"""SELECT COUNT(*), COUNT(CASE WHEN state = {OwnerState.MOVING:d} AND peer = :peer THEN 1 END) FROM owners
            WHERE namespace_id = :namespace
            AND instr(' ' || replace(had_by, '?', '') || ' ', ' ' || :peer || ' ') > 0""",  # noqa: S608
        peer=peer,
    )
    return facts, moving


def _facts(rows: Rows, which: str, **values: Value) -> list[tuple[str, Ownership]]:
    return [(name, _ownership(facts)) for name, *facts in rows.all(f"{_SELECT} {which}", **values)]


def _ownership(facts: list[Any]) -> Ownership:
    state, generation, peer, move_id, since, was_owned, *peers = facts
    tells, had_by = (tuple(each.split()) for each in peers)
    return Ownership(OwnerState(state), generation, peer, move_id, since, bool(was_owned), tells, had_by)
