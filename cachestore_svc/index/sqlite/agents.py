"""Rows of agents: their names, labels, pins, and how they are changed and forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import FailedPrecondition
from kvasir.formats.digest import Digest

from cachestore_svc.facts.limits import check_all_labels
from cachestore_svc.facts.ownership import FIRST_MOVE, gone
from cachestore_svc.facts.records import AgentRecord, AgentUsage
from cachestore_svc.index.ports.agents import AgentFilter
from cachestore_svc.index.refusals import no_agent
from cachestore_svc.index.sqlite import garbage, versions
from cachestore_svc.index.sqlite.blobs import find_namespace, make_namespace
from cachestore_svc.index.sqlite.rights.owners import ownership_of, set_ownership
from cachestore_svc.index.sqlite.rows import AGENT, LABEL, PLAIN, VALUE, Parameter, Rows, Text


@dataclass(frozen=True, slots=True)
class AgentRow:
    id: int
    name: str
    is_pinned: bool
    retained_versions: int | None
    created_unix_ms: int


_COLUMNS = "id, name, is_pinned, retained_versions, created_unix_ms"


def find_agent(rows: Rows, namespace: str, name: str) -> AgentRow | None:
    found = rows.one(
        f"SELECT {_COLUMNS} FROM agents WHERE namespace_id = ? AND name = ?",  # noqa: S608
        find_namespace(rows, namespace),
        AGENT(name),
    )
    return _row(rows, found) if found else None


def get_row(rows: Rows, namespace: str, name: str) -> AgentRow:
    """The agent's row. Raises NotFound."""
    found = find_agent(rows, namespace, name)
    if found is None:
        raise no_agent(name)
    return found


def make_agent(rows: Rows, namespace: str, name: str, now_unix_ms: int) -> AgentRow:
    rows.run(
        "INSERT OR IGNORE INTO agents (namespace_id, name, created_unix_ms) VALUES (?, ?, ?)",
        make_namespace(rows, namespace),
        AGENT(name),
        now_unix_ms,
    )
    return get_row(rows, namespace, name)


def get_agent(rows: Rows, namespace: str, agent_id: str, default_retained: int) -> AgentRecord:
    return record(rows, namespace, get_row(rows, namespace, agent_id), default_retained)


def agents_after(
    rows: Rows, wanted: AgentFilter, after: str, count: int, default_retained: int
) -> tuple[list[str], list[AgentRecord]]:
    sql = f"SELECT {_COLUMNS} FROM agents WHERE namespace_id = ?"  # noqa: S608
    which: list[Parameter] = [find_namespace(rows, wanted.namespace)]
    if rows.names.keep_order:  # else each page looks at all of them
        sql += " AND name > ? AND name >= ? ORDER BY name LIMIT ?"
        which += AGENT(after), AGENT(wanted.name_prefix), count
    found = rows.all(sql, *which)
    all_named = sorted((_row(rows, each) for each in found), key=lambda agent: agent.name)
    named = [each for each in all_named if each.name > after and each.name.startswith(wanted.name_prefix)][:count]
    labels = wanted.labels.items()
    labelled = (agent for agent in named if not labels or labels <= labels_of(rows, agent.id).items())
    return [agent.name for agent in named], [
        record(rows, wanted.namespace, agent, default_retained) for agent in labelled
    ]


def _row(rows: Rows, found: tuple[Any, ...]) -> AgentRow:
    return AgentRow(found[0], rows.opened(AGENT, found[1]), *found[2:])


def record(rows: Rows, namespace: str, agent: AgentRow, default_retained: int) -> AgentRecord:
    """An agent with its labels and the newest version of each line."""
    lines = versions.lines_of(rows, agent.id)
    return AgentRecord(
        agent_id=agent.name,
        labels=labels_of(rows, agent.id),
        is_pinned=bool(agent.is_pinned),
        retained_versions=agent.retained_versions or default_retained,
        created_unix_ms=agent.created_unix_ms,
        used_unix_ms=max([agent.created_unix_ms, *(line.used_unix_ms for line in lines)]),
        lines=tuple(versions.get_version(rows, line, None) for line in lines),
        unused_ms=_unused_ms(rows, agent.id),
        ownership=ownership_of(rows, namespace, agent.name),
    )


def count_unused(rows: Rows, namespace: str, agent_id: str, passed_ms: int) -> None:
    if agent := find_agent(rows, namespace, agent_id):
        unused_ms = _unused_ms(rows, agent.id)
        is_known = rows.one("SELECT 1 FROM unused WHERE agent_id = ? AND used = ?", agent.id, _used(rows, agent.id))
        rows.run(
            "INSERT OR REPLACE INTO unused VALUES (?, ?, ?)",
            agent.id,
            _used(rows, agent.id),
            unused_ms + passed_ms if is_known else 0,
        )


def _unused_ms(rows: Rows, agent_id: int) -> int:
    found = rows.one("SELECT unused_ms FROM unused WHERE agent_id = ? AND used = ?", agent_id, _used(rows, agent_id))
    return int(found[0]) if found else 0


