"""Applies the journal's last group to an index that lacks it: a crash came between the sync and the commit."""

from collections.abc import Iterable

from kvasir.errors import FailedPrecondition, KvasirError

from cachestore_svc.blobs.backend import Damaged
from cachestore_svc.index.catalog import CatalogChange
from cachestore_svc.index.ports.history import ReadManifest, Unheld
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Change

INODE = "inode"  # of the database in which the history of events goes on: in another one it has another name


def roll_forward(
    change: CatalogChange, read: ReadManifest, changes: Iterable[Change], store: str, position: Position
) -> None:
    """Repeat the journal's last group, under a new name of the event history. Raises FailedPrecondition."""
    try:
        change.apply_changes(read, changes)
        change.fence_changes(changes)
    except (Unheld, KvasirError, Damaged, OSError) as error:
        if isinstance(error, FailedPrecondition) and error.reason == "NAMESPACE_SEALED":
            raise
        raise FailedPrecondition(
            f"the last commit of the journal cannot be repeated: {error}; stop the store and run: kvasir store recover",
            reason="INDEX_BEHIND",
        ) from error
    change.set_journal_position(store, position)
    change.set_fact(INODE, "")
