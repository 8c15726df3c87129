"""The history of events, the store's own notes, and the index against its journal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.facts.records import EventBatch, EventBody, EventCursor
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Change, State, Version, VersionKey


@dataclass(frozen=True, slots=True)
class History:
    """The event history of every namespace: its name, which changes when events were lost, and how much is kept."""

    incarnation: str
    kept_events: int


# Reads a manifest of a namespace and checks it: its facts, and its blocks that others may find, as the index has them.
ReadManifest = Callable[[str, Digest], tuple[ManifestFacts, Sequence[SharedBlock]]]


class Unheld(Exception):
    """A version's manifest, or a blob that it names, is not in the catalog. The message says which."""


class HistoryView(Protocol):
    def events_after(self, history: History, cursor: EventCursor | None, limit: int) -> EventBatch:
        """Events after a cursor. One of another incarnation, of the future, or too old has lost some."""

    def fact(self, name: str) -> str | None:
        """What the store noted under this name, if it did. No namespace and nothing of one belongs there."""

    def journal_position(self) -> tuple[str, Position] | None:
        """The journal's store and how far the index followed it; None when it never had a journal."""

    def state(self) -> State:
        """Everything that the journal records, as the index has it now."""

    def state_anyway(self) -> State:
        """The same where text is damaged: it is then read as what it resembles."""

    def namespaces_anyway(self) -> list[str]:
        """Names of all namespaces, where text is damaged, too."""

    def has_tables(self) -> bool:
        """Whether this is a store's index at all."""

    def is_too_new(self) -> bool:
        """Whether a later Kvasir changed its form."""

    def wrong_indexes(self) -> bool:
        """Whether look-ups may miss entries that the tables have. Raises DataLoss (INDEX_DAMAGED)."""

    def problems(self) -> list[tuple[str, str]]:
        """Faults of tables and look-ups (INDEX_DAMAGED), and entries that name a missing one (DANGLING_ROW)."""


class HistoryChange(HistoryView, Protocol):
    def add_events(self, history: History, bodies: Iterable[EventBody], now_unix_ms: int) -> None:
        """Add events, and let go of the oldest beyond the limit."""

    def set_fact(self, name: str, value: str) -> None:
        """Note something of the store's own. A recovery forgets it."""

    def apply_changes(self, read: ReadManifest, changes: Iterable[Change]) -> None:
        """Let changes of a journal happen. Raises Unheld, and what `read` raises."""

    def fence_changes(self, changes: Iterable[Change]) -> None:
        """Shut out late writers of what these changes took back: leases are not in the journal."""

    def hold_version(self, read: ReadManifest, agent_id: str, key: VersionKey, new: Version) -> None:
        """Write a version with the number that it had. Raises Unheld, and what `read` raises."""

    def set_journal_position(self, store: str, reached: Position) -> None:
        """Note how far the index followed its journal."""