def _used(rows: Rows, agent_id: int) -> Text:
    """The agent's uses until now: what changes with each, whichever way the clock was set."""
    found = rows.one(
        """SELECT COALESCE(SUM(used_unix_ms), 0), COALESCE(SUM((SELECT MAX(version) FROM versions
            WHERE line_id = lines.id)), 0) FROM lines WHERE agent_id = ?""",
        agent_id,
    )
    assert found is not None
    return PLAIN(f"{found[0]} {found[1]}")


def labels_of(rows: Rows, agent_id: int) -> dict[str, str]:
    found = rows.all("SELECT name, value FROM labels WHERE agent_id = ?", agent_id)
    return dict(sorted((rows.opened(LABEL, name), rows.opened(VALUE, value)) for name, value in found))


def set_labels(rows: Rows, agent_id: int, labels: Mapping[str, str]) -> None:
    """Set these labels, however many the agent has then; an empty value removes one."""
    which = "agent_id = ? AND name IN (SELECT value FROM json_each(?))"
    rows.run(f"DELETE FROM labels WHERE {which}", agent_id, LABEL.each(labels))  # noqa: S608
    new = [(agent_id, LABEL(name), VALUE(value)) for name, value in labels.items() if value]
    rows.many("INSERT INTO labels (agent_id, name, value) VALUES (?, ?, ?)", new)


def forget_agent(rows: Rows, namespace: str, agent_id: str, force: bool, now_unix_ms: int) -> int:
    agent = get_row(rows, namespace, agent_id)
    if agent.is_pinned and not force:
        raise FailedPrecondition(
            f"agent {agent_id!r} is pinned", reason="AGENT_PINNED", metadata={"agent_id": agent_id}
        )
    set_ownership(rows, namespace, agent_id, gone(ownership_of(rows, namespace, agent_id)))
    unheld = delete(rows, agent)
    garbage.mark(rows, unheld, now_unix_ms)
    return garbage.bytes_of(rows, unheld)


def delete(rows: Rows, agent: AgentRow) -> list[int]:
    """Remove the rows of an agent and its lines; ids of the blobs that nothing holds any more."""
    held = rows.all(
        "SELECT DISTINCT manifest_id FROM versions WHERE line_id IN (SELECT id FROM lines WHERE agent_id = ?)", agent.id
    )
    rows.run("DELETE FROM agents WHERE id = ?", agent.id)
    return [blob_id for (manifest_id,) in held for blob_id in versions.let_go(rows, manifest_id)]


def update_agent(
    rows: Rows,
    namespace: str,
    agent_id: str,
    labels: Mapping[str, str],
    is_pinned: bool | None,
    retained_versions: int | None,
) -> None:
    agent = get_row(rows, namespace, agent_id)
    wanted = {**labels_of(rows, agent.id), **labels}
    check_all_labels({name: value for name, value in wanted.items() if value})
    if labels.keys() != {FIRST_MOVE}:  # which no caller sets: it is no use of the agent
        rows.run("DELETE FROM unused WHERE agent_id = ?", agent.id)
    set_labels(rows, agent.id, labels)
    if is_pinned is not None:
        rows.run("UPDATE agents SET is_pinned = ? WHERE id = ?", is_pinned, agent.id)
    if retained_versions is not None:
        rows.run("UPDATE agents SET retained_versions = ? WHERE id = ?", retained_versions, agent.id)


def held_digests(rows: Rows, namespace: str, agent_id: str) -> list[Digest]:
    found = rows.all(
        """WITH held (manifest_id) AS (
                SELECT DISTINCT manifest_id FROM versions JOIN lines ON lines.id = versions.line_id
                WHERE lines.agent_id = ?)
            SELECT hash, size_bytes FROM blobs WHERE NOT is_damaged AND id IN (
                SELECT manifest_id FROM held UNION
                SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM held))
            ORDER BY id""",
        get_row(rows, namespace, agent_id).id,
    )
    return rows.digests(found)


def usage_of(rows: Rows, namespace: str, agent_id: str) -> AgentUsage:
    agent = get_row(rows, namespace, agent_id).id
    held = "FROM versions JOIN lines ON lines.id = versions.line_id WHERE lines.agent_id"
    others = "SELECT 1 FROM versions JOIN lines ON lines.id = versions.line_id"
    found = rows.one(
        f"""WITH held (manifest_id) AS (SELECT DISTINCT manifest_id {held} = ?),
            named (blob_id) AS (SELECT manifest_id FROM held UNION
                SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM held)),
            counted (size_bytes, is_shared) AS (SELECT size_bytes,
                EXISTS ({others} WHERE versions.manifest_id = blobs.id AND lines.agent_id <> ?)
                OR EXISTS ({others} JOIN manifest_blobs AS other ON other.manifest_id = versions.manifest_id
                    WHERE other.blob_id = blobs.id AND lines.agent_id <> ?)
                FROM blobs WHERE id IN (SELECT blob_id FROM named))
            SELECT (SELECT COUNT(*) {held} = ?), COUNT(*), COALESCE(SUM(size_bytes), 0), COALESCE(SUM(is_shared), 0),
                COALESCE(SUM(size_bytes * is_shared), 0) FROM counted""",  # noqa: S608  all of it is written above
        *(agent, agent, agent, agent),
    )
    assert found is not None
    return AgentUsage(*map(int, found))
