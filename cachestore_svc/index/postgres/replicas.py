"""Stores that have a database at the same time: how alike they are, which work each does, and how one hears of
another's events. A store that shares its database with nobody has its lock alone.
"""

import json
import threading
from collections.abc import Callable, Mapping

import psycopg
from kvasir.errors import FailedPrecondition
from kvasir.waits import PATIENCE_S, RETRY_S, SILENCE_S

from cachestore_svc.index.postgres.session import Session
from cachestore_svc.index.sqlite.rows import Connection

LOCK = 0x4B766173  # of the stores that have the database: the server's number for it
GROUPS = 0x4B766174  # of the one whose group of writes is under way
CHANNEL = "kvasir_events"
_LIVE = f"""SELECT epoch, shared_as, name, seen_ms FROM writers WHERE NOT is_superseded AND pid IN (
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = {LOCK} AND database = (
        SELECT oid FROM pg_database WHERE datname = current_database()))"""  # noqa: S608
_TAKE = f"""INSERT INTO jobs VALUES (:name, :epoch, now_ms() + {SILENCE_S * 1000:.0f})
    ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch, ends_ms = excluded.ends_ms
    WHERE jobs.epoch = excluded.epoch OR jobs.ends_ms <= now_ms()"""  # noqa: S608


def take_lock(session: Session, *, is_shared: bool) -> bool:
    """Whether this session has the database now."""
    shared = "_shared" if is_shared else ""
    [[is_ours]] = session.execute(f"SELECT pg_try_advisory_lock{shared}({LOCK})").fetchall()
    return bool(is_ours)


def check_alike(session: Session, shared_as: Mapping[str, str]) -> None:
    """Raises FailedPrecondition (REPLICA_UNLIKE) where a store has the database that has something else in common."""
    for _, theirs, name, _ in session.execute(_LIVE).fetchall():
        other = json.loads(theirs or "{}")
        unlike = sorted(each for each in {*other, *shared_as} if other.get(each) != shared_as.get(each))
        if unlike:
            raise FailedPrecondition(
                f"the store {name or 'without a name'} has this database open and differs in: {', '.join(unlike)}; "
                "stores over one database have the same bucket and the same keys",
                reason="REPLICA_UNLIKE",
                metadata={"differs": " ".join(unlike)},
            )


def take_job(connection: Connection, name: str, epoch: int) -> bool:
    """Have a work for some time from now on, unless another store has it."""
    return bool(connection.execute(_TAKE, {"name": name, "epoch": epoch}).rowcount)


def leave_jobs(connection: Connection, epoch: int) -> None:
    """Let other stores have the works of this one at once."""
    connection.execute("DELETE FROM jobs WHERE epoch = :epoch", {"epoch": epoch})


class Listener:
    """Hears of events that other stores report. A hint: watchers look for missed ones all the same, a little later."""

    def __init__(self, url: str, wake: Callable[[str], None], ending: threading.Event) -> None:
        self._session, self._wake, self._ending = Session(url), wake, ending

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self._session.connect()
                self._session.execute(f"LISTEN {CHANNEL}")
                self._listen()
            except psycopg.Error:
                self._ending.wait(RETRY_S)
        self._session.close()

    def _listen(self) -> None:
        silent_s = PATIENCE_S  # at once: earlier reports are not heard
        while not self._ending.is_set():
            if silent_s >= PATIENCE_S:
                self._wake("")
                silent_s = 0.0
            for namespace in self._session.heard(RETRY_S):
                self._wake(namespace)
            silent_s += RETRY_S
