"""Rows of agents: their names, labels, pins, and how they are changed and forgotten."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir.errors import InvalidArgument, NotFound
from kvasir.formats.digest import Digest

from cachestore_svc.index.sqlite import versions
from cachestore_svc.index.sqlite.index import Rows
from cachestore_svc.records import AgentRecord

MAX_LABELS = 64
MAX_LABEL_CHARS = 256
# Rows are in no quota, and a fork copies none: an agent's labels stay small.
MAX_LABELS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class AgentRow:
    id: int
    name: str
    is_pinned: bool
    retained_versions: int | None
    created_unix_ms: int


COLUMNS = "id, name, is_pinned, retained_versions, created_unix_ms"


def find_agent(rows: Rows, namespace_id: int, name: str) -> AgentRow | None:
    found = rows.one(
        f"SELECT {COLUMNS} FROM agents WHERE namespace_id = ? AND name = ?",  # noqa: S608
        namespace_id,
        name,
    )
    return AgentRow(*found) if found else None


def get_agent(rows: Rows, namespace_id: int, name: str) -> AgentRow:
    """Raises NotFound."""
    found = find_agent(rows, namespace_id, name)
    if found is None:
        raise NotFound("there is no such agent")
    return found


def make_agent(rows: Rows, namespace_id: int, name: str, now_unix_ms: int) -> AgentRow:
    rows.run(
        "INSERT OR IGNORE INTO agents (namespace_id, name, created_unix_ms) VALUES (?, ?, ?)",
        namespace_id,
        name,
        now_unix_ms,
    )
    return get_agent(rows, namespace_id, name)


def record(rows: Rows, agent: AgentRow, default_retained: int) -> AgentRecord:
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
    )


def labels_of(rows: Rows, agent_id: int) -> dict[str, str]:
    return dict(rows.all("SELECT name, value FROM labels WHERE agent_id = ? ORDER BY name", agent_id))


def set_labels(rows: Rows, agent_id: int, labels: Mapping[str, str]) -> None:
    """Set these; an empty value removes. Raises InvalidArgument when they would be too many."""
    for name, value in labels.items():
        if value:
            rows.run("INSERT OR REPLACE INTO labels VALUES (?, ?, ?)", agent_id, name, value)
        else:
            rows.run("DELETE FROM labels WHERE agent_id = ? AND name = ?", agent_id, name)
    kept = rows.all("SELECT name, value FROM labels WHERE agent_id = ?", agent_id)
    _check_label_sizes([str(text) for label in kept for text in label])


def _check_label_sizes(texts: Sequence[str]) -> None:
    """`texts`: names and values of all labels of an agent."""
    if len(texts) > 2 * MAX_LABELS:
        raise InvalidArgument(f"labels: expected at most {MAX_LABELS}, got {len(texts) // 2}", field="labels")
    if (size_bytes := sum(len(text.encode()) for text in texts)) > MAX_LABELS_BYTES:
        raise InvalidArgument(
            f"labels: expected at most {MAX_LABELS_BYTES} bytes in all, got {size_bytes}", field="labels"
        )


def delete_agent(rows: Rows, agent: AgentRow) -> list[int]:
    """Forget an agent and its lines; ids of the blobs that nothing holds any more."""
    held = rows.all(
        "SELECT DISTINCT manifest_id FROM versions WHERE line_id IN (SELECT id FROM lines WHERE agent_id = ?)", agent.id
    )
    rows.run("DELETE FROM agents WHERE id = ?", agent.id)
    return [blob_id for (manifest_id,) in held for blob_id in versions.let_go(rows, manifest_id)]


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises InvalidArgument for too many labels, and for one that is not short and printable."""
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(f"labels: expected at most {MAX_LABELS}, got {len(labels)}", field="labels")
    for name, value in labels.items():
        if not (1 <= len(name) <= MAX_LABEL_CHARS and name.isprintable()):
            raise InvalidArgument(
                f"labels: expected names of 1 to {MAX_LABEL_CHARS} printable characters", field="labels"
            )
        if len(value) > MAX_LABEL_CHARS or not value.isprintable():
            raise InvalidArgument(
                f"labels: expected values of at most {MAX_LABEL_CHARS} printable characters", field="labels"
            )


def update(
    rows: Rows, agent: AgentRow, labels: Mapping[str, str], is_pinned: bool | None, retained_versions: int | None
) -> None:
    """Change what is given."""
    set_labels(rows, agent.id, labels)
    if is_pinned is not None:
        rows.run("UPDATE agents SET is_pinned = ? WHERE id = ?", is_pinned, agent.id)
    if retained_versions is not None:
        rows.run("UPDATE agents SET retained_versions = ? WHERE id = ?", retained_versions, agent.id)


def held_digests(rows: Rows, agent: AgentRow) -> list[Digest]:
    """Every blob that some version of the agent holds, manifests too, but for those in quarantine."""
    found = rows.all(
        """WITH held (manifest_id) AS (
                SELECT DISTINCT manifest_id FROM versions JOIN lines ON lines.id = versions.line_id
                WHERE lines.agent_id = ?)
            SELECT hash, size_bytes FROM blobs WHERE NOT is_damaged AND id IN (
                SELECT manifest_id FROM held UNION
                SELECT blob_id FROM manifest_blobs WHERE manifest_id IN (SELECT manifest_id FROM held))
            ORDER BY id""",
        agent.id,
    )
    return [Digest(*row) for row in found]
