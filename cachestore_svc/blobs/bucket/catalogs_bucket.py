"""Whose a bucket is where its index is on a server: the database's. An object in the bucket names the store, and the
database with its timeline; any process that has the database may write and remove. A copy by `pg_dump` or a template is
another database, and an old primary has an older timeline than the standby that was promoted. A copy of the server's
files, as a clone of its machine is, has the same numbers until it is promoted, and is not told apart.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.owning import CATALOG, OWNER, TAKEN, Held, Note, check_where, foreign, held_by, noted

_TRIES = 3  # others may start, or find a promotion, at the same time


class Home(NamedTuple):
    """Where a database is. `database`: numbers of its server and its own. `timeline`: a promotion makes the next one,
    which sorts behind."""

    database: str
    timeline: str


class CatalogOwner:
    """The right of a database's processes in a bucket. Before a removal, and after a write, it looks at the object."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._store = ""
        self._home: Callable[[bool], Home] | None = None

    def take(
        self, note: Path, listed: str, home: Callable[[bool], Home], new_store: str, *, takes_from_copy: bool
    ) -> str:
        """Begin. `note`: of the data directory. `listed`: what this returned before, as the database has it; "" for a
        new one. `home`: where the database is; True: ask its server. Returns the bucket and the store's name there.
        Raises FailedPrecondition: another bucket (REPLICA_UNLIKE); another store's, or a copy's (BUCKET_TAKEN).
        """
        where, known = self._bucket.where, noted(note)
        check_where(where, known)
        listed_where, _, store = listed.partition(" ")
        if listed and listed_where != where:
            raise _unlike(f"the database lists blobs in {listed_where}: start with --blobs {listed_where}")
        for _ in range(_TRIES):
            held, tag = held_by(self._bucket)
            if listed and not held.store and not takes_from_copy:
                raise _unlike(f"{where} is not the one that the database lists: no store began there; see its address")
            store = store or _store_of(held, known, home(False)) or new_store
            if held.store not in ("", store):
                raise foreign(where)
            if not takes_from_copy and not _is_ours(held, known, home(False)):
                raise _taken(where) if held.index == CATALOG else _of_directory(where)
            self._store, self._home = store, home
            if self._is_noted(held, tag, home(False)):
                Note(where, store).write(note)
                return f"{where} {store}"
            if not listed:
                store = ""  # another process of a new database may have begun, under another name
        raise _taken(where)

    def check(self) -> None:
        """Raises FailedPrecondition (BUCKET_TAKEN), and OSError where the bucket does not answer."""
        if self._home is not None:
            for is_asked in (False, True):  # another process may know of a promotion before this one
                home = self._home(is_asked)
                held, tag = held_by(self._bucket)
                is_ours = held.store == self._store and _is_ours(held, None, home)
                if is_ours and self._is_noted(held, tag, home):
                    return
        raise _taken(self._bucket.where)

    def _is_noted(self, held: Held, tag: str, home: Home) -> bool:
        """Whether the object names the store and this place of its database; writes it if it does not."""
        wanted = Held(self._store, home.timeline, home.database, CATALOG)
        if held == wanted:
            return True
        record = " ".join((wanted.store, wanted.start, wanted.place, wanted.index)).encode()
        is_won = self._bucket.swap(OWNER, record, tag) if tag else self._bucket.put_new(OWNER, record)
        return is_won or held_by(self._bucket)[0] == wanted  # of a write that was sent twice, the second one fails


def _store_of(held: Held, known: Note | None, home: Home) -> str:
    """The store's name, where a start was cut before the database had it, or is made at the same time by another."""
    is_this_databases = held.index == CATALOG and held.place == home.database
    return held.store if is_this_databases else known.store if known else ""


def _is_ours(held: Held, known: Note | None, home: Home) -> bool:
    if held.index == CATALOG:
        return held.place == home.database and held.start <= home.timeline
    # Of a version that gave the bucket to a data directory: its next start is in that directory.
    return not held.store or (known is not None and held.start in known.starts)


def _unlike(words: str) -> FailedPrecondition:
    return FailedPrecondition(words, reason="REPLICA_UNLIKE", metadata={"differs": "blobs"})


def _of_directory(where: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{where} belongs to the data directory of a store of an earlier version: start this version once in that "
        "directory, then any may join. If it is gone, start once with --accept-older, which takes the bucket",
        reason=TAKEN,
    )


def _taken(where: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{where} belongs to another copy of this database, or to a standby of it that was promoted. Two databases "
        "must not use one prefix. Use that one; if it is gone, start once with --accept-older, which takes the bucket",
        reason=TAKEN,
    )
