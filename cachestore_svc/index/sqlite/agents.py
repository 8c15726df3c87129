"""Rows of agents: their names, labels, pins, and how they are changed and forgotten."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir.errors import FailedPrecondition
from kvasir.formats.digest import Digest

from cachestore_svc.facts.limits import check_all_labels
from cachestore_svc.facts.ownership import FIRST_MOVE, HERE, gone
from cachestore_svc.facts.records import AgentRecord, AgentUsage
from cachestore_svc.index.refusals import no_agent
from cachestore_svc.index.sqlite import garbage, versions
from cachestore_svc.index.sqlite.rights.owners import owners_of, ownership_of, set_ownership
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.index.sqlite.versions import Head
from cachestore_svc.index.values import AgentFilter
from cachestore_svc.sealing.sealed_names import AGENT


@dataclass(frozen=True, slots=True)
class AgentRow:
    id: int
    name: str
    is_pinned: bool
    retained_versions: int | None
    created_unix_ms: int


_SELECT = "SELECT id, name AS agent_id, is_pinned, retained_versions, created_unix_ms FROM agents"


def find_agent(rows: Rows, name: str) -> AgentRow | None:
    found = rows.one(f"{_SELECT} WHERE namespace_id = :namespace AND name = :agent_id", agent_id=name)
    return AgentRow(*found) if found else None


def get_row(rows: Rows, name: str) -> AgentRow:
    found = find_agent(rows, name)
    if found is None:
        raise no_agent(name)
    return found


def make_agent(rows: Rows, name: str, now_unix_ms: int) -> AgentRow:
    if found := find_agent(rows, name):
        return found
    rows.make_namespace()
    made = "INSERT INTO agents (namespace_id, name, created_unix_ms) VALUES (:namespace, :agent_id, :now)"
    rows.run(made, agent_id=name, now=now_unix_ms)
    return get_row(rows, name)


def get_agent(rows: Rows, agent_id: str, default_retained: int) -> AgentRecord:
    """An agent with its labels and the newest version of each line. Raises NotFound."""
    return _records_of(rows, [get_row(rows, agent_id)], default_retained)[0]


def agents_after(
    rows: Rows, wanted: AgentFilter, after: str, count: int, default_retained: int
) -> tuple[list[str], list[AgentRecord]]:
    """The `count` names that follow, fewer if they are the last; and which of these agents are wanted. Sealed names
    follow one another as their sealed forms do."""
    names, prefix = rows.texts.names, wanted.name_prefix
    place, first = (after, prefix) if names.keep_order else (after and names.text(AGENT, after), "")
    sql = f"{_SELECT} WHERE namespace_id = :namespace AND name > :after AND name >= :prefix ORDER BY name LIMIT :count"
    following = [AgentRow(*each) for each in rows.all(sql, after=place, prefix=first, count=count)]
    named = [each for each in following if each.name.startswith(prefix)]
    labels = labels_of(rows, [agent.id for agent in named]) if wanted.labels else {}
    labelled = [each for each in named if wanted.labels.items() <= labels.get(each.id, {}).items()]
    looked_at = named if names.keep_order else following
    return [agent.name for agent in looked_at], _records_of(rows, labelled, default_retained)


def _records_of(rows: Rows, agents: Sequence[AgentRow], default_retained: int) -> list[AgentRecord]:
    """Agents with all that is listed of them, by as many statements for a page of them as for one."""
    ids = [agent.id for agent in agents]
    labels, heads = labels_of(rows, ids), versions.heads_of(rows, ids)
    unused, owners = _unused_ms(rows, heads), owners_of(rows, [agent.name for agent in agents])
    return [
        AgentRecord(
            agent_id=agent.name,
            labels=labels[agent.id],
            is_pinned=bool(agent.is_pinned),
            retained_versions=agent.retained_versions or default_retained,
            created_unix_ms=agent.created_unix_ms,
            used_unix_ms=max([agent.created_unix_ms, *(head.used_unix_ms for head in heads[agent.id])]),
            lines=tuple(head.snapshot for head in heads[agent.id]),
            unused_ms=unused.get(agent.id, 0),
            ownership=owners.get(agent.name, HERE),
        )
        for agent in agents
    ]


def count_unused(rows: Rows, agent_id: str, passed_ms: int) -> None:
    """Add to an agent's unused time, or begin at 0 if it was used since. No effect if it is gone."""
    if agent := find_agent(rows, agent_id):
        heads = versions.heads_of(rows, [agent.id])
        before = _unused_ms(rows, heads).get(agent.id)
        unused_ms = 0 if before is None else before + passed_ms
        counted = """INSERT INTO unused VALUES (:agent, :used, :unused_ms) ON CONFLICT (agent_id)
            DO UPDATE SET used = excluded.used, unused_ms = excluded.unused_ms"""
        rows.run(counted, agent=agent.id, used=_used(heads[agent.id]), unused_ms=unused_ms)


def _unused_ms(rows: Rows, heads: Mapping[int, Sequence[Head]]) -> dict[int, int]:
    """What was counted of each of these agents that was not used since."""
    counted = (
        "SELECT agent_id AS agent, used, unused_ms FROM unused WHERE agent_id IN (SELECT value FROM json_each(:ids))"
    )
    found = rows.all(counted, ids=[*heads])
    return {agent: unused_ms for agent, used, unused_ms in found if used == _used(heads[agent])}


def _used(heads: Sequence[Head]) -> str:
    """An agent's uses until now: it changes with each, whichever way the clock was set."""
    return f"{sum(head.used_unix_ms for head in heads)} {sum(head.snapshot.version for head in heads)}"


