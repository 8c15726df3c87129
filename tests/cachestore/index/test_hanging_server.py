"""A server of PostgreSQL that stands still, as a paused machine: callers hear of it soon, and nothing is done twice."""

import errno
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from queue import Queue
from typing import Any

import psycopg
import pytest
from kvasir.errors import FailedPrecondition, Unavailable
from kvasir.waits import PAUSE_S, SOON_S

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogView, open_postgres
from cachestore_svc.index.postgres import postgres_catalog, replicas
from cachestore_svc.index.postgres.postgres_catalog import READERS
from cachestore_svc.index.postgres.servers import Server, Servers, ServerSilent
from cachestore_svc.index.postgres.session import Session
from tests.cachestore.index.test_postgres import add_one, count_of
from tests.campaigns.faults.faulty_link import Fault, FaultyLink
from tests.cli.certificates import make_certificate
from tests.running.postgres import PostgresServer, postgres, running, running_copy, running_standby  # noqa: F401
from tests.running.waiting import eventually

_SOON_S = 20.0
pytestmark = pytest.mark.long(12)


class StopsAtCommit(Disk):
    def __init__(self, server: PostgresServer) -> None:
        self.server, self.stopped = server, ExitStack()
        self.is_armed = False

    def reached(self, point: str) -> None:
        if self.is_armed and point == "index: before commit":
            self.is_armed = False
            self.stopped.enter_context(self.server.standing_still())


@pytest.fixture
def disk(postgres: PostgresServer) -> StopsAtCommit:  # noqa: F811
    return StopsAtCommit(postgres)


@pytest.fixture
def catalog(postgres: PostgresServer, disk: StopsAtCommit) -> Iterator[Catalog]:  # noqa: F811
    url = postgres.url(postgres.new_database())
    with closing(open_postgres(url, disk, lambda: 0)) as opened:
        assert opened.write(HOUSE, add_one) == 1
        assert opened.read(HOUSE, count_of) == 1
        yield opened


def test_reads_and_writes_of_a_server_that_stands_still_are_unavailable(
    postgres: PostgresServer,  # noqa: F811
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_catalog, "_TRIES", 8)
    with ThreadPoolExecutor(2) as threads, postgres.standing_still():
        asked = threads.submit(catalog.read, HOUSE, count_of), threads.submit(catalog.write, HOUSE, add_one)
        for each in asked:
            assert isinstance(error := each.exception(_SOON_S), Unavailable)
            assert error.reason == "INDEX_FAILED"
    assert catalog.write(HOUSE, add_one) == catalog.read(HOUSE, count_of) == 2


def test_a_commit_that_hangs_and_writes_behind_it_are_unavailable(
    catalog: Catalog, disk: StopsAtCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_catalog, "_TRIES", 1)
    disk.is_armed = True
    with ThreadPoolExecutor(2) as threads:
        with disk.stopped:
            hangs = threads.submit(catalog.write, HOUSE, add_one)
            while disk.is_armed:
                time.sleep(0.01)
            behind = threads.submit(catalog.write, HOUSE, add_one)
            for each in (hangs, behind):
                assert isinstance(each.exception(_SOON_S), Unavailable)
    count = catalog.write(HOUSE, add_one)
    assert count in (2, 3)  # the first one may have taken effect
    assert catalog.write(HOUSE, add_one) == count + 1


def test_a_listener_leaves_a_server_that_stands_still(
    postgres: PostgresServer,  # noqa: F811
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "PATIENCE_S", 0.5)
    monkeypatch.setattr(replicas, "RETRY_S", 0.1)
    heard, ending, servers = Queue[str](), threading.Event(), catalog._servers  # type: ignore[attr-defined]
    listener = replicas.Listener(servers, lambda namespace: heard.put(namespace), ending)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(listener.run)
        try:
            assert heard.get(timeout=_SOON_S) == ""
            first = listener._session._connection
            assert first is not None
            with postgres.standing_still():
                give_up = time.monotonic() + _SOON_S
                while not first.closed:
                    assert time.monotonic() < give_up
                    time.sleep(0.05)
            with closing(servers.connect()[0]) as other:
                other.execute(f"NOTIFY {replicas.CHANNEL}, 'news'")
                while heard.get(timeout=_SOON_S) != "news":
                    other.execute(f"NOTIFY {replicas.CHANNEL}, 'news'")
        finally:
            ending.set()


def test_a_store_goes_on_with_the_standby_of_a_primary_that_stands_still(disk: StopsAtCommit) -> None:
    with running() as primary, running_standby(primary, is_synchronous=True) as standby:
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        url = f"postgresql://kvasir@{hosts}/{primary.new_database()}"
        with closing(open_postgres(url, disk, lambda: 0)) as opened, ThreadPoolExecutor(2 * READERS) as threads:
            assert opened.write(HOUSE, add_one) == 1
            at_once = [threads.submit(opened.read, HOUSE, _slow_count) for _ in range(2 * READERS)]
            assert [each.result() for each in at_once] == [1] * 2 * READERS  # each reader has its session now
            with primary.standing_still():
                began_s = time.monotonic()
                writing = threads.submit(opened.write, HOUSE, add_one)
                standby.promote()
                counts = writing.result(), *(opened.read(HOUSE, count_of) for _ in range(2 * READERS))
                took_s = time.monotonic() - began_s
                assert counts == (2,) * (1 + 2 * READERS)
                assert took_s < SOON_S * READERS / 2  # one session finds it out for all
                print(f"all go on after {took_s:.2f} s")  # `pytest -rP` shows it


def _slow_count(view: CatalogView) -> int:
    view.all("SELECT pg_sleep(0.1)")
    return count_of(view)


