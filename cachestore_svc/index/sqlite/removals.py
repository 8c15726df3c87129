"""Names of objects that are being removed, where several stores share the objects, or one that was thought dead may go
on. A name's removal may still be on its way after it was answered: so the name rests for a while before it is used
again. A blob that comes back meanwhile gets an object of its next edition.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvasir.formats.digest import Digest

from cachestore_svc.blobs.blob_checks import BlobFacts
from cachestore_svc.blobs.blob_writer import NameTaken
from cachestore_svc.index.sqlite.blobs import add_blobs
from cachestore_svc.index.sqlite.rows import Rows

_LISTED = "hash IN (SELECT value FROM json_each(:hash))"
_KEPT = -1


class Removal(NamedTuple):
    hash: str
    edition: int
    size_bytes: int  # _KEPT: of an object that is set aside

    @property
    def is_kept(self) -> bool:
        """Whether the object's bytes are set aside rather than removed, however many starts that takes."""
        return self.size_bytes == _KEPT


def free_editions(rows: Rows, hashes: Sequence[str]) -> dict[str, int]:
    """The edition under which each blob may be written: that of its row, or one that nobody removes."""
    editions = dict.fromkeys(hashes, 0)
    for hash_, edition in _of(rows, "removals", hashes):
        editions[hash_] = max(editions[hash_], edition + 1)
    return editions | dict(_of(rows, "blobs", hashes))


def add_editions(
    rows: Rows, blobs: Sequence[tuple[Digest, BlobFacts]], editions: Mapping[str, int], now_unix_ms: int
) -> list[bool]:
    """As `add_blobs`, of objects with these editions. Raises NameTaken: one of them is being removed since."""
    hashes = [digest.hash for digest, _ in blobs]
    listed = dict(_of(rows, "blobs", hashes))
    damaged = {digest.hash for digest in rows.digests(_DAMAGED, hash=hashes)}
    are_new = add_blobs(rows, blobs, now_unix_ms)
    if any(editions[hash_] == edition for hash_, edition in _of(rows, "removals", hashes)):
        raise NameTaken
    for digest, _ in blobs:
        hash_, ours = digest.hash, editions[digest.hash]
        before = listed.get(hash_)
        if before is None or hash_ in damaged:
            _set_edition(rows, hash_, ours)
        surplus = before if hash_ in damaged else ours
        if before not in (None, ours) and surplus is not None:
            _note(rows, Removal(hash_, surplus, digest.size_bytes), now_unix_ms)
    return are_new


_DAMAGED = f"SELECT hash, size_bytes FROM blobs WHERE namespace_id = :namespace AND is_damaged AND {_LISTED}"  # noqa: S608


def _set_edition(rows: Rows, hash_: str, edition: int) -> None:
    """Note which object has the bytes of a listed blob."""
    own = "namespace_id = :namespace AND hash = :hash AND edition <> :edition"
    rows.run(f"UPDATE blobs SET edition = :edition WHERE {own}", hash=hash_, edition=edition)  # noqa: S608


def note_removals(rows: Rows, blob_ids: Sequence[int], now_unix_ms: int) -> None:
    """Note that the objects of these blobs are removed, within the operation that removes their rows."""
    rows.run(
        """INSERT INTO removals SELECT namespace_id, hash, edition, size_bytes, :now, NULL FROM blobs
            WHERE id IN (SELECT value FROM json_each(:ids))
            ON CONFLICT (namespace_id, hash, edition) DO UPDATE SET removed_unix_ms = NULL,
            size_bytes = excluded.size_bytes""",
        ids=blob_ids,
        now=now_unix_ms,
    )


def condemn(rows: Rows, found: Mapping[str, set[int]], now_unix_ms: int, *, keeps: bool) -> list[Removal]:
    """Note the removal of those editions that no row has; which these are. A publication under way takes another name.
    `keeps`: these are all that a list of the bucket has, and their bytes are to be set aside. A row of an earlier
    edition, as in an index that was recovered, gets the newest one that nobody removes. Behind a row of a later one all
    stay: its object came since, or the index is of an earlier time and one of these is all that there is.
    """
    rows.make_namespace()
    listed, kept = dict(_of(rows, "blobs", [*found])), {*_of(rows, "removals", [*found])}
    for hash_, edition in listed.items():
        if keeps and edition not in found[hash_]:
            newest = max((each for each in found[hash_] if (hash_, each) not in kept), default=edition)
            if newest > edition:
                _set_edition(rows, hash_, newest)
                kept.add((hash_, newest))
            else:
                kept |= {(hash_, each) for each in found[hash_]}
        else:
            kept.add((hash_, edition))
    size = _KEPT if keeps else 0
    lie_here = [Removal(hash_, edition, size) for hash_, editions in found.items() for edition in editions]
    unlisted = [each for each in lie_here if (each.hash, each.edition) not in kept]
    for each in unlisted:
        _note(rows, each, now_unix_ms)
    return unlisted


def waiting_removals(rows: Rows, limit: int) -> list[Removal]:
    """Objects that are still to be removed, or were when a store died."""
    waiting = """SELECT hash, edition, size_bytes FROM removals
        WHERE namespace_id = :namespace AND removed_unix_ms IS NULL ORDER BY since_unix_ms LIMIT :limit"""
    return [Removal(*found) for found in rows.all(waiting, limit=limit)]


def end_removals(rows: Rows, done: Sequence[Removal], now_unix_ms: int) -> None:
    """Their removal was answered."""
    rows.many(
        """UPDATE removals SET removed_unix_ms = :now WHERE namespace_id = :namespace AND hash = :hash
            AND edition = :edition AND removed_unix_ms IS NULL""",
        [{"hash": each.hash, "edition": each.edition, "now": now_unix_ms} for each in done],
    )


def leave_objects(rows: Rows, now_unix_ms: int) -> None:
    """What waits to be removed, in any namespace, was noted by an index of an earlier time, and its names may have been
    used again since. Objects stay and names rest; a later start sets aside what no row has."""
    rows.run("UPDATE removals SET removed_unix_ms = :now WHERE removed_unix_ms IS NULL", now=now_unix_ms)


def free_names(rows: Rows, until_unix_ms: int) -> None:
    """Names whose removal was answered before may be used again."""
    rested = "namespace_id = :namespace AND removed_unix_ms <= :until"
    rows.run(f"DELETE FROM removals WHERE {rested}", until=until_unix_ms)  # noqa: S608


def _of(rows: Rows, table: str, hashes: Sequence[str]) -> list[tuple[str, int]]:
    found = f"SELECT hash, edition FROM {table} WHERE namespace_id = :namespace AND {_LISTED}"  # noqa: S608
    return [(hash_, edition) for hash_, edition in rows.all(found, hash=hashes)]


def _note(rows: Rows, each: Removal, now_unix_ms: int) -> None:
    rows.run(
        "INSERT INTO removals VALUES (:namespace, :hash, :edition, :size_bytes, :now, NULL) ON CONFLICT DO NOTHING",
        hash=each.hash,
        edition=each.edition,
        size_bytes=each.size_bytes,
        now=now_unix_ms,
    )
