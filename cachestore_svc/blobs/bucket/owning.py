"""Whose a bucket is. An object in it names the store, its last start, and the directory that started; each start
replaces it by If-Match. Two stores over one prefix would remove each other's blobs: a copy of a store's data is one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.credentials import CredentialFileError, read_private_text, replace_private_text
from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.bucket.bucket import Bucket

_OWNER = "kvasir-store"
_MOST_BYTES = 256
_TAKEN = "BUCKET_TAKEN"


@dataclass(frozen=True)
class _Note:
    """What a data directory knows: its bucket, the store's name there, and the starts that may be the last. There are
    two after a crash in a start."""

    where: str
    store: str
    starts: tuple[str, ...] = ("",)  # that of a version that wrote none

    def write(self, path: Path) -> None:
        replace_private_text(path, " ".join([self.where, self.store, *self.starts]).rstrip() + "\n")


class BucketOwner:
    """One start of a store. Before a removal, and after a write, it looks whether it is still the last one."""

    def __init__(self, bucket: Bucket, store: str, start: str) -> None:
        self._bucket = bucket
        self._store = store
        self._start = start

    def check(self) -> None:
        """Raises FailedPrecondition (BUCKET_TAKEN), and OSError where the bucket does not answer."""
        store, start, _ = _held(self._bucket)[0]
        if (store, start) != (self._store, self._start):
            raise FailedPrecondition(
                f"{self._bucket.where} was taken by another copy of this store's data: this one may remove and "
                "acknowledge nothing there. Stop one of the two",
                reason=_TAKEN,
            )


def noted_bucket(note: Path) -> str:
    """The bucket that a data directory's note names; "" without a note. Raises FailedPrecondition."""
    found = _read(note)
    return found.where if found else ""


def noted_owner(note: Path) -> str:
    """The bucket, and the store's name there, as a data directory notes them; "" without a note."""
    found = _read(note)
    return f"{found.where} {found.store}" if found else ""


def note_owner(note: Path, owner: str) -> None:
    """Make a directory without a note a copy of the data whose note was this. Such a copy has to take the bucket."""
    where, store = owner.split()
    _Note(where, store).write(note)


def look_at_bucket(bucket: Bucket, note: Path) -> BucketOwner:
    """For one that only looks, beside the store that runs. Raises FailedPrecondition: it is another store's."""
    known = _read(note) or _Note(bucket.where, "")
    _check_same(bucket, known, _held(bucket)[0][0])
    return BucketOwner(bucket, known.store, known.starts[-1])


def take_bucket(
    bucket: Bucket, note: Path, token_hex: Callable[[int], str], *, takes_from_copy: bool = False
) -> BucketOwner:
    """Start: be the owner from now on. Raises FailedPrecondition for the bucket of another store, for a note of another
    bucket, and (BUCKET_TAKEN) for one that another copy of these data has, unless it `takes_from_copy`."""
    known = _read(note) or _Note(bucket.where, token_hex(16))
    (store, last, place), tag = _held(bucket)
    _check_same(bucket, known, store)
    here = str(note.parent.stat().st_ino)  # a copy lies in another one
    is_copy = store and (last not in known.starts or place not in ("", here))
    if is_copy and not takes_from_copy:
        raise _taken(bucket.where)
    start = token_hex(16)
    _Note(known.where, known.store, (last, start)).write(note)
    record = f"{known.store} {start} {here}".encode()
    is_won = bucket.swap(_OWNER, record, tag) if tag else bucket.put_new(_OWNER, record)
    if not is_won and _held(bucket)[0][1] != start:  # of a write that was sent twice, the second one fails
        raise _taken(bucket.where)
    _Note(known.where, known.store, (start,)).write(note)
    return BucketOwner(bucket, known.store, start)


def _held(bucket: Bucket) -> tuple[tuple[str, str, str], str]:
    """Store, start and place of the owner, empty where none is noted; and the object's tag."""
    try:
        data, tag = bucket.get_tagged(_OWNER, _MOST_BYTES)
    except FileNotFoundError:
        return ("", "", ""), ""
    store, start, place, *_ = [*data.decode("ascii", "replace").split(), "", "", ""]
    return (store, start, place), tag


def _read(note: Path) -> _Note | None:
    if not note.exists():
        return None
    try:
        where, store, *starts = read_private_text(note).split()
    except (CredentialFileError, ValueError) as error:
        raise FailedPrecondition(f"{note}: expected a bucket and the name of a store: {error}") from None
    return _Note(where, store, tuple(starts) or ("",))


def _check_same(bucket: Bucket, known: _Note, store: str) -> None:
    if known.where != bucket.where:
        raise FailedPrecondition(f"the blobs of this store lie in {known.where}: start it with --blobs {known.where}")
    if known.store and store not in ("", known.store):
        raise FailedPrecondition(
            f"{bucket.where} belongs to another store, whose blobs this one would set aside: choose another prefix. If "
            "that store's directory is gone, and its index is in PostgreSQL, start once with --accept-older"
        )


def _taken(where: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{where} belongs to another copy of this store's data, or these data were moved. Two stores must not use one "
        "prefix. Run that one; if it is gone, start this one once with --accept-older, which takes the bucket",
        reason=_TAKEN,
    )