def test_a_server_that_stood_still_is_taken_again(postgres: PostgresServer) -> None:  # noqa: F811
    named = Servers(postgres.url("postgres"))
    with postgres.standing_still():
        for _ in range(2):  # the second time it is looked at first
            with pytest.raises(ServerSilent):
                named.connect()
    named.connect()[0].close()


@pytest.mark.parametrize("by", ["its address", "variables of libpq"])
def test_a_session_leaves_a_server_that_stands_still_for_the_next_one(
    postgres: PostgresServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    with closing(FaultyLink(None, postgres.port)) as link:
        ports = link.port, postgres.port
        url = f"postgresql://kvasir@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/postgres"
        if by == "variables of libpq":
            url = "postgresql://kvasir@/postgres"
            monkeypatch.setenv("PGHOST", "127.0.0.1,127.0.0.1")
            monkeypatch.setenv("PGPORT", f"{ports[0]},{ports[1]}")
        with closing(Session(Servers(url))) as session:
            session.connect()
            assert session._connected.info.port == ports[0]
            link.arm(Fault("hang"))
            with pytest.raises(psycopg.OperationalError):
                session.execute("SELECT 1")
            assert session.is_lost
            session.connect()
            assert session._connected.info.port == ports[1]


def test_of_the_addresses_of_a_name_one_that_stands_still_is_tried_last(
    postgres: PostgresServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, family = ("127.0.0.2", socket.AF_INET) if sys.platform == "linux" else ("::1", socket.AF_INET6)
    found = [(silent, family), ("127.0.0.1", socket.AF_INET)]
    addresses = [(kind, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (each, postgres.port)) for each, kind in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    url = postgres.url("postgres").replace("127.0.0.1", "database.example")
    with socket.create_server((silent, postgres.port), family=family):
        named = Servers(url)
        named.connect()[0].close()
        began_s = time.monotonic()
        named.connect()[0].close()
        assert time.monotonic() - began_s < SOON_S / 2


def test_a_server_that_lacks_commits_is_left_for_one_that_stood_still(postgres: PostgresServer) -> None:  # noqa: F811
    database = postgres.new_database()
    with closing(open_postgres(postgres.url(database), Disk(), lambda: 0)) as catalog:
        assert catalog.write(HOUSE, add_one) == 1
    with closing(FaultyLink(None, postgres.port)) as link, running_copy(postgres) as old:
        url = f"postgresql://kvasir@127.0.0.1:{link.port},127.0.0.1:{old.port}/{database}"
        with closing(open_postgres(url, Disk(), lambda: 0)) as catalog:
            catalog.write(HOUSE, add_one)
            link.arm(Fault("hang"))
            with pytest.raises(FailedPrecondition, match="lacks commits"):
                catalog.read(HOUSE, count_of)
            link.disarm()
            assert eventually(lambda: _count_or_none(catalog)) == 2
            assert catalog.write(HOUSE, add_one) == 3


def _count_or_none(catalog: Catalog) -> int | None:
    with suppress(FailedPrecondition):
        return catalog.read(HOUSE, count_of)
    return None


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_a_machine_that_no_route_reaches_any_more_does_not_answer(
    postgres: PostgresServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    connection, server = Servers(postgres.url("postgres")).connect()
    with closing(connection):
        server.check_session(connection)
        monkeypatch.setattr(socket, "create_connection", refuses)
        with pytest.raises(ServerSilent):
            server.check_session(connection)


def test_a_look_at_a_server_with_tls_is_no_error_in_its_log(postgres: PostgresServer) -> None:  # noqa: F811
    files = [postgres._data / name for name in ("server.crt", "server.key")]
    make_certificate(*files)
    for each in files if postgres._as_whom else ():
        shutil.chown(each, **postgres._as_whom)
    named, before = Servers(f"{postgres.url('postgres')}?sslmode=require"), len(postgres._log.read_text())
    postgres.configure(ssl="on")
    try:
        connection, server = eventually(lambda: _connected(named))
        with closing(connection):
            server.check_session(connection)
        time.sleep(PAUSE_S)
    finally:
        postgres.configure(ssl="off")
    assert "SSL" not in postgres._log.read_text()[before:]


def _connected(named: Servers) -> Any:
    with suppress(psycopg.OperationalError):  # while it has no TLS yet
        return named.connect()
    return None


def test_a_lost_session_of_a_server_that_goes_on_holds_no_lock(postgres: PostgresServer) -> None:  # noqa: F811
    take = "SELECT pg_advisory_xact_lock(77)"
    named = Servers(postgres.url("postgres"))
    with closing(Session(named)) as lost, closing(Session(named)) as other:
        lost.connect()
        lost.execute("BEGIN")
        lost.execute(take)
        assert lost._server is not None
        lost._server._found_silent()
        lost.roll_back()
        other.connect()
        other.execute("SET lock_timeout = '2s'")
        other.execute(take)


def test_a_long_statement_is_looked_after_ever_less(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    looks_s, check = list[float](), Server.check_session

    def counted(server: Server, connection: Any) -> None:
        looks_s.append(time.monotonic())
        check(server, connection)

    monkeypatch.setattr(Server, "check_session", counted)
    with closing(Session(Servers(postgres.url("postgres")))) as session:
        session.connect()
        session.execute("SELECT pg_sleep(0.8)")
    assert looks_s[1] - looks_s[0] > 1.9 * PAUSE_S


def test_a_long_statement_of_a_server_that_is_well_is_waited_for(catalog: Catalog, disk: StopsAtCommit) -> None:
    assert catalog.read(HOUSE, lambda view: view.all("SELECT pg_sleep(1), 7 AS value"))[0][1] == 7
