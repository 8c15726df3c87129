"""New versions made of old manifests: a fork starts a line at another's version, a rollback repeats an earlier one."""

from kvasir.errors import AlreadyExists

from cachestore_svc.facts.records import LineQuery, Origin, SnapshotVersion, named_version
from cachestore_svc.index.refusals import head_moved
from cachestore_svc.index.sqlite import agents, versions
from cachestore_svc.index.sqlite.committing import retain
from cachestore_svc.index.sqlite.rows import Rows


def fork_agent(
    rows: Rows, source: LineQuery, agent_id: str, version: int | None, now_unix_ms: int
) -> list[SnapshotVersion]:
    """The newest version of each line, in their order, or that one."""
    lines = versions.lines_of(rows, agents.get_row(rows, source.agent_id).id)
    if source.kv_identity_hash is not None:
        lines = [versions.get_line(rows, source)]
    if version is not None:
        lines = [versions.line_with(rows, source, version)]
    if agents.find_agent(rows, agent_id):
        raise AlreadyExists(f"agent {agent_id!r} exists", reason="AGENT_EXISTS", metadata={"agent_id": agent_id})
    agent = agents.make_agent(rows, agent_id, now_unix_ms)
    return [_fork_line(rows, agent.id, line, version, now_unix_ms) for line in reversed(lines)]


def roll_back(
    rows: Rows, query: LineQuery, version: int, expected_head: int | None, default_retained: int, now_unix_ms: int
) -> SnapshotVersion:
    agent = agents.get_row(rows, query.agent_id)
    line = versions.line_with(rows, query, version)
    old = versions.get_version(rows, line, version)
    head = versions.newest_number(rows, agent.id)
    if expected_head is not None and expected_head != head:
        raise head_moved(head, expected_head)
    manifest_id = versions.manifest_id_of(rows, line.id, old.version)
    made = head, manifest_id, Origin.ROLLBACK, named_version(version)
    added = versions.add_version(rows, line.id, *made, now_unix_ms)
    versions.touch(rows, line.id, now_unix_ms)
    retain(rows, agent, line.id, default_retained)
    return added


def _fork_line(
    rows: Rows, agent_id: int, source: versions.Line, version: int | None, now_unix_ms: int
) -> SnapshotVersion:
    old = versions.get_version(rows, source, version)
    line_id = versions.make_line(rows, agent_id, source.kv_identity_hash, now_unix_ms)
    manifest_id = versions.manifest_id_of(rows, source.id, old.version)
    made = 0, manifest_id, Origin.FORK, f"{old.agent_id} version {old.version}"
    return versions.add_version(rows, line_id, *made, now_unix_ms)
