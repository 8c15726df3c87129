"""The catalog on PostgreSQL, where it differs from a file: connections are cut, servers restart, a second store comes.
The suite of `any_backend` runs over it, too, by `make test-fleet`.
"""

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kvasir.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.config import ConfigError, read_settings
from cachestore_svc.facts.records import HeldLease, LeaseToken, LineKey
from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogChange, CatalogView, open_postgres
from cachestore_svc.index.postgres import postgres_catalog
from cachestore_svc.index.postgres.replicas import LOCK
from cachestore_svc.index.postgres.servers import Servers
from cachestore_svc.index.postgres.session import Session, translated
from tests.cachestore.any_backend.memory_blobs import MemoryBlobs
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish
from tests.cachestore.service import running as service_running
from tests.cachestore.service.running import StoreHome, store_home
from tests.cachestore.service.test_kills import WRITERS, Writer, assert_nothing_lost, one_life
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.cut_commits import CommitCutter
from tests.running.postgres import PostgresServer, postgres, running  # noqa: F401
from tests.running.programs import run
from tests.running.waiting import eventually

KV = kv_identity_hash(SMALL)


@pytest.fixture
def url(postgres: PostgresServer) -> str:  # noqa: F811
    """A database that holds nothing."""
    return postgres.url(postgres.new_database())


@contextmanager
def catalog_on(url: str) -> Iterator[Catalog]:
    with closing(open_postgres(url, Disk(), lambda: 0)) as catalog:
        yield catalog


END_WRITER = """SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database =
    (SELECT oid FROM pg_database WHERE datname = current_database())"""


def end_writer(url: str) -> None:
    """End the session of the store that has the database."""
    with psycopg.connect(url, autocommit=True) as other:
        other.execute(END_WRITER)


def refuse(view: CatalogView) -> None:
    raise InvalidArgument(f"no: {count_of(view)}")


def add_one(change: CatalogChange) -> int:
    """What is done twice is seen."""
    count = 1 + int(change.fact("count") or 0)
    change.set_fact("count", str(count))
    return count


def count_of(view: CatalogView) -> int:
    return int(view.fact("count") or 0)


@pytest.mark.long(4)
@pytest.mark.parametrize("arrives", [True, False], ids=["whose answer is lost", "that does not arrive"])
def test_a_commit_that_is_cut_takes_effect_once(postgres: PostgresServer, arrives: bool) -> None:  # noqa: F811
    with closing(CommitCutter(postgres.port)) as cutter:
        database = postgres.new_database()
        with catalog_on(postgres.url(database, cutter.own_port)) as catalog:
            for count in range(1, 9):
                cutter.cut_next(arrives=arrives)
                assert catalog.write(HOUSE, add_one) == count
            assert cutter.cuts == 8
        with catalog_on(postgres.url(database)) as catalog:
            assert catalog.read(HOUSE, count_of) == 8


