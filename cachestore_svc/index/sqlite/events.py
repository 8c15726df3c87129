"""Events of a namespace: one row each, a cursor per reader, and a mark when some were lost.

Sequences count per namespace, so that a watcher learns nothing of what happens in another.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

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
from cachestore_svc.index.ports.events import History
from cachestore_svc.index.sqlite.blobs import find_namespace, make_namespace
from cachestore_svc.index.sqlite.rows import AGENT, DETAIL, HASH, PLAIN, REQUEST, Column, Rows

# Of the texts in an event.
_COLUMNS = {
    "agent_id": AGENT,
    "kv_identity_hash": PLAIN,
    "hash": HASH,
    "origin_detail": DETAIL,
    "request_id": REQUEST,
}


def add_events(rows: Rows, history: History, namespace: str, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
    namespace_id = make_namespace(rows, namespace)
    for body in bodies:
        rows.run("UPDATE namespaces SET last_event = last_event + 1 WHERE id = ?", namespace_id)
        last = _last(rows, namespace_id)
        rows.run("INSERT INTO events VALUES (?, ?, ?, ?)", namespace_id, last, now_unix_ms, PLAIN(_to_json(rows, body)))
        rows.run(
            "DELETE FROM events WHERE namespace_id = ? AND sequence <= ?", namespace_id, last - history.kept_events
        )


def fact(rows: Rows, name: str) -> str | None:
    found = rows.one("SELECT value FROM facts WHERE name = ?", PLAIN(name))
    return None if found is None else str(found[0])


def set_fact(rows: Rows, name: str, value: str) -> None:
    rows.run("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", PLAIN(name), PLAIN(value))


def events_after(rows: Rows, history: History, namespace: str, cursor: EventCursor | None, limit: int) -> EventBatch:
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
        Event(EventCursor(history.incarnation, sequence), at_unix_ms, _from_json(rows, body))
        for sequence, at_unix_ms, body in found
    )
    return EventBatch(events, events[-1].cursor if events else cursor)


def _last(rows: Rows, namespace_id: int) -> int:
    found = rows.one("SELECT last_event FROM namespaces WHERE id = ?", namespace_id)
    return int(found[0]) if found else 0


def _to_json(rows: Rows, body: EventBody) -> str:
    fields = _texts_of(asdict(body), lambda column, text: rows.sealed(column, [text])[0])
    return json.dumps({"event": type(body).__name__, **fields}, separators=(",", ":"))


def _texts_of(fields: dict[str, Any], change: Callable[[Column, str], str]) -> dict[str, Any]:
    """The fields of an event with each text changed, as its column is. Raises KeyError for a text without a column."""
    return {
        name: change(_COLUMNS[name], value)
        if isinstance(value, str)
        else _texts_of(value, change)
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def _from_json(rows: Rows, text: str) -> EventBody:
    found = json.loads(text)
    event = found.pop("event")
    fields = _texts_of(found, rows.opened)
    match event:
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
