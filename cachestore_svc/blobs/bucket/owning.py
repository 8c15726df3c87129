"""Whose a bucket is, unless its index is on a server (`catalogs_bucket`). An object in it names the store, its last
start, and the directory that started; each start replaces it by If-Match. Two stores over one prefix would remove each
other's blobs: a copy of a store's data is one.
"""

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.credentials import CredentialFileError, read_private_text, replace_private_text
from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.bucket.bucket import Bucket

OWNER = "kvasir-store"
_MOST_BYTES = 256
_STORE = re.compile(rb"[0-9a-f]{32}( |$)")  # the object begins with it
TAKEN = "BUCKET_TAKEN"
_INDEX, CATALOG = "index", "catalog"  # in the object of an owner: where the index lies
_NO_START = "-"  # in a note: the bucket had no owner, or one of a version that wrote none


@dataclass(frozen=True)
class Note:
    """What a data directory knows: its bucket, the store's name there, and the starts that may be the last. There are
    two after a crash in a start."""

    where: str
    store: str
    starts: tuple[str, ...] = (_NO_START,)

    def write(self, path: Path) -> None:
        replace_private_text(path, " ".join([self.where, self.store, *self.starts]) + "\n")


@dataclass(frozen=True)
class Held:
    """The owner as the bucket names it. `index`: where it is, if not in the directory. `proof`: a word of a
    database that no older copy of it has."""

    store: str = ""
    start: str = ""
    place: str = ""
    index: str = ""
    proof: str = ""

    @property
    def noted_start(self) -> str:
        """The start as notes have it."""
        return self.start or _NO_START


class BucketOwner:
    """One start of a store. Before a removal, and after a write, it looks whether it is still the last one."""

    def __init__(self, bucket: Bucket, store: str, start: str) -> None:
        self._bucket = bucket
        self.store = store
        self.start = start

    def check(self) -> None:
        """Raises FailedPrecondition (BUCKET_TAKEN), and OSError where the bucket does not answer, or has no owner."""
        held, _ = owned_by(self._bucket)
        if (held.store, held.noted_start) != (self.store, self.start):
            raise FailedPrecondition(
                f"{self._bucket.where} was taken by another copy of this store's data: this one may remove and "
                "acknowledge nothing there. Stop one of the two",
                reason=TAKEN,
            )


def noted_bucket(note: Path) -> str:
    """The bucket that a data directory's note names; "" without a note. Raises FailedPrecondition."""
    found = noted(note)
    return found.where if found else ""


def look_at_bucket(bucket: Bucket, note: Path, *, has_index: bool = False) -> BucketOwner:
    """For one that only looks, beside the store that runs. Raises FailedPrecondition: it is another store's."""
    held, _ = held_by(bucket)
    known = noted(note) or Note(bucket.where, held.store if has_index else "")
    _check_same(bucket, known, held, has_index=has_index)
    return BucketOwner(bucket, known.store, known.starts[-1])


def take_bucket(
    bucket: Bucket,
    note: Path,
    token_hex: Callable[[int], str],
    *,
    takes_from_copy: bool = False,
    has_index: bool = False,
) -> BucketOwner:
    """Start: be the owner from now on. A bucket that `has_index`, too, goes to the store that starts last, with any
    directory. Raises FailedPrecondition for the bucket of another store, for a note of another bucket, and, unless it
    `takes_from_copy`, for one where this store never was, and (BUCKET_TAKEN) for one that another copy of these data
    has."""
    held, tag = held_by(bucket)
    known = noted(note) or Note(bucket.where, (has_index and held.store) or token_hex(16))
    _check_same(bucket, known, held, has_index=has_index)
    if not (held.store or _NO_START in known.starts or takes_from_copy):
        raise FailedPrecondition(
            f"{bucket.where} has nothing of this store, whose blobs lie in a bucket of that name: is it another "
            "server, or one whose disk is not mounted? --accept-older goes on without them"
        )
    here = str(note.parent.stat().st_ino)  # a copy lies in another one
    is_copy = held.store and (held.noted_start not in known.starts or held.place not in ("", here))
    if is_copy and not (takes_from_copy or has_index):
        raise _taken(bucket.where)
    start = token_hex(16)
    Note(known.where, known.store, (held.noted_start, start)).write(note)
    record = " ".join([known.store, start, here, *([_INDEX] if has_index else [])]).encode()
    is_won = bucket.swap(OWNER, record, tag) if tag else bucket.put_new(OWNER, record)
    if not is_won and held_by(bucket)[0].start != start:  # of a write that was sent twice, the second one fails
        raise _taken(bucket.where)
    Note(known.where, known.store, (start,)).write(note)
    return BucketOwner(bucket, known.store, start)


def held_by(bucket: Bucket) -> tuple[Held, str]:
    """The facts of the owner, and the object's tag; empty where there is none. Raises OSError where the bucket does not
    answer, or with something else: a page of a proxy makes no other store the owner."""
    try:
        data, tag = bucket.get_tagged(OWNER, _MOST_BYTES)
    except FileNotFoundError:
        return Held(), ""
    if _STORE.match(data) is None:
        raise OSError(errno.EHOSTUNREACH, "the bucket answered with bytes that no store wrote", OWNER)
    words = [*data.decode("ascii", "replace").split(), *[""] * 5]
    return Held(*words[:5]), tag


def owned_by(bucket: Bucket) -> tuple[Held, str]:
    """As `held_by`, for a store that has the bucket: nobody removes the object. Raises OSError where it is not there,
    as where the server's disk is not mounted."""
    held, tag = held_by(bucket)
    if not held.store:
        raise OSError(errno.EHOSTUNREACH, "the bucket answered that no store began there", OWNER)
    return held, tag


def noted(note: Path) -> Note | None:
    """Raises FailedPrecondition for a file that is no note."""
    if not note.exists():
        return None
    try:
        where, store, *starts = read_private_text(note).split()
    except (CredentialFileError, ValueError) as error:
        raise FailedPrecondition(f"{note}: expected a bucket and the name of a store: {error}") from None
    return Note(where, store, tuple(starts) or (_NO_START,))


def _check_same(bucket: Bucket, known: Note, held: Held, *, has_index: bool) -> None:
    check_where(bucket.where, known)
    if held.store and (held.index == _INDEX) != has_index:
        there = f"there, too: start with --catalog {bucket.where}"
        words = there if held.index == _INDEX else "elsewhere: start it in its own directory, with its own --catalog"
        raise FailedPrecondition(f"the index of the store in {bucket.where} lies {words}", reason="INDEX_FOREIGN")
    if known.store and held.store not in ("", known.store):
        raise foreign(bucket.where)


def check_where(where: str, known: Note | None) -> None:
    """Raises FailedPrecondition where a data directory notes another bucket."""
    if known and known.where != where:
        raise FailedPrecondition(f"the blobs of this store lie in {known.where}: start it with --blobs {known.where}")


def foreign(where: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{where} belongs to another store, whose blobs this one would set aside: choose another prefix"
    )


def _taken(where: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{where} belongs to another copy of this store's data, or these data were moved. Two stores must not use one "
        "prefix. Run that one; if it is gone, start this one once with --accept-older, which takes the bucket",
        reason=TAKEN,
    )
