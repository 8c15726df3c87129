"""Lets the journal's last group happen in an index that lacks it: the group was synced, and then not committed."""

from collections.abc import Iterable

from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.backend import BlobBackend, Damaged
from cachestore_svc.index.catalog import CatalogChange, Unheld
from cachestore_svc.journal.journal_lines import Position
from cachestore_svc.journal.replay import Change
from cachestore_svc.manifests import ManifestFacts, read_manifest


def roll_forward(
    change: CatalogChange, backend: BlobBackend, changes: Iterable[Change], store: str, position: Position
) -> None:
    """Repeat the changes of the journal's last group. The event history gets a new name, so that watchers learn that
    they missed something. Raises FailedPrecondition (INDEX_BEHIND)."""

    def read(namespace: str, digest: Digest) -> ManifestFacts:
        return read_manifest(backend.of(namespace).read(digest))

    try:
        change.apply_changes(read, changes)
        change.fence_changes(changes)
    except (Unheld, KvasirError, Damaged, OSError) as error:
        raise FailedPrecondition(
            f"the last commit of the journal cannot be repeated: {error}; stop the store and run: kvasir store recover",
            reason="INDEX_BEHIND",
        ) from error
    change.set_journal_position(store, position)
    change.forget_incarnation()
