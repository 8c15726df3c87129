"""The history of events, and the store's own notes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cachestore_svc.facts.records import EventBatch, EventBody, EventCursor


@dataclass(frozen=True, slots=True)
class History:
    """The event history of every namespace: its name, which changes when events were lost, and how much is kept."""

    incarnation: str
    kept_events: int


class EventsView(Protocol):
    def events_after(self, history: History, cursor: EventCursor | None, limit: int) -> EventBatch:
        """Events after a cursor. One of another incarnation, of the future, or too old has lost some."""

    def fact(self, name: str) -> str | None:
        """What the store noted under this name, if it did. No namespace and nothing of one belongs there."""

    def incarnation(self, inode: str) -> str | None:
        """The name of the event history; None when there is none, or when it was written under another inode."""


class EventsChange(EventsView, Protocol):
    def add_events(self, history: History, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
        """Add events, and let go of the oldest beyond the limit."""

    def set_fact(self, name: str, value: str) -> None:
        """Note something of the store's own. A recovery forgets it."""

    def begin_incarnation(self, inode: str, name: str) -> str:
        """Give the event history a name; that name."""

    def forget_incarnation(self) -> None:
        """The history lost events: the next start gives it another name."""