def test_a_lease_is_given_in_four_round_trips(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trips, run_in_one = list[str](), Session._in_one_trip

    def counted(session: Session, *statement: Any) -> Any:
        trips.append(threading.current_thread().name)
        return run_in_one(session, *statement)

    with catalog_on(url) as catalog:
        ends = catalog.lease_ends(time.monotonic)

        def give(agent: str) -> LeaseToken:
            line = LineKey(NS, agent, KV)
            return catalog.write(NS, lambda change: change.acquire_lease(line, ends, "engine", 5000))

        give("the namespace's first")
        monkeypatch.setattr(Session, "_in_one_trip", counted)
        assert give("ada").generation == 1
        assert 1 < trips.count("kvasir-index") <= 4


def test_writes_that_wait_for_a_server_that_is_far_away_share_a_commit(url: str) -> None:
    now_ms, began, may_go = 0, threading.Event(), threading.Event()

    def slow(change: CatalogChange) -> int:
        nonlocal now_ms
        began.set()
        assert may_go.wait(30)
        now_ms += 12
        return add_one(change)

    with closing(open_postgres(url, Disk(), lambda: now_ms)) as catalog:
        before = catalog._groups
        answers = [catalog.write_later(HOUSE, slow)]
        assert began.wait(30)
        answers += [catalog.write_later(HOUSE, slow) for _ in range(9)]
        may_go.set()
        assert [answer.result(30) for answer in answers] == list(range(1, 11))
        assert catalog._groups - before == 2


def test_a_commit_in_doubt_while_the_store_closes_is_not_done_again(postgres: PostgresServer) -> None:  # noqa: F811
    with closing(CommitCutter(postgres.port)) as cutter, ThreadPoolExecutor() as threads:
        database = postgres.new_database()
        with catalog_on(postgres.url(database, cutter.own_port)) as catalog:
            cutter.refusals = 3  # then the server is back
            cutter.cut_next(arrives=True)
            asked = threads.submit(catalog.write, HOUSE, add_one)
            while not cutter.refused:
                time.sleep(0.005)
        with pytest.raises(Unavailable, match="the store closed before the database reported") as refused:
            asked.result()
        assert refused.value.reason == "CLOSED"
        with catalog_on(postgres.url(database)) as catalog:
            assert catalog.read(HOUSE, count_of) == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_that_is_long_in_doubt_is_refused_and_not_done_again(
    postgres: PostgresServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    arrives: bool,
) -> None:
    monkeypatch.setattr(postgres_catalog, "_TRIES", 2)
    took_effect = list[int]()

    def work(change: CatalogChange) -> None:
        change.after_commit(lambda count=add_one(change): took_effect.append(count))  # type: ignore[misc]

    with (
        closing(CommitCutter(postgres.port)) as cutter,
        catalog_on(postgres.url(postgres.new_database(), cutter.own_port)) as catalog,
    ):
        cutter.refusals = 4
        cutter.cut_next(arrives=arrives)
        both: list[Future[Any]] = []
        both.append(catalog.write_later(HOUSE, work, lambda: both.append(catalog.write_later(HOUSE, work))))
        for each in both:
            with pytest.raises(Unavailable, match="may have taken effect") as refused:
                each.result(30)
            assert refused.value.reason == "INDEX_FAILED"
        count = 0
        while not count:
            with suppress(Unavailable):  # until the server is back, which is refused four times
                count = catalog.write(HOUSE, add_one)
        assert (took_effect, count) == (([1, 2], 3) if arrives else ([], 1))


def test_the_others_of_a_group_that_sank_are_refused_with_one_that_is_long_in_doubt(
    postgres: PostgresServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_catalog, "_TRIES", 2)

    def sink(change: CatalogChange) -> None:
        change.later(_WRONG, hash="no such namespace")

    with (
        closing(CommitCutter(postgres.port)) as cutter,
        catalog_on(postgres.url(postgres.new_database(), cutter.own_port)) as catalog,
    ):
        cutter.refusals = 8
        cutter.cut_next(arrives=True)
        group: list[Future[Any]] = []
        group.append(
            catalog.write_later(
                *(HOUSE, add_one),
                lambda: group.extend(catalog.write_later(HOUSE, each) for each in (sink, add_one)),
            )
        )
        for each in group:
            with pytest.raises(Unavailable, match="may have taken effect"):
                each.result(30)
        assert cutter.refusals > 0, "before the server is back"


_WRONG = "INSERT INTO blobs (namespace_id, hash) VALUES (0, :hash)"


@pytest.mark.parametrize("how", ["at once", "later", "before another"])
def test_a_failed_operation_undoes_itself_alone_and_leaves_the_others_of_its_group(url: str, how: str) -> None:
    def fail(change: CatalogChange) -> None:
        add_one(change)
        run = change.run if how == "at once" else change.later
        run(_WRONG, hash="no such namespace")
        if how == "before another":
            add_one(change)

    with catalog_on(url) as catalog, ThreadPoolExecutor(16) as threads:
        futures = [threads.submit(catalog.write, HOUSE, add_one if number % 4 else fail) for number in range(64)]
        failed = [future.exception() for future in futures if future.exception()]
        assert [type(error) for error in failed] == [psycopg.errors.NotNullViolation] * 16
        assert catalog.read(HOUSE, count_of) == 48


def test_a_refused_operation_sends_nothing_of_its_writes_that_wait(url: str) -> None:
    def refuse(change: CatalogChange) -> None:
        change.later(_WRONG, hash="no such namespace")
        raise InvalidArgument("no")

    with catalog_on(url) as catalog, ThreadPoolExecutor(16) as threads:
        futures = [threads.submit(catalog.write, HOUSE, add_one if number % 2 else refuse) for number in range(32)]
        assert [type(error) for future in futures if (error := future.exception())] == [InvalidArgument] * 16
        assert catalog.read(HOUSE, count_of) == 16


@pytest.mark.parametrize("runs", range(8))  # the library prepares a statement that ran so often
def test_a_statement_that_waited_behind_one_that_failed_runs_again(url: str, runs: int) -> None:
    text, wrong = "SELECT CAST(:text AS TEXT)", "SELECT 1 / CAST(:zero AS INTEGER)"
    with closing(Session(Servers(url))) as session:
        session.connect()
        session.execute("BEGIN")
        for failures in (0, 1, 1):
            session.execute_later("SAVEPOINT operation")
            for _ in range(runs * failures):
                session.execute(text, {"text": "before"})
            for _ in range(failures):
                session.execute_later(wrong, {"zero": 0})
                session.execute_later(text, {"text": "behind"})
                with pytest.raises(psycopg.errors.DivisionByZero):
                    session.execute("RELEASE operation")
            session.execute("ROLLBACK TO operation")
            assert session.execute(text, {"text": "again"}).fetchall() == [("again",)]
        assert session.execute("COMMIT").statusmessage == "COMMIT"


def test_a_read_ahead_is_answered_once_and_forgotten_behind_a_write(url: str) -> None:
    read, session = ("SELECT value FROM public.counted WHERE id = :id", {"id": 1}), Session(Servers(url))
    with psycopg.connect(url, autocommit=True) as other, closing(session):
        other.execute("CREATE TABLE counted (id BIGINT, value BIGINT)")
        other.execute("INSERT INTO counted VALUES (1, 1)")
        session.connect()

        def read_ahead() -> None:
            session.execute_ahead(*read)
            assert session.execute("SELECT 5").fetchall() == [(5,)]
            other.execute("UPDATE counted SET value = value + 1")

        read_ahead()
        assert [session.execute(*read).fetchall() for _ in range(2)] == [[(1,)], [(2,)]]
        read_ahead()
        session.execute_later("UPDATE public.counted SET value = 10 WHERE id = :id", {"id": 1})
        assert session.execute(*read).fetchall() == [(10,)]
        read_ahead()
        session.execute("UPDATE public.counted SET value = 20")
        assert session.execute(*read).fetchall() == [(20,)]
        session.execute_ahead(*read)
        session.roll_back()
        other.execute("UPDATE counted SET value = 30")
        assert session.execute(*read).fetchall() == [(30,)]
        session.execute_ahead("SELECT wrong FROM public.counted WHERE id = :id", {"id": 1})
        with pytest.raises(psycopg.errors.UndefinedColumn):
            session.execute("SELECT 5")
        assert session.execute(*read).fetchall() == [(30,)]


def test_statements_of_many_megabytes_go_and_come_at_once(url: str) -> None:
    with closing(Session(Servers(url))) as session:
        session.connect()
        text = "x" * 2_000_000
        for _ in range(16):  # more than the buffers between the two hold, each way
            session.execute_later("SELECT CAST(:text AS TEXT)", {"text": text})
        assert session.execute("SELECT CAST(:text AS TEXT)", {"text": text}).fetchall() == [(text,)]


def test_values_of_every_kind_come_back_and_one_that_no_text_has_stops_nothing(url: str) -> None:
    values = "SELECT CAST(:text AS TEXT), CAST(:number AS BIGINT), CAST(:part AS FLOAT8), CAST(:flag AS BOOLEAN)"
    with closing(Session(Servers(url))) as session:
        session.connect()
        for row in (("ä\\'", -(2**62), 0.1, True), (None, None, None, None), ("", 0, -1e300, False)):
            found = session.execute(values, dict(zip(("text", "number", "part", "flag"), row, strict=True)))
            assert found.fetchall() == [row]
        session.execute("BEGIN")
        session.execute_later("SELECT CAST(:text AS TEXT)", {"text": "waits"})
        for ask in (session.execute, session.execute_later):
            with pytest.raises(psycopg.DataError, match="code 0"):
                ask("SELECT CAST(:text AS TEXT)", {"text": "a\0b"})
        assert session.execute("COMMIT").statusmessage == "COMMIT"


def test_a_reader_sees_a_write_that_was_acknowledged_and_no_half_of_one(url: str) -> None:
    def twice(change: CatalogChange) -> None:
        for name in ("a", "b"):
            change.set_fact(name, str(1 + int(change.fact(name) or 0)))

    with catalog_on(url) as catalog:

        def reads(acknowledged: int) -> None:
            [a, b] = catalog.read(HOUSE, lambda view: [int(view.fact(name) or 0) for name in ("a", "b")])
            assert a == b >= acknowledged

        with ThreadPoolExecutor(4) as threads:
            asked = []
            for count in range(1, 33):
                catalog.write(HOUSE, twice)
                asked += [threads.submit(reads, count) for _ in range(4)]
            for future in asked:
                future.result()


def test_a_reader_is_answered_before_its_snapshot_ends_and_a_cut_there_harms_no_later_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, answered = Session.execute, threading.Event()

    def cut(session: Session, sql: str, values: Any = None, /) -> Any:
        if sql == "COMMIT" and threading.current_thread().name != "kvasir-index":
            assert answered.wait(20)
            session.close()
        return execute(session, sql, values)

    with catalog_on(url) as catalog:
        catalog.write(HOUSE, add_one)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "execute", cut)
            assert catalog.read(HOUSE, count_of) == 1
            answered.set()
            assert [catalog.read(HOUSE, count_of) for _ in range(8)] == [1] * 8
        assert catalog.read(HOUSE, count_of) == 1