def labels_of(rows: Rows, agents: Sequence[int]) -> dict[int, dict[str, str]]:
    """The labels of each of these agents, by name."""
    found = rows.all(
        """SELECT agent_id AS agent, name AS label, value AS label_value FROM labels
            WHERE agent_id IN (SELECT value FROM json_each(:ids))""",
        ids=agents,
    )
    labels: dict[int, dict[str, str]] = {agent: {} for agent in agents}
    for agent, name, value in sorted(found):
        labels[agent][name] = value
    return labels


def set_labels(rows: Rows, agent: int, labels: Mapping[str, str]) -> None:
    """Set these labels, however many the agent has then; an empty value removes one."""
    old = "DELETE FROM labels WHERE agent_id = :agent AND name IN (SELECT value FROM json_each(:label))"
    rows.run(old, agent=agent, label=[*labels])
    for name, value in labels.items():
        if value:
            new = "INSERT INTO labels (agent_id, name, value) VALUES (:agent, :label, :label_value)"
            rows.run(new, agent=agent, label=name, label_value=value)


def forget_agent(rows: Rows, agent_id: str, force: bool, now_unix_ms: int) -> int:
    """Forget an agent and its lines; the bytes that nothing holds now. Raises NotFound, FailedPrecondition."""
    agent = get_row(rows, agent_id)
    if agent.is_pinned and not force:
        raise FailedPrecondition(
            f"agent {agent_id!r} is pinned", reason="AGENT_PINNED", metadata={"agent_id": agent_id}
        )
    set_ownership(rows, agent_id, gone(ownership_of(rows, agent_id)))
    unheld = delete(rows, agent)
    garbage.mark(rows, unheld, now_unix_ms)
    return rows.number("SELECT SUM(size_bytes) FROM blobs WHERE id IN (SELECT value FROM json_each(:ids))", ids=unheld)


def delete(rows: Rows, agent: AgentRow) -> list[int]:
    """Remove the rows of an agent and its lines; ids of the blobs that nothing holds any more."""
    of_lines = "line_id IN (SELECT id FROM lines WHERE agent_id = :agent)"
    held = rows.all(f"SELECT DISTINCT manifest_id FROM versions WHERE {of_lines}", agent=agent.id)  # noqa: S608
    rows.run("DELETE FROM agents WHERE id = :agent", agent=agent.id)
    return [blob_id for (manifest_id,) in held for blob_id in versions.let_go(rows, manifest_id)]


def update_agent(
    rows: Rows, agent_id: str, labels: Mapping[str, str], is_pinned: bool | None, retained_versions: int | None
) -> None:
    """Change what is given. Raises NotFound, InvalidArgument."""
    agent = get_row(rows, agent_id)
    wanted = {**labels_of(rows, [agent.id])[agent.id], **labels}
    check_all_labels({name: value for name, value in wanted.items() if value})
    if labels.keys() != {FIRST_MOVE}:  # which no caller sets: it is no use of the agent
        rows.run("DELETE FROM unused WHERE agent_id = :agent", agent=agent.id)
    set_labels(rows, agent.id, labels)
    if is_pinned is not None:
        rows.run("UPDATE agents SET is_pinned = :is_pinned WHERE id = :agent", is_pinned=is_pinned, agent=agent.id)
    if retained_versions is not None:
        rows.run(
            "UPDATE agents SET retained_versions = :kept WHERE id = :agent", kept=retained_versions, agent=agent.id
        )


def held_digests(rows: Rows, agent_id: str) -> list[Digest]:
    """Every blob that some version of the agent holds, but for those in quarantine. Raises NotFound."""
    return rows.digests(
        """WITH held (manifest_id) AS (
                SELECT DISTINCT manifest_id FROM versions JOIN lines ON lines.id = versions.line_id
                WHERE lines.agent_id = :agent)
            SELECT hash, size_bytes FROM blobs WHERE NOT is_damaged AND id IN (
                SELECT manifest_id FROM held UNION
                SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM held))
            ORDER BY id""",
        agent=get_row(rows, agent_id).id,
    )


def usage_of(rows: Rows, agent_id: str) -> AgentUsage:
    """The blobs that the agent's versions name, and those that others' name too. Raises NotFound."""
    held = "FROM versions JOIN lines ON lines.id = versions.line_id WHERE lines.agent_id = :agent"
    others = "SELECT 1 FROM versions JOIN lines ON lines.id = versions.line_id"
    [found] = rows.all(
        f"""WITH held (manifest_id) AS (SELECT DISTINCT manifest_id {held}),
            named (blob_id) AS (SELECT manifest_id FROM held UNION
                SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM held)),
            counted (size_bytes, is_shared) AS (SELECT size_bytes,
                EXISTS ({others} WHERE versions.manifest_id = blobs.id AND lines.agent_id <> :agent)
                OR EXISTS ({others} JOIN manifest_blobs AS other ON other.manifest_id = versions.manifest_id
                    WHERE other.blob_id = blobs.id AND lines.agent_id <> :agent)
                FROM blobs WHERE id IN (SELECT blob_id FROM named))
            SELECT (SELECT COUNT(*) {held}), COUNT(*), COALESCE(SUM(size_bytes), 0),
                COUNT(CASE WHEN is_shared THEN 1 END), COALESCE(SUM(CASE WHEN is_shared THEN size_bytes END), 0)
            FROM counted""",  # noqa: S608  all of it is written above
        agent=get_row(rows, agent_id).id,
    )
    return AgentUsage(*found)
