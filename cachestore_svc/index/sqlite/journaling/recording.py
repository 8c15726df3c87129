"""Records what a group commit changes of agents and versions, for the journal: by triggers of the connection, so that
no operation can forget it, and what a savepoint undoes leaves the record, too.
"""

from typing import NamedTuple

from cachestore_svc.index.sqlite.journaling import index_state
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.journal.journal import Journal


class _Caught(NamedTuple):
    """A trigger: on which event it writes which change, made of which rows."""

    event: str
    change: str
    rows: str
    manifest: str = "NULL"


def _written(table: str, change: str, rows: str, manifest: str = "NULL") -> list[_Caught]:
    return [_Caught(f"{verb} ON main.{table}", change, rows, manifest) for verb in ("INSERT", "UPDATE")]


_AGENT = "'agent', namespaces.name, NEW.name, NEW.is_pinned, NEW.retained_versions, NEW.created_unix_ms"
_LABEL = "'label', namespaces.name, agents.name, {row}.name, {value}"
_VERSION = """'version', namespaces.name, agents.name, lines.kv_identity_hash, NEW.version, NEW.parent_version,
    blobs.hash, blobs.size_bytes, NEW.origin, NEW.origin_detail, NEW.created_unix_ms"""
_OWNER = """'owner', namespaces.name, NEW.agent_name, NEW.state, NEW.generation, NEW.peer, NEW.move_id,
    NEW.since_unix_ms, NEW.was_owned, NEW.tells, NEW.had_by"""
_DROP = "'drop', namespaces.name, agents.name, lines.kv_identity_hash, OLD.version"
_BROUGHT = "'brought', namespaces.name, {row}.hash, {value}"

_OF_NAMESPACE = "namespaces WHERE namespaces.id = {row}.namespace_id"
_OF_AGENT = """agents JOIN namespaces ON namespaces.id = agents.namespace_id WHERE agents.id = {row}.agent_id"""
_OF_LINE = """lines JOIN agents ON agents.id = lines.agent_id JOIN namespaces ON namespaces.id = agents.namespace_id
    {join} WHERE lines.id = {row}.line_id"""
_OF_NEW_VERSION = _OF_LINE.format(row="NEW", join="JOIN blobs ON blobs.id = NEW.manifest_id")

# An agent's own row goes before its labels and versions: nothing is joined then, and "forget" stands for all of it.
_ALL_CAUGHT = (
    *_written("agents", _AGENT, _OF_NAMESPACE.format(row="NEW")),
    _Caught("DELETE ON main.agents", "'forget', namespaces.name, OLD.name", _OF_NAMESPACE.format(row="OLD")),
    *_written("labels", _LABEL.format(row="NEW", value="NEW.value"), _OF_AGENT.format(row="NEW")),
    _Caught("DELETE ON main.labels", _LABEL.format(row="OLD", value="NULL"), _OF_AGENT.format(row="OLD")),
    *_written("versions", _VERSION, _OF_NEW_VERSION, "NEW.manifest_id"),
    _Caught("DELETE ON main.versions", _DROP, _OF_LINE.format(row="OLD", join="")),
    *_written("owners", _OWNER, _OF_NAMESPACE.format(row="NEW")),
)
_CAUGHT_OF_BLOBS = [
    _Caught(event, _BROUGHT.format(row=row, value=value), _OF_NAMESPACE.format(row=row))
    for event, row, value in (
        ("INSERT ON main.blobs WHEN NEW.is_brought", "NEW", "1"),
        ("UPDATE OF is_brought ON main.blobs WHEN NEW.is_brought <> OLD.is_brought", "NEW", "NEW.is_brought"),
        ("DELETE ON main.blobs WHEN OLD.is_brought", "OLD", "0"),
    )
]


class Recorder:
    """Writes to a journal what each group commit changed, before it is committed. Used on the index thread alone."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def begin(self, rows: Rows) -> None:
        rows.run("CREATE TEMP TABLE changes (id INTEGER PRIMARY KEY, change TEXT NOT NULL, manifest_id INTEGER)")
        for number, (event, change, source, manifest) in enumerate((*_ALL_CAUGHT, *_CAUGHT_OF_BLOBS)):
            rows.run(
                f"""CREATE TEMP TRIGGER caught_{number} AFTER {event} BEGIN
                    INSERT INTO changes (change, manifest_id) SELECT json_array({change}), {manifest} FROM {source};
                    END"""  # noqa: S608  all of it is written above
            )

    def record(self, rows: Rows) -> None:
        """Write the transaction's changes, if any, to the journal, and into it how far that came. Raises OSError."""
        caught = rows.all("SELECT change, manifest_id FROM temp.changes ORDER BY id")
        if caught:
            rows.run("DELETE FROM temp.changes")
            changes = [_whole(rows, change, manifest_id) for change, manifest_id in caught]
            position = self.journal.append(changes)
            index_state.set_journal_position(rows, self.journal.store, position)


def _whole(rows: Rows, change: str, manifest_id: int | None) -> str:
    """A caught change as the journal has it: that of a version ends with its manifest's facts."""
    if manifest_id is None:
        return change
    return f'{change[:-1]},"{index_state.fingerprint(rows, manifest_id)}"]'
