"""A standby of PostgreSQL is promoted after its primary was killed: acknowledged commits are there, or are missed."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from kvasir.errors import FailedPrecondition, Unavailable
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.catalogs_bucket import CatalogOwner, Home
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.catalog import HOUSE, Catalog, open_postgres
from cachestore_svc.recovery.on_server import DatabaseOfCatalog
from tests.cachestore.core.lab import Lab, assert_restores, publish
from tests.cachestore.index.test_postgres import add_one, count_of
from tests.cachestore.replicas.database_facts import Facts
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import PostgresServer, running, running_standby
from tests.running.waiting import eventually

pytestmark = [pytest.mark.fleet, pytest.mark.long(30)]
WRITERS = 4


class Pair:
    """A primary, its standby, and a database on both."""

    def __init__(self, primary: PostgresServer, standby: PostgresServer) -> None:
        self.primary, self.standby = primary, standby
        self.database = primary.new_database()

    @property
    def url(self) -> str:
        """Names both, as an operator does."""
        return f"postgresql://kvasir@127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}/{self.database}"

    def fail_over(self) -> None:
        """Kill the primary, and promote the standby at once."""
        self.primary.kill()
        self.standby.promote()


@contextmanager
def pair(*, is_synchronous: bool) -> Iterator[Pair]:
    with running() as primary, running_standby(primary, is_synchronous=is_synchronous) as standby:
        yield Pair(primary, standby)


class Load:
    """Writers that count up, and a reader; what was acknowledged, and when."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.acknowledged = list[tuple[float, int]]()
        self.unlike = list[tuple[int, int]]()  # reads that lacked an acknowledged write
        self._is_over = threading.Event()

    @contextmanager
    def going(self) -> Iterator[None]:
        with ThreadPoolExecutor() as threads:
            running = [threads.submit(each) for each in (*[self._write] * WRITERS, self._read)]
            try:
                yield
            finally:
                self._is_over.set()
            for each in running:
                each.result()

    def wait_for(self, count: int) -> None:
        eventually(lambda: len(self.acknowledged) >= count, 60)

    def _write(self) -> None:
        while not self._is_over.is_set():
            count = self._catalog.write(HOUSE, add_one)
            self.acknowledged.append((time.monotonic(), count))

    def _read(self) -> None:
        while not self._is_over.is_set():
            before = max((count for _, count in self.acknowledged), default=0)
            try:
                count = self._catalog.read(HOUSE, count_of)
            except Unavailable:  # while no server is there
                time.sleep(0.02)
            else:
                self.unlike += [(before, count)] if count < before else []


def test_a_standby_that_is_promoted_has_every_acknowledged_commit_once() -> None:
    with pair(is_synchronous=True) as servers:
        disk = _KillsAtCommit(servers.primary)
        with closing(open_postgres(servers.url, disk, lambda: 0)) as catalog:
            load = Load(catalog)
            with load.going():
                load.wait_for(50)
                disk.kill_at_next_commit()
                assert disk.killed.wait(30)
                servers.fail_over()
                load.wait_for(len(load.acknowledged) + 50)
            assert load.unlike == []
            counts = [count for _, count in load.acknowledged]
            assert sorted(counts) == list(range(1, 1 + catalog.read(HOUSE, count_of)))
    times = sorted(at for at, _ in load.acknowledged)
    longest_s = max(later - at for at, later in pairwise(times))
    print(f"the longest time without a commit: {longest_s:.2f} s")  # `pytest -rP` shows it


def test_a_store_goes_on_with_a_promoted_standby(tmp_path: Path) -> None:
    memory = SyntheticAgent(SMALL, 1)
    with pair(is_synchronous=True) as servers, Lab(tmp_path / "data", catalog=servers.url).open() as store:
        first, second = memory.turn(300), memory.turn(300)
        kept = publish(store, "ada", first, 0)
        servers.fail_over()
        later = publish(store, "ada", second, 1)
        assert_restores(store, kept, first)
        assert_restores(store, later, second)
        assert store.care.check().findings == ()


def test_a_promoted_standby_that_lacks_acknowledged_commits_is_refused() -> None:
    with pair(is_synchronous=False) as servers, closing(open_postgres(servers.url, Disk(), lambda: 0)) as catalog:
        catalog.write(HOUSE, add_one)
        _wait_until_it_has(servers.standby, servers.database, 1)
        servers.standby.configure(primary_conninfo="")
        _wait_until_alone(servers.primary)
        assert catalog.write(HOUSE, add_one) == 2
        servers.fail_over()
        for ask in (lambda: catalog.read(HOUSE, count_of), lambda: catalog.write(HOUSE, add_one)):
            with pytest.raises(FailedPrecondition, match="lacks commits") as refused:
                _until_there(ask)
            assert refused.value.reason == "INDEX_BEHIND"


class _KillsAtCommit(Disk):
    """Kills a server in the moment in which a commit is sent to it."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._is_wanted = False
        self.killed = threading.Event()

    def kill_at_next_commit(self) -> None:
        self._is_wanted = True

    def reached(self, point: str) -> None:
        if self._is_wanted and point == "index: before commit":
            self._is_wanted = False
            threading.Thread(target=self._kill).start()

    def _kill(self) -> None:
        self._server.kill()
        self.killed.set()


def _wait_until_it_has(standby: PostgresServer, database: str, count: int) -> None:
    has_table, has_it = (
        "SELECT 1 FROM pg_tables WHERE tablename = 'facts'",
        "SELECT value FROM kvasir.facts WHERE name = 'count'",
    )
    with psycopg.connect(standby.url(database), autocommit=True) as connection:
        for wanted, found in ((has_table, 1), (has_it, str(count))):
            while connection.execute(wanted).fetchall() != [(found,)]:
                time.sleep(0.02)


def _wait_until_alone(primary: PostgresServer) -> None:
    """Until no standby follows it any more."""
    with psycopg.connect(primary.url("postgres"), autocommit=True) as connection:
        while connection.execute("SELECT 1 FROM pg_stat_replication").fetchall():
            time.sleep(0.02)


def _until_there(ask: Callable[[], int]) -> int:
    deadline = time.monotonic() + 30
    while True:
        try:
            return ask()
        except Unavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_bucket_follows_the_promoted_standby_and_the_old_primary_has_it_no_more(tmp_path: Path) -> None:
    bucket = Bucket(MemoryStore(), "s3://bucket/agents")
    with pair(is_synchronous=True) as servers:
        with closing(open_postgres(servers.url, Disk(), lambda: 0, shared_as={})) as catalog:
            before, now = Home(*catalog.home), DatabaseOfCatalog(catalog, lambda: "9" * 32)
            follows, stays, starts = (CatalogOwner(bucket, lambda: 0.0) for _ in range(3))
            note = tmp_path / "bucket"
            listed = follows.take(note, "", now, "5" * 32, takes_from_copy=False)
            old = Facts(before, now.proofs())
            assert stays.take(note, listed, old, "6" * 32, takes_from_copy=False) == listed
            servers.fail_over()
            catalog.write(HOUSE, add_one)
            assert Home(*catalog.home).timeline > before.timeline
            follows.check()
        for asks in (stays.check, lambda: starts.take(note, listed, old, "", takes_from_copy=False)):
            with pytest.raises(FailedPrecondition) as refused:
                asks()
            assert refused.value.reason == "BUCKET_TAKEN"
        follows.check()