@pytest.mark.long(2)
def test_a_killed_server_loses_nothing_acknowledged_and_does_nothing_twice() -> None:
    with running() as server:
        url = server.url(server.new_database())
        acknowledged, is_over = list[int](), threading.Event()
        with catalog_on(url) as catalog:

            def write() -> None:
                while not is_over.is_set():
                    acknowledged.append(catalog.write(HOUSE, add_one))

            with ThreadPoolExecutor(4) as threads:
                writers = [threads.submit(write) for _ in range(4)]
                for _ in range(2):
                    time.sleep(random.Random(len(acknowledged)).uniform(0.1, 0.5))
                    server.kill()
                    server.start()
                    wanted = len(acknowledged) + 8
                    while len(acknowledged) < wanted and not any(writer.done() for writer in writers):
                        time.sleep(0.01)
                is_over.set()
                for writer in writers:
                    writer.result()
            assert sorted(acknowledged) == list(range(1, 1 + catalog.read(HOUSE, count_of)))


def test_one_store_at_a_time_has_a_database(url: str) -> None:
    with catalog_on(url), pytest.raises(Unavailable, match="another store has this database open") as refused:
        open_postgres(url, Disk(), lambda: 0)
    assert refused.value.reason == "LOCKED"


def test_a_store_whose_database_another_one_took_writes_nothing_more(url: str) -> None:
    with catalog_on(url) as first:
        first.write(HOUSE, add_one)
        end_writer(url)  # as where its host was parted
        with catalog_on(url) as second:
            second.write(HOUSE, add_one)
            asks = (
                lambda: first.write(HOUSE, add_one),
                lambda: first.read(HOUSE, count_of),
                lambda: first.read(HOUSE, lambda _: None),
                lambda: first.read(HOUSE, refuse),  # by what it knows no more
            )
            for ask in asks:
                with pytest.raises(Unavailable, match="another store has") as refused:
                    ask()
                assert refused.value.reason == "LOCKED"
            assert second.read(HOUSE, count_of) == 2
        with pytest.raises(Unavailable, match="another store has opened this database since"):
            first.write(HOUSE, add_one)


