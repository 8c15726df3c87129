"""Whose a bucket is where its index is on a server: the database's. An object in the bucket names the store, and the
database with its timeline; any process that has the database may write and remove. A copy by `pg_dump` or a template is
another database, and an old primary has an older timeline than the standby that was promoted. A copy of the server's
files, as a clone of its machine is, has the same numbers until it is promoted: so the bucket and the database hold a
proof, a random word that each start replaces, and each store at work every minute. A copy has an older one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from kvasir.errors import FailedPrecondition

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.owning import (
    CATALOG,
    OWNER,
    TAKEN,
    Held,
    Note,
    check_where,
    foreign,
    held_by,
    noted,
    owned_by,
)

_TRIES = 16  # others may start, find a promotion, or replace the proof at the same time
_NEW_PROOF_AFTER = 60.0  # seconds


class Home(NamedTuple):
    """Where a database is. `database`: numbers of its server and its own. `timeline`: a promotion makes the next one,
    which sorts behind."""

    database: str
    timeline: str


class Database(Protocol):
    """The facts of a database about itself and its bucket."""

    def home(self) -> Home:
        """As it was found last."""
        ...

    def look(self) -> Home:
        """Found again: the session may be with an old primary that is gone."""
        ...

    def proofs(self) -> tuple[str, ...]:
        """The bucket has one of them: the last one, or the next one behind it."""
        ...

    def next_proof(self) -> str:
        """One that is durable among `proofs` on return; the same until it is the last one."""
        ...

    def keep_proof(self, proof: str) -> None:
        """The bucket has the next one."""
        ...


class CatalogOwner:
    """The right of a database's processes in a bucket. Before a removal, and after a write, it looks at the object."""

    def __init__(self, bucket: Bucket, steady: Callable[[], float]) -> None:
        """`steady`: seconds that nobody sets."""
        self._bucket, self._steady = bucket, steady
        self._store = ""
        self._database: Database | None = None
        self._proofs: tuple[str, ...] = ()
        self._renews_at_s = 0.0

    def take(self, note: Path, listed: str, database: Database, new_store: str, *, takes_from_copy: bool) -> str:
        """Begin. `note`: of the data directory. `listed`: what this returned before, as the database has it; "" for a
        new one. Returns the bucket and the store's name there. Raises FailedPrecondition: another bucket
        (REPLICA_UNLIKE); another store's, or a copy's (BUCKET_TAKEN).
        """
        where, known = self._bucket.where, noted(note)
        check_where(where, known)
        listed_where, _, store = listed.partition(" ")
        if listed and listed_where != where:
            raise _unlike(f"the database lists blobs in {listed_where}: start with --blobs {listed_where}")
        refused = None
        for _ in range(_TRIES):
            held, tag = held_by(self._bucket)
            if listed and not held.store and not takes_from_copy:
                raise _unlike(f"{where} is not the one that the database lists: no store began there; see its address")
            store = store or _store_of(held, known, database.home()) or new_store
            if held.store not in ("", store):
                raise foreign(where)
            if not takes_from_copy and not _is_ours(held, known, database.home(), database.proofs()):
                if held.index != CATALOG:
                    raise _of_directory(where)
                if tag == refused:
                    break
                refused = tag  # another process may have replaced it before the database was read
                continue
            self._store, self._database = store, database
            if self._renew(tag, database):
                Note(where, store).write(note)
                return f"{where} {store}"
            if not listed:
                store = ""  # another process of a new database may have begun, under another name
        raise _taken(where)

    def check(self) -> None:
        """Raises FailedPrecondition (BUCKET_TAKEN), and OSError where the bucket does not answer, or has no owner."""
        if (database := self._database) is None:
            raise _taken(self._bucket.where)
        # Another process may know of a promotion, or of a proof, before this one: then the database is read, and behind
        # the bucket, because each proof is in the database first.
        refused = None
        for number in range(_TRIES):
            held, tag = owned_by(self._bucket)
            if tag == refused:
                break
            home = database.look() if number else database.home()
            if number:
                self._proofs = database.proofs()
            if held.store != self._store or not _is_ours(held, None, home, self._proofs):
                refused = tag if number else None  # if it has changed, another process may have done that meanwhile
                continue
            if held.start == home.timeline and self._steady() < self._renews_at_s:
                return
            self._renews_at_s = self._steady() + _NEW_PROOF_AFTER  # one thread does it
            if self._renew(tag, database):
                return
        raise _taken(self._bucket.where)

    def _renew(self, tag: str, database: Database) -> bool:
        """Whether the object, which was seen with this tag, names the store, its place and a new proof now."""
        home, proof = database.home(), database.next_proof()
        wanted = Held(self._store, home.timeline, home.database, CATALOG, proof)
        record = " ".join((wanted.store, wanted.start, wanted.place, wanted.index, wanted.proof)).encode()
        is_won = self._bucket.swap(OWNER, record, tag) if tag else self._bucket.put_new(OWNER, record)
        # Of a write that was sent twice, the second one fails; and another process may have written the same.
        if not is_won and held_by(self._bucket)[0] != wanted:
            return False
        database.keep_proof(proof)
        self._proofs, self._renews_at_s = (proof,), self._steady() + _NEW_PROOF_AFTER
        return True


def _store_of(held: Held, known: Note | None, home: Home) -> str:
    """The store's name, where a start was cut before the database had it, or is made at the same time by another."""
    is_this_databases = held.index == CATALOG and held.place == home.database
    return held.store if is_this_databases else known.store if known else ""


def _is_ours(held: Held, known: Note | None, home: Home, proofs: tuple[str, ...]) -> bool:
    if held.index == CATALOG:  # an earlier version wrote no proof
        is_proven = held.start < home.timeline or held.proof in ("", *proofs)
        return held.place == home.database and held.start <= home.timeline and is_proven
    # Of a version that gave the bucket to a data directory: its next start is in that directory.
    return not held.store or (known is not None and held.noted_start in known.starts)


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
        f"{where} belongs to another copy of this database, or to a standby of it that was promoted; this may be an "
        "older copy of the server's files. Two databases must not use one prefix. Use that one; if it is gone, start "
        "once with --accept-older, which takes the bucket",
        reason=TAKEN,
    )
