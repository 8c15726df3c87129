"""Stores that have a database at the same time: how alike they are, which work each does, and how one hears of
another's events. A store that shares its database with nobody has its lock alone.
"""

import json
import threading
from collections.abc import Callable, Mapping

import psycopg
from kvasir.errors import FailedPrecondition
from kvasir.waits import PATIENCE_S, PAUSE_S, RETRY_S, SILENCE_S

from cachestore_svc.index.postgres.servers import Servers
from cachestore_svc.index.postgres.session import Session
from cachestore_svc.index.sqlite.rows import Connection

LOCK = 0x4B766173  # of the stores that have the database: the server's number for it
GROUPS = 0x4B766174  # of the one whose group of writes is under way
TRIES_TO_LOCK = 5  # a database whose last store, or whose own last session, may just have ended
CHANNEL = "kvasir_events"
_SESSION = "pid || ' ' || extract(epoch FROM backend_start)"
OWN_SESSION = f"SELECT {_SESSION} FROM pg_stat_activity WHERE pid = pg_backend_pid()"  # noqa: S608
_LIVE = f"""SELECT shared_as, name FROM writers WHERE NOT is_superseded AND session IN (
    SELECT {_SESSION} FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted
        AND objid = {LOCK} AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"""  # noqa: S608
_TAKE = f"""INSERT INTO jobs VALUES (:name, :epoch, now_ms() + {SILENCE_S * 1000:.0f})
    ON CONFLICT (name) DO UPDATE SET epoch = excluded.epoch, ends_ms = excluded.ends_ms
    WHERE jobs.epoch = excluded.epoch OR jobs.ends_ms <= now_ms()"""  # noqa: S608


def take_lock(session: Session, *, is_shared: bool) -> bool:
    """Whether this session has the database now."""
    shared = "_shared" if is_shared else ""
    [[is_ours]] = session.execute(f"SELECT pg_try_advisory_lock{shared}({LOCK})").fetchall()
    return bool(is_ours)


def check_alike(session: Session, shared_as: Mapping[str, str], pause: Callable[[float], object]) -> None:
    """Raises FailedPrecondition (REPLICA_UNLIKE) where a store has the database that has something else in common, also
    after some looks with a `pause` of so many seconds behind each.
    """
    for _ in range(TRIES_TO_LOCK):
        name, differs = _unlike(session, shared_as)
        if not differs:
            return
        pause(PAUSE_S)
    raise FailedPrecondition(
        f"the store {name or 'without a name'} has this database open and differs in: {', '.join(differs)}; stores "
        "over one database have the same bucket and the same keys",
        reason="REPLICA_UNLIKE",
        metadata={"differs": " ".join(differs)},
    )


def _unlike(session: Session, shared_as: Mapping[str, str]) -> tuple[str, list[str]]:
    """A store that has the database and is unlike this one, and in which facts; none if there is none."""
    for theirs, name in session.execute(_LIVE).fetchall():
        other = json.loads(theirs or "{}")
        if differs := sorted(each for each in {*other, *shared_as} if other.get(each) != shared_as.get(each)):
            return name, differs
    return "", []


def take_job(connection: Connection, name: str, epoch: int) -> bool:
    """Have a work for some time from now on, unless another store has it."""
    return bool(connection.execute(_TAKE, {"name": name, "epoch": epoch}).rowcount)


def leave_jobs(connection: Connection, epoch: int) -> None:
    """Let other stores have the works of this one at once."""
    connection.execute("DELETE FROM jobs WHERE epoch = :epoch", {"epoch": epoch})


class Listener:
    """Hears of events that other stores report. A hint: watchers look for missed ones all the same, a little later."""

    def __init__(self, servers: Servers, wake: Callable[[str], None], ending: threading.Event) -> None:
        self._session, self._wake, self._ending = Session(servers), wake, ending

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
        while not self._ending.is_set() and not self._session.is_lost:
            if silent_s >= PATIENCE_S:
                self._session.execute("SELECT 1")  # of a server that stands still nothing is ever heard
                self._wake("")
                silent_s = 0.0
            for namespace in self._session.heard(RETRY_S):
                self._wake(namespace)
            silent_s += RETRY_S