def test_a_store_whose_database_another_one_took_prolongs_no_lease(url: str, tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    with Lab(tmp_path / "a", catalog=url, kept_blobs=blobs).open() as first:
        token = first.leases.acquire(NS, "ada", KV, "engine").token
        held = [HeldLease("ada", token.generation)]
        assert not first.leases.renew_all(NS, "engine", KV, held, 30).lost
        (tmp_path / "b").mkdir(mode=0o700)
        shutil.copy(tmp_path / "a" / "catalog", tmp_path / "b")
        end_writer(url)
        with Lab(tmp_path / "b", catalog=url, kept_blobs=blobs).open() as second:
            with pytest.raises(Unavailable, match="another store has this database open"):
                first.leases.renew_all(NS, "engine", KV, held, 30)
            with pytest.raises(FailedPrecondition, match="held by engine"):
                second.leases.acquire(NS, "ada", KV, "another")


@pytest.mark.long(2)
def test_a_store_writes_nothing_while_another_session_has_the_lock(postgres: PostgresServer) -> None:  # noqa: F811
    url = postgres.url(postgres.new_database())
    with catalog_on(url) as catalog:
        catalog.write(HOUSE, add_one)
        with psycopg.connect(url, autocommit=True) as other:
            other.execute(END_WRITER)
            other.execute(f"SELECT pg_advisory_lock({LOCK})")
            for _ in range(2):  # the second does not go on with the session that got no lock
                with pytest.raises(Unavailable, match="another store has this database open"):
                    catalog.write(HOUSE, add_one)
        assert catalog.write(HOUSE, add_one) == 2


@pytest.mark.long(2)
def test_a_reader_whose_session_the_server_ended_answers_and_goes_on(url: str) -> None:
    def sleeps(view: CatalogView) -> None:
        count_of(view)
        time.sleep(0.5)
        raise KeyError

    def writes(change: CatalogChange) -> None:
        add_one(change)
        time.sleep(0.5)

    with catalog_on(f"{url}?options=-c%20idle_in_transaction_session_timeout%3D300ms") as catalog:
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(catalog.read, HOUSE, sleeps) for _ in range(8)]
            for each in asked:
                with pytest.raises((KeyError, Unavailable)):
                    each.result(timeout=20)
        assert catalog.read(HOUSE, count_of) == 0


