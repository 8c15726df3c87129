"""Provenance: each blob that an archive or another store brought has a mark, manifests too, and a commit passes it on
to what is computed on brought rows. A marked blob is never shared, and its mark ends with it. Rows prove nothing about
a text's author: a move brings what the agent's owner had, and a manifest's mark shows it by its value.
"""

from collections.abc import Sequence

from cachestore_svc.index.sqlite.rows import Rows
from cachestore_svc.index.values import BlobEntry

BROUGHT, TEXT_OWN = 1, 2


def mark(rows: Rows, manifest: BlobEntry, named: Sequence[BlobEntry], *, is_brought: bool) -> list[BlobEntry]:
    """Mark the blobs that a commit makes brought; returns those that had no mark. `named`: the manifest's blobs, in its
    order; `is_brought`: all of it came from elsewhere. A blob that a version of this store's own engines names stays
    unmarked when it is brought again: equal digests are equal bytes, and otherwise any client could end all sharing by
    an export and an import.
    """
    everything = [*named, manifest]
    if is_brought:
        ours = _held_as_ours(rows, [blob.id for blob in everything])
        new = [blob for blob in everything if not blob.is_brought and blob.id not in ours]
    else:
        new = [blob for blob in _computed_on_brought(manifest, named) if not blob.is_brought]
    if new:
        brought = "UPDATE blobs SET is_brought = 1 WHERE id IN (SELECT value FROM json_each(:ids))"
        rows.later(brought, ids=[blob.id for blob in new])
    return new


def mark_text_own(rows: Rows, manifest: BlobEntry) -> None:
    """Note that moves from owners alone brought a manifest, if anything did."""
    own = f"UPDATE blobs SET is_brought = {TEXT_OWN} WHERE id = :manifest AND is_brought = {BROUGHT}"  # noqa: S608
    rows.later(own, manifest=manifest.id)


def _computed_on_brought(manifest: BlobEntry, named: Sequence[BlobEntry]) -> list[BlobEntry]:
    """Blobs with rows behind the first brought one, and the manifest if there are any."""
    first = min((_first_row(blob) for blob in named if blob.is_brought), default=None)
    if first is None:
        return []
    return [*(blob for blob in named if _end(blob) > first), manifest]


def _first_row(blob: BlobEntry) -> int:
    """Where what depends on a blob begins. A state holds what all tokens before it left."""
    return _end(blob) if blob.kind == "state" else blob.start or 0


def _end(blob: BlobEntry) -> int:
    return (blob.start or 0) + (blob.tokens or 0)


def _held_as_ours(rows: Rows, blob_ids: Sequence[int]) -> set[int]:
    found = rows.all(
        """SELECT wanted.value FROM json_each(:ids) AS wanted WHERE
            EXISTS (SELECT 1 FROM manifests JOIN blobs ON blobs.id = manifests.blob_id
                WHERE manifests.blob_id = wanted.value AND blobs.is_brought = 0)
            OR EXISTS (SELECT 1 FROM manifest_blobs JOIN blobs ON blobs.id = manifest_blobs.manifest_id
                WHERE manifest_blobs.blob_id = wanted.value AND blobs.is_brought = 0)""",
        ids=blob_ids,
    )
    return {int(blob_id) for (blob_id,) in found}
