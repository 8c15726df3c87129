"""Events of a namespace: one row each, a cursor per reader, and a mark when some were lost.

Sequences count per namespace, so that a watcher learns nothing of what happens in another.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict

from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import (
    AgentDeleted,
    AgentUpdated,
    BlobDamaged,
    Committed,
    Event,
    EventBatch,
    EventBody,
    EventCursor,
    LeaseWanted,
    Origin,
    SnapshotVersion,
)
from cachestore_svc.index.catalog import History
from cachestore_svc.index.sqlite.blobs import find_namespace, make_namespace
from cachestore_svc.index.sqlite.rows import Rows


def add_events(rows: Rows, history: History, namespace: str, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
    """Add events, and let go of the oldest beyond the limit."""
    namespace_id = make_namespace(rows, namespace)
    for body in bodies:
        rows.run("UPDATE namespaces SET last_event = last_event + 1 WHERE id = ?", namespace_id)
        last = _last(rows, namespace_id)
        rows.run("INSERT INTO events VALUES (?, ?, ?, ?)", namespace_id, last, now_unix_ms, _to_json(body))
        rows.run(
            "DELETE FROM events WHERE namespace_id = ? AND sequence <= ?", namespace_id, last - history.kept_events
        )


def fact(rows: Rows, name: str) -> str | None:
    """What the store noted under this name."""
    found = rows.one("SELECT value FROM facts WHERE name = ?", name)
    return None if found is None else str(found[0])


def set_fact(rows: Rows, name: str, value: str) -> None:
    """Note something of the store's own."""
    rows.table("facts").upsert({"name": name, "value": value}, pk="name")


def events_after(rows: Rows, history: History, namespace: str, cursor: EventCursor | None, limit: int) -> EventBatch:
    """Events after a cursor. One of another incarnation, of the future, or too old has lost some."""
    namespace_id = find_namespace(rows, namespace)
    last = _last(rows, namespace_id)
    now = EventCursor(history.incarnation, last)
    if cursor is None:
        return EventBatch((), now)
    if cursor.incarnation != history.incarnation or not last - history.kept_events <= cursor.sequence <= last:
        return EventBatch((), now, is_lost=True)
    found = rows.all(
        """SELECT sequence, at_unix_ms, body FROM events
            WHERE namespace_id = ? AND sequence > ? ORDER BY sequence LIMIT ?""",
        namespace_id,
        cursor.sequence,
        limit,
    )
    events = tuple(
        Event(EventCursor(history.incarnation, sequence), at_unix_ms, _from_json(body))
        for sequence, at_unix_ms, body in found
    )
    return EventBatch(events, events[-1].cursor if events else cursor)


def _last(rows: Rows, namespace_id: int) -> int:
    found = rows.one("SELECT last_event FROM namespaces WHERE id = ?", namespace_id)
    return int(found[0]) if found else 0


def _to_json(body: EventBody) -> str:
    return json.dumps({"event": type(body).__name__, **asdict(body)}, separators=(",", ":"))


def _from_json(text: str) -> EventBody:
    fields = json.loads(text)
    match fields.pop("event"):
        case "Committed":
            snapshot = fields["snapshot"]
            manifest, origin = Digest(**snapshot.pop("manifest")), Origin(snapshot.pop("origin"))
            return Committed(SnapshotVersion(manifest=manifest, origin=origin, **snapshot))
        case "AgentDeleted":
            return AgentDeleted(**fields)
        case "AgentUpdated":
            return AgentUpdated(**fields)
        case "LeaseWanted":
            return LeaseWanted(**fields)
        case "BlobDamaged":
            return BlobDamaged(Digest(**fields["digest"]))
        case other:
            raise ValueError(f"event {other!r} is unknown")