def test_a_database_that_takes_no_writes_is_unavailable(url: str) -> None:
    with catalog_on(url) as catalog:
        catalog.write(HOUSE, add_one)
        with read_only(url), pytest.raises(Unavailable) as refused:
            catalog.write(HOUSE, add_one)
        assert refused.value.reason == "INDEX_FAILED"
        assert catalog.write(HOUSE, add_one) == 2


@contextmanager
def read_only(url: str) -> Iterator[None]:
    """For this time the server begins each transaction as one that only reads."""

    def configure(how: str, wanted: str) -> None:
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("SET default_transaction_read_only = off")
            other.execute(f"ALTER SYSTEM {how}")
            other.execute("SELECT pg_reload_conf()")
        eventually(lambda: shown() == wanted)  # then each older session has been sent a signal

    def shown() -> str:
        with psycopg.connect(url, autocommit=True) as new:
            [[value]] = new.execute("SHOW default_transaction_read_only").fetchall()
        return str(value)

    try:
        configure("SET default_transaction_read_only = on", "on")
        yield
    finally:
        configure("RESET default_transaction_read_only", "off")


def test_the_server_looks_for_hosts_that_are_gone(url: str) -> None:
    with closing(Session(Servers(url))) as session:
        session.connect()
        settings = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
        shown = [session.execute(f"SHOW {name}").fetchall()[0][0] for name in settings]
    assert shown == ["5", "2", "3", "10000"]


