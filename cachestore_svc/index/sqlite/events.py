"""Events of a namespace, numbered for itself so that no other learns of them, and a mark when some were lost."""

import json
from collections.abc import Callable, Iterable, Sequence
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
from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.index.values import INCARNATION

_OTHERS: dict[str, type[EventBody]] = {each.__name__: each for each in (AgentDeleted, AgentUpdated, LeaseWanted)}
_LAST = "SELECT last_event FROM namespaces WHERE id = :namespace"


def add_events(rows: Rows, kept_events: int, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
    """Add events, and let go of the oldest beyond so many."""
    rows.make_namespace()
    for body in bodies:
        rows.later("UPDATE namespaces SET last_event = last_event + 1 WHERE id = :namespace")
        new = "INSERT INTO events SELECT id, last_event, :now, :body FROM namespaces WHERE id = :namespace"
        rows.later(new, now=now_unix_ms, body=_to_json(rows, body))
    old = f"namespace_id = :namespace AND sequence <= ({_LAST}) - :kept"
    rows.later(f"DELETE FROM events WHERE {old}", kept=kept_events)  # noqa: S608


def fact(rows: Rows, name: str) -> str | None:
    """What the store noted under this name, if it did. No namespace and nothing of one belongs there."""
    found = rows.one("SELECT value FROM facts WHERE name = :name", name=name)
    return None if found is None else str(found[0])


def set_fact(rows: Rows, name: str, value: str) -> None:
    """Note something of the store's own. A recovery forgets it."""
    noted = "INSERT INTO facts VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    rows.run(noted, name=name, value=value)


def events_after(rows: Rows, kept_events: int, cursor: EventCursor | None, limit: int) -> EventBatch:
    """Events after a cursor. One of another incarnation, of the future, or too old has lost some."""
    last, incarnation = rows.number(_LAST), fact(rows, INCARNATION) or ""
    now = EventCursor(incarnation, last)
    if cursor is None:
        return EventBatch((), now)
    if cursor.incarnation != incarnation or not last - kept_events <= cursor.sequence <= last:
        return EventBatch((), now, is_lost=True)
    later = """SELECT sequence, at_unix_ms, body FROM events
        WHERE namespace_id = :namespace AND sequence > :sequence ORDER BY sequence LIMIT :limit"""
    events = tuple(
        Event(EventCursor(incarnation, sequence), at_unix_ms, _from_json(rows, body))
        for sequence, at_unix_ms, body in rows.all(later, sequence=cursor.sequence, limit=limit)
    )
    return EventBatch(events, events[-1].cursor if events else cursor)


def _to_json(rows: Rows, body: EventBody) -> str:
    fields = _texts_of(asdict(body), rows.texts.sealed)
    return json.dumps({"event": type(body).__name__, **fields}, separators=(",", ":"))


def _texts_of(fields: dict[str, Any], change: Callable[[str, Sequence[str]], Sequence[str]]) -> dict[str, Any]:
    return {
        name: change(name, [value])[0]
        if isinstance(value, str)
        else _texts_of(value, change)
        if isinstance(value, dict)
        else value
        for name, value in fields.items()
    }


def _from_json(rows: Rows, text: str) -> EventBody:
    found = json.loads(text)
    event = found.pop("event")
    fields = _texts_of(found, rows.texts.opened)
    if event == "Committed":
        snapshot = fields["snapshot"]
        manifest, origin = Digest(**snapshot.pop("manifest")), Origin(snapshot.pop("origin"))
        return Committed(SnapshotVersion(manifest=manifest, origin=origin, **snapshot))
    if event == "BlobDamaged":
        return BlobDamaged(Digest(**fields["digest"]))
    return _OTHERS[event](**fields)
