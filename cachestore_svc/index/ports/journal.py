"""The index against its journal, and damage of either."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.manifests import ManifestFacts, SharedBlock
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Change, State, Version, VersionKey

# Reads a manifest of a namespace and checks it: its facts, and its blocks that others may find, as the index has them.
ReadManifest = Callable[[str, Digest], tuple[ManifestFacts, Sequence[SharedBlock]]]


class Unheld(Exception):
    """A version's manifest, or a blob that it names, is not in the catalog. The message says which."""


class JournalView(Protocol):
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
        """Whether look-ups may miss entries that the tables have. Raises DataLoss (INDEX_DAMAGED) when the tables
        themselves are damaged."""

    def integrity_problems(self) -> list[str]:
        """Faults of tables and look-ups, in words."""

    def dangling_rows(self) -> list[str]:
        """Entries that name an entry that is not there, in words."""


class JournalChange(JournalView, Protocol):
    def apply_changes(self, read: ReadManifest, changes: Iterable[Change]) -> None:
        """Let changes of a journal happen. Raises Unheld, and what `read` raises."""

    def fence_changes(self, changes: Iterable[Change]) -> None:
        """Shut out late writers of what these changes took back: leases are not in the journal."""

    def hold_version(self, read: ReadManifest, agent_id: str, key: VersionKey, new: Version) -> None:
        """Write a version with the number that it had. Raises Unheld, and what `read` raises."""

    def set_journal_position(self, store: str, reached: Position) -> None:
        """Note how far the index followed its journal."""