def test_a_database_that_lacks_an_acknowledged_commit_is_refused_until_the_store_starts_again(url: str) -> None:
    with catalog_on(url) as catalog:
        for _ in range(2):
            catalog.write(HOUSE, add_one)
        with psycopg.connect(url) as other:  # as on a standby to which the last commit did not come
            other.execute("UPDATE kvasir.writers SET groups = groups - 1")
            other.execute("UPDATE kvasir.facts SET value = '1' WHERE name = 'count'")
        for _ in range(2):
            with pytest.raises(FailedPrecondition, match="lacks commits") as refused:
                catalog.read(HOUSE, count_of)
            assert refused.value.reason == "INDEX_BEHIND"
            with pytest.raises(FailedPrecondition, match="lacks commits"):
                catalog.write(HOUSE, add_one)
    with catalog_on(url) as catalog:
        assert catalog.write(HOUSE, add_one) == 2


def test_the_group_after_one_whose_effect_is_unknown_is_marked(url: str) -> None:
    with catalog_on(url) as catalog:
        catalog.write(HOUSE, add_one)
        with psycopg.connect(url) as other:  # as where its answer was lost, and another server was asked about it
            other.execute("UPDATE kvasir.writers SET groups = groups + 1")
        with read_only(url), pytest.raises(Unavailable):  # tries that are counted, too
            catalog.write(HOUSE, add_one)
        assert catalog.write(HOUSE, add_one) == 2
        assert catalog.read(HOUSE, count_of) == 2
        assert catalog.write(HOUSE, add_one) == 3


def test_a_database_that_went_back_gives_no_lease_while_a_lost_one_may_hold(url: str, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "data", catalog=url)
    with lab.open() as store:
        for agent_id in ("ada", "bob"):
            store.leases.acquire(NS, agent_id, KV, "engine", 20)
        store.leases.release(NS, "ada", KV, LeaseToken("engine", 1))
    with psycopg.connect(url) as other:  # as a promoted standby that lacks bob's lease: its log has another timeline
        other.execute("DELETE FROM kvasir.leases WHERE agent_name = 'bob'")
        other.execute("UPDATE kvasir.facts SET value = '00000000 1' WHERE name = 'inode'")
    with lab.open() as store:
        with pytest.raises(FailedPrecondition) as refused:
            store.leases.acquire(NS, "bob", KV, "another")
        assert refused.value.reason == "LEASE_HELD"
        lab.clock.pass_s(1)
    lab.clock.databases_set_by_s = 3600
    lab.clock.pass_s(0)
    with lab.open() as store:  # a second start knows it, too, and not for how long it has held
        for passed_s in (0, 19):
            lab.clock.pass_s(passed_s)
            with pytest.raises(FailedPrecondition, match="a lost commit"):
                store.leases.acquire(NS, "bob", KV, "another")
        lab.clock.pass_s(1)
        assert store.leases.acquire(NS, "bob", KV, "another").token.owner == "another"
    with lab.open() as store:
        store.leases.acquire(NS, "new", KV, "another")


def test_a_restart_forgets_no_owner_and_nobody_who_waits(url: str, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "data", catalog=url)
    with lab.open() as store:
        publish(store, "bob", SyntheticAgent(SMALL, 1).turn(30), 0)
        for agent_id in ("ada", "bob"):
            store.leases.acquire(NS, agent_id, KV, "engine", 10)
        for refused in (
            lambda: store.leases.acquire(NS, "ada", KV, "another", 10, asks=True),
            lambda: store.agents.roll_back(NS, "bob", 1),
        ):
            with pytest.raises(FailedPrecondition, match="held by engine"):
                refused()
        lab.clock.pass_s(6)
    with lab.open() as store:
        ada, bob = HeldLease("ada", 1), HeldLease("bob", 1)
        renewed = store.leases.renew_all(NS, "engine", KV, [ada, bob], 8)
        assert (renewed.lost, renewed.wanted) == ((bob,), (ada,))
        lab.clock.pass_s(7)
        renewed = store.leases.renew_all(NS, "engine", KV, [ada], 8)
        assert renewed.wanted == (ada,)
        lab.clock.pass_s(2)
        with pytest.raises(FailedPrecondition, match="held by engine"):
            store.agents.roll_back(NS, "bob", 1)
        lab.clock.pass_s(1)
        assert store.agents.roll_back(NS, "bob", 1).version == 2
        lab.clock.pass_s(4)
        with pytest.raises(FailedPrecondition, match="held by engine"):
            store.leases.acquire(NS, "ada", KV, "another", 10)
        lab.clock.pass_s(1)
        assert store.leases.acquire(NS, "ada", KV, "another", 10).token.generation == 2


def test_a_grant_whose_operation_fails_is_undone(url: str, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "data", catalog=url)
    with lab.open() as store:
        core, line = store._core, LineKey(NS, "ada", KV)
        store.leases.acquire(NS, "ada", KV, "engine", 5)

        def fails(change: CatalogChange) -> None:
            change.renew_lease(line, core.leases, LeaseToken("engine", 1), 60_000)
            raise FailedPrecondition("for another reason", reason="AGENT_MOVED")

        with pytest.raises(FailedPrecondition, match="another reason"):
            core.write(NS, fails)
        lab.clock.pass_s(5)
        assert store.leases.acquire(NS, "ada", KV, "another", 5).token.generation == 2


def test_a_database_of_a_newer_kvasir_is_refused(url: str) -> None:
    with catalog_on(url):
        pass
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO kvasir.migrations VALUES (99, 0)")
    with pytest.raises(FailedPrecondition, match="newer Kvasir: its database has step 99"):
        open_postgres(url, Disk(), lambda: 0)


def test_a_database_and_a_directory_belong_together(postgres: PostgresServer, tmp_path: Path) -> None:  # noqa: F811
    first, second = (postgres.url(postgres.new_database()) for _ in range(2))
    turn = SyntheticAgent(SMALL, 1).turn(30)
    with Lab(tmp_path / "a", catalog=first).open() as store:
        kept = publish(store, "ada", turn, 0)

    def refusal(lab: Lab) -> str:
        with pytest.raises(FailedPrecondition) as refused:
            lab.open()
        assert refused.value.reason == "INDEX_FOREIGN"
        return refused.value.message

    assert "lists the blobs of another directory" in refusal(Lab(tmp_path / "b", catalog=first))
    assert "holds blobs" in refusal(Lab(tmp_path / "a", catalog=second))
    assert "is in PostgreSQL: name its database by --catalog" in refusal(Lab(tmp_path / "a"))
    Lab(tmp_path / "c").open().close()
    assert "is the file kvasir.sqlite3" in refusal(Lab(tmp_path / "c", catalog=second))
    with Lab(tmp_path / "a", catalog=first).open() as store:
        assert_restores(store, kept, turn)
        assert store.care.check().findings == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mysql://a@b/c", "expected postgresql://USER@HOST/DATABASE"),
        ("postgresql://kvasir:secret@127.0.0.1/kvasir", "leave the password out"),
        ("postgresql://kvasir@127.0.0.1/kvasir?password=secret", "leave the password out"),
    ],
)
def test_a_wrong_address_is_refused_and_not_repeated(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read_settings({"data_dir": tmp_path, "catalog": text})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("postgresql://some@some..where/kvasir", "catalog: expected a host's name"),
        ("postgresql://some@127.0.0.1,some..where/kvasir", "catalog: expected a host's name"),
        (f"postgresql://some@{'some' * 20}/kvasir", "catalog: expected a host's name"),
        ("postgresql://some@127.0.0.1/kvasir?connect_timeout=some", "catalog: expected connect_timeout in seconds"),
    ],
)
def test_an_address_that_no_server_could_have_is_refused_as_one(wrong: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=why) as refused:
        Lab(tmp_path / "data", catalog=wrong).open()
    assert refused.value.field == "catalog"
    assert "some" not in refused.value.message


def test_a_sockets_directory_may_have_a_long_name_and_dots() -> None:
    Servers(f"postgresql://somebody@%2Ftmp%2F{'some' * 20}..d/kvasir")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("postgresql://somebody@127.0.0.1:1/somewhere", "catalog: Connection refused"),
        ("postgresql://kvasir@somewhere.invalid/kvasir", "catalog: failed to resolve host …: "),
        ("somewhere", "catalog: FATAL: database … does not exist"),
    ],
)
def test_a_server_that_cannot_be_used_is_unavailable_for_a_reason_that_shows_no_address(
    postgres: PostgresServer,  # noqa: F811
    tmp_path: Path,
    wrong: str,
    why: str,
) -> None:
    url = wrong if "/" in wrong else postgres.url(wrong)
    with pytest.raises(Unavailable, match=why) as refused:
        Lab(tmp_path / "data", catalog=url).open()
    assert refused.value.reason == "INDEX_FAILED"
    assert "some" not in refused.value.message


def test_a_database_of_another_role_is_refused_in_words(postgres: PostgresServer, tmp_path: Path) -> None:  # noqa: F811
    url = postgres.url(postgres.new_database())
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(Unavailable, match="catalog: permission denied"):
        Lab(tmp_path / "data", catalog=url.replace("kvasir@", "guest@")).open()


@pytest.mark.long(3)
def test_a_store_on_postgres_that_is_killed_goes_on(url: str, tmp_path: Path) -> None:
    memory = SyntheticAgent(SMALL, 1)
    with store_home(tmp_path / "h") as home:
        for life in range(2):
            store = home.start("--catalog", url)
            with store.client() as client:
                turn = memory.turn(300)
                client.put_blobs(turn.new_blobs)
                assert service_running.publish(client, "ada", turn, life).version == life + 1
                assert [digest for digest, _ in client.get_blobs(turn.digests)] == turn.digests
            store.kill()
        for command in ("recover", "copy-index"):
            assert "its server's own tools" in refusal_of(home, command)


@pytest.mark.fleet
@pytest.mark.long(16)
def test_kills_of_store_and_server_in_turn_lose_nothing_acknowledged(tmp_path: Path) -> None:
    with running() as server, store_home(tmp_path / "h") as home:

        def restart(life: int) -> None:
            if life % 2:
                server.kill()
                server.start()

        writers = [Writer(number) for number in range(WRITERS)]
        assert lives(home, server.url(server.new_database()), writers, 12, restart) > 12


def lives(home: StoreHome, url: str, writers: list[Writer], kills: int, between: Callable[[int], None]) -> int:
    """As the campaign of kills over SQLite; between two lives something else may die. How much was acknowledged."""
    source = random.Random(1)
    for life in range(kills + 1):
        store = home.start("--retained-versions", "1000", "--catalog", url)
        count = assert_nothing_lost(store, writers)
        if life < kills:
            one_life(store, writers, source)
            between(life)
    store.process.terminate()
    store.process.wait()
    with Lab(home.data_dir, catalog=url).open() as opened:
        assert opened.care.check().findings == ()
    return count


def refusal_of(home: StoreHome, command: str) -> str:
    into = ["--into", str(home.root / "copy")] if command == "copy-index" else []
    done = run("cachestore_svc", command, "--data-dir", str(home.data_dir), *into, timeout_s=60)
    assert done.returncode != 0
    return str(done.stderr)


def test_a_refusal_of_a_lost_database_has_its_failure_and_no_address() -> None:
    lost = translated(psycopg.OperationalError("connection to server at 10.0.0.7 failed: secret"))
    assert str(lost) == "the index cannot be used: there is no connection to its server"
    assert str(translated(psycopg.errors.AdminShutdown("at 10.0.0.7"))) == "the index cannot be used: AdminShutdown"
