"""Several stores over one database of PostgreSQL: each knows the others' acts, and nothing is done twice."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

import psycopg
import pytest
from kvasir.errors import Conflict, FailedPrecondition, Unavailable
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.waits import LOOK_S, SILENCE_S

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import Committed, Event, HeldLease, LeaseWanted
from cachestore_svc.index.catalog import HOUSE, Catalog, CatalogChange, CatalogView, open_postgres
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.pairing.peers_file import PeerBook, PeerSettings
from cachestore_svc.store import jobs
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from cachestore_svc.upkeep.expiring import ClockReading
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish
from tests.cachestore.index.test_postgres import add_one, count_of, end_writer
from tests.cachestore.replicas.conftest import ALIKE
from tests.made_models.synthetic import SMALL, SyntheticAgent

KV = kv_identity_hash(SMALL)


@contextmanager
def replica(url: str, shared_as: dict[str, str] | None = ALIKE) -> Iterator[Catalog]:
    with closing(open_postgres(url, Disk(), lambda: 0, shared_as)) as catalog:
        yield catalog


def test_writes_of_two_stores_at_a_time_follow_each_other(url: str) -> None:
    with replica(url) as a, replica(url) as b, ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(catalog.write, HOUSE, add_one) for _ in range(40) for catalog in (a, b)]
        assert sorted(each.result() for each in asked) == list(range(1, 81))
        assert a.read(HOUSE, count_of) == b.read(HOUSE, count_of) == 80


@pytest.mark.long(3)
def test_stores_share_a_database_with_their_like_alone(url: str) -> None:
    with replica(url):
        with replica(url):
            pass
        with pytest.raises(Unavailable, match="another store has this database open"):
            open_postgres(url, Disk(), lambda: 0)
        with pytest.raises(FailedPrecondition, match="differs in: blobs, keys;") as refused:
            open_postgres(url, Disk(), lambda: 0, {"blobs": "s3://bucket/others"})
        assert (refused.value.reason, refused.value.metadata) == ("REPLICA_UNLIKE", {"differs": "blobs keys"})
        assert "bucket/" not in refused.value.message
    with replica(url, {"blobs": "elsewhere"}), psycopg.connect(url) as other:  # a process of the server has its number
        other.execute(
            """UPDATE kvasir.writers SET session = split_part((SELECT session FROM kvasir.writers WHERE shared_as
                LIKE '%elsewhere%'), ' ', 1) || ' 1' WHERE shared_as NOT LIKE '%elsewhere%'"""
        )
        other.commit()
        with replica(url, {"blobs": "elsewhere"}):
            pass
    with replica(url, None) as alone:
        with pytest.raises(Unavailable, match="another store has this database open"):
            open_postgres(url, Disk(), lambda: 0, ALIKE)
        alone.write(HOUSE, add_one)
    with replica(url, {"blobs": "elsewhere"}) as later:  # nobody has it now that differs
        assert later.read(HOUSE, count_of) == 1


def test_a_store_that_had_a_database_alone_and_was_cut_off_is_shut_out_by_one_that_shares_it(url: str) -> None:
    with replica(url, None) as alone:
        end_writer(url)
        with replica(url) as a:
            a.write(HOUSE, add_one)
            for ask in (lambda: alone.write(HOUSE, add_one), lambda: alone.read(HOUSE, count_of)):
                with pytest.raises(Unavailable) as refused:
                    ask()
                assert refused.value.reason == "LOCKED"
        with pytest.raises(Unavailable, match="opened this database since"):
            alone.write(HOUSE, add_one)


@pytest.mark.long(3)
def test_a_store_that_was_cut_off_comes_back_to_its_like_and_to_no_other(url: str) -> None:
    with replica(url) as a, replica(url) as b:
        for count in (1, 3):
            end_writer(url)
            assert [catalog.write(HOUSE, add_one) for catalog in (a, b)] == [count, count + 1]
    with replica(url) as a:
        end_writer(url)
        with replica(url, {**ALIKE, "keys": "others"}):
            for _ in range(2):
                with pytest.raises(FailedPrecondition, match="differs in: keys;"):
                    a.write(HOUSE, add_one)
        assert a.write(HOUSE, add_one) == 5


def test_a_group_that_waited_for_another_stores_takes_all_that_came_meanwhile(url: str) -> None:
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still(_: object) -> None:
        stands.set()
        goes_on.wait(60)

    now_ms = 0
    with replica(url) as a, closing(open_postgres(url, Disk(), lambda: now_ms, ALIKE)) as b:
        still = a.write_later(HOUSE, stand_still)
        assert stands.wait(30)
        waiting = [b.write_later(HOUSE, add_one) for _ in range(9)]
        with psycopg.connect(url, autocommit=True) as connection:
            while connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall() == []:
                time.sleep(LOOK_S)
        now_ms = 1000  # longer than a group takes more
        goes_on.set()
        assert [each.result() for each in [still, *waiting]] == [None, *range(1, 10)]
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT groups FROM writers").fetchall() == [(1,), (1,)]


@pytest.mark.long(5)
def test_a_store_that_stands_still_amid_a_group_holds_up_the_others_for_seconds(url: str) -> None:
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still(_: object) -> None:
        stands.set()
        goes_on.wait(60)

    with replica(url) as a, replica(url) as b, ThreadPoolExecutor() as threads:
        still = threads.submit(a.write, HOUSE, lambda change: (add_one(change), stand_still(change)))
        assert stands.wait(30)
        began = time.monotonic()
        assert b.write(HOUSE, add_one) == 1, "what stood still is undone"
        assert time.monotonic() - began < 20
        goes_on.set()
        still.result()
        assert b.read(HOUSE, count_of) == 2


@pytest.mark.long(5)
def test_a_store_that_stands_still_behind_a_write_of_its_group_holds_up_the_others_for_seconds(url: str) -> None:
    """Whatever of the group the server was sent, it must wait for the store: no limit ends a session that works."""
    stands, goes_on, begins = threading.Event(), threading.Event(), threading.Event()

    def stand_still(_: object) -> None:
        stands.set()
        goes_on.wait(60)

    with replica(url) as a, replica(url) as b:
        first = a.write_later(HOUSE, lambda _: begins.wait(30))
        group = [a.write_later(HOUSE, add_one), a.write_later(HOUSE, stand_still)]
        begins.set()
        assert stands.wait(30)
        began = time.monotonic()
        assert b.write_later(HOUSE, add_one).result(20) == 1, "what stood still is undone"
        assert time.monotonic() - began < 20
        goes_on.set()
        assert [each.result() for each in (first, *group)] == [True, 2, None]


# --- leases ---


def test_a_lease_that_one_store_gave_is_held_renewed_wanted_taken_back_and_ended_at_the_other(
    stores: tuple[Lab, Store, Store],
) -> None:
    lab, a, b = stores
    agent = SyntheticAgent(SMALL, 1)
    token = a.leases.acquire(NS, "ada", KV, "engine-1", 10).token
    publish(b, "ada", agent.turn(30), 0, lease=token)
    ada, cursor = HeldLease("ada", 1), a.events.after(NS, None).cursor
    with pytest.raises(FailedPrecondition, match="held by engine-1") as refused:
        b.leases.acquire(NS, "ada", KV, "engine-2", 10, asks=True)
    assert refused.value.reason == "LEASE_HELD"
    lab.clock.pass_s(8)
    assert b.leases.renew_all(NS, "engine-1", KV, [ada], 10).wanted == (ada,)
    lab.clock.pass_s(8)
    with pytest.raises(FailedPrecondition):  # a asked it for itself
        a.leases.acquire(NS, "ada", KV, "engine-2", 10)
    assert [each.body for each in a.events.after(NS, cursor).events] == [LeaseWanted("ada", KV, False)]
    with pytest.raises(FailedPrecondition):
        b.agents.roll_back(NS, "ada", 1)
    assert a.leases.renew_all(NS, "engine-1", KV, [ada], 10).lost == (ada,)
    b.leases.release(NS, "ada", KV, token)
    with pytest.raises(FailedPrecondition, match="a change of the agent that waits for it"):
        a.leases.acquire(NS, "ada", KV, "engine-2", 10)
    assert b.agents.roll_back(NS, "ada", 1).version == 2
    with pytest.raises(Conflict) as fenced:
        publish(a, "ada", agent.turn(30), 1, lease=token)
    assert fenced.value.reason == "LEASE_FENCED"
    later = a.leases.acquire(NS, "ada", KV, "engine-2", 10).token
    lab.clock.pass_s(10)
    assert b.leases.acquire(NS, "ada", KV, "engine-3", 10).token.generation == later.generation + 1


async def test_what_waits_at_one_store_finds_that_a_lease_was_given_back_to_the_other(
    stores: tuple[Lab, Store, Store],
) -> None:
    _, a, b = stores
    publish(a, "ada", SyntheticAgent(SMALL, 1).turn(30), 0)
    token = a.leases.acquire(NS, "ada", KV, "engine-1", 600).token
    threads = StoreThreads(4)
    deleting = asyncio.create_task(AioStore(b, threads).run_once_free(NS, "ada", None, b.agents.delete, "ada"))
    await asyncio.sleep(3 * LOOK_S)
    assert not deleting.done()
    a.leases.release(NS, "ada", KV, token)
    async with asyncio.timeout(30):
        await deleting
    threads.close()


@pytest.mark.long(4)
def test_no_two_owners_have_a_lease_at_two_stores(stores: tuple[Lab, Store, Store]) -> None:
    _, *both = stores
    holders, wrong = set[str](), list[set[str]]()
    lock = threading.Lock()

    def live(owner: str) -> int:
        dice, had = random.Random(owner), 0
        for _ in range(40):
            try:
                token = dice.choice(both).leases.acquire(NS, "ada", KV, owner, 600).token
            except FailedPrecondition:
                continue
            had += 1
            with lock:
                holders.add(owner)
                wrong.extend([set(holders)] if len(holders) > 1 else [])
            assert not dice.choice(both).leases.renew_all(NS, owner, KV, [HeldLease("ada", token.generation)], 600).lost
            with lock:
                holders.discard(owner)
            dice.choice(both).leases.release(NS, "ada", KV, token)
        return had

    with ThreadPoolExecutor() as threads:
        had = list(threads.map(live, [f"engine-{number}" for number in range(6)]))
    assert wrong == []
    assert sum(had) > 10


# --- events ---


@pytest.mark.long(2)
def test_a_watcher_at_one_store_hears_the_commits_of_the_other_in_order_and_none_twice(
    stores: tuple[Lab, Store, Store],
) -> None:
    _, a, b = stores
    agent, heard, woken = SyntheticAgent(SMALL, 1), list[Event](), threading.Event()
    cursor = b.events.after(NS, None).cursor

    with b.events.watching(NS, woken.set):
        for parent in range(6):
            woken.clear()
            publish((a, b)[parent % 2], "ada", agent.turn(30), parent)
            assert woken.wait(5)
            batch = b.events.after(NS, cursor)
            assert not batch.is_lost
            heard += batch.events
            cursor = batch.cursor
    versions = [each.body.snapshot.version for each in heard if isinstance(each.body, Committed)]
    assert versions == [1, 2, 3, 4, 5, 6]
    assert a.events.after(NS, cursor).events == ()


@pytest.mark.long(2)
def test_memories_of_turns_that_alternate_between_stores_restore_at_each(stores: tuple[Lab, Store, Store]) -> None:
    _, a, b = stores
    agent, kept = SyntheticAgent(SMALL, 1), []
    for parent in range(4):
        turn = agent.turn(300)
        kept.append((publish((a, b)[parent % 2], "ada", turn, parent), turn))
    for store in (a, b):
        for snapshot, turn in kept:
            assert_restores(store, snapshot, turn)
        assert store.care.check().findings == ()


def test_a_failover_that_one_store_finds_bars_leases_and_renames_the_history_for_all(
    stores: tuple[Lab, Store, Store], url: str
) -> None:
    lab, a, b = stores
    b.leases.acquire(NS, "other", KV, "engine-1", 20)
    lab.clock.pass_s(20)  # b has watched the database's clock for longer than a lease
    a.leases.acquire(NS, "ada", KV, "engine-1", 20)
    cursor = b.events.after(NS, None).cursor
    with psycopg.connect(url) as other:  # as a promoted standby that lacks ada's lease: its log has another timeline
        other.execute("DELETE FROM kvasir.leases")
        other.execute("INSERT INTO kvasir.leases VALUES (1, 'old', 'kv', 'engine', 1, 20000, TRUE)")
        other.execute("UPDATE kvasir.facts SET value = '00000000 1' WHERE name = 'inode'")
    end_writer(url)  # the first that connects again finds it
    publish(a, "bob", SyntheticAgent(SMALL, 1).turn(30), 0)
    assert b.events.after(NS, cursor).is_lost
    for step_s in (0, 30):
        lab.clock.databases_set_by_s += step_s
        lab.clock.pass_s(0)
        with pytest.raises(FailedPrecondition, match="a lost commit"):
            b.leases.acquire(NS, "ada", KV, "engine-2", 10)
    lab.clock.pass_s(20)
    assert b.leases.acquire(NS, "ada", KV, "engine-2", 10).token.owner == "engine-2"


@pytest.mark.parametrize("looks", [Catalog.read, Catalog.write])
def test_a_namespace_whose_number_a_standby_gave_to_another_shows_nothing_of_that_one(
    url: str, looks: Callable[..., int]
) -> None:
    def number(rows: CatalogView) -> int:
        return rows.namespace_id

    with replica(url) as a, replica(url) as b:
        a.write("mine", lambda change: change.make_namespace())
        assert looks(b, "mine", number) == looks(b, "mine", number) > 0
        with psycopg.connect(url, autocommit=True) as other:  # as a standby that lacks it: `b` acknowledged nothing
            other.execute("UPDATE kvasir.namespaces SET name = 'theirs' WHERE name = 'mine'")
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kvasir'")
        assert [looks(b, "mine", number) for _ in range(8)] == [0] * 8
        b.write("mine", lambda change: change.make_namespace())
        assert looks(b, "mine", number) not in (0, looks(b, "theirs", number))


def test_a_number_of_a_namespace_that_was_made_in_vain_is_not_kept(url: str) -> None:
    def in_vain(change: CatalogChange) -> None:
        change.make_namespace()
        assert change.namespace_id
        raise Conflict("no")

    with replica(url) as catalog:
        with pytest.raises(Conflict):
            catalog.write("mine", in_vain)
        assert catalog.write("mine", lambda change: change.namespace_id) == 0


# --- work of the background ---


def test_one_store_does_a_work_until_it_ends_or_is_silent(stores: tuple[Lab, Store, Store]) -> None:
    lab, a, b = stores
    for _ in range(3):
        assert (a.has_job("collection"), b.has_job("collection")) == (True, False)
        lab.clock.pass_s(SILENCE_S - 1)
    assert b.has_job("scrub"), "each work for itself"
    lab.clock.pass_s(SILENCE_S)
    assert (b.has_job("collection"), a.has_job("collection")) == (True, False)
    b.close()
    assert a.has_job("collection")


async def test_a_work_ends_where_another_store_took_it(
    stores: tuple[Lab, Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, a, b = stores
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.01)
    going = set[str]()

    async def work(name: str) -> None:
        assert not going, "two at a time"
        going.add(name)
        try:
            await asyncio.sleep(3600)
        finally:
            going.remove(name)

    async def until(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110  on threads
                await asyncio.sleep(0.01)

    with closing(StoreThreads()) as threads:
        tasks = [
            asyncio.create_task(jobs.while_ours(store.has_job, threads, "scrub", partial(work, name)))
            for name, store in (("a", a), ("b", b))
        ]
        await until(lambda: bool(going))
        [first] = going
        tasks[first == "b"].cancel()  # it stops to say that it goes on
        await until(lambda: not going)
        lab.clock.pass_s(SILENCE_S)
        await until(lambda: going == ({"a", "b"} - {first}))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not going


def test_no_agent_expires_early_where_another_machine_collects_from_now_on(
    labs: tuple[Lab, Lab], opened: Callable[..., tuple[Store, Store]]
) -> None:
    """It has run for longer, and its clock is set ahead."""
    day, now = 86_400.0, labs[0].clock()
    a, b = opened(expires_after_s=day)
    publish(a, "ada", SyntheticAgent(SMALL, 1).turn(30), 0)
    assert a.care.expire_agents(ClockReading(now, 100.0, "a")) == 0
    for uptime in (100 * day, 100.9 * day):
        assert b.care.expire_agents(ClockReading(now + 40 * day, uptime, "b")) == 0
    assert b.care.expire_agents(ClockReading(now + 40 * day, 101.1 * day, "b")) == 1


async def test_a_move_whose_peer_reports_to_one_store_is_undone_by_the_other_once_it_is_silent(
    stores: tuple[Lab, Store, Store],
) -> None:
    """The other one may look after the moves of both: it hears of the peer by the agent's row alone."""
    lab, a, b = stores
    publish(a, "ada", SyntheticAgent(SMALL, 1).turn(30), 0)
    entry = PeerSettings(name="studio", address="127.0.0.1:1", gives=("default=move",))
    peers, steady = Peers(lambda: PeerBook({"studio": entry})), lab.clock.steady
    threads = StoreThreads()
    one, other = (
        HandingOver(AioStore(store, threads), peers, PeerLimits(steady), patience_s=30.0, steady=steady)
        for store in (a, b)
    )

    async def look() -> bool:
        unfinished = b.owners.unfinished()
        other.forget_all_but({(NS, "ada", known.peer) for _, _, known in unfinished})
        for each in unfinished:
            await other.undo_if_silent(*each)
        return b.owners.of(NS, "ada").is_owned

    await one.offer(NS, "ada", "studio", "ab" * 8, 0, None)
    assert not await look()
    await one.undo(NS, "ada", "studio", "ab" * 8)
    assert await look()
    lab.clock.pass_s(86_400)
    for _ in range(10):
        await one.offer(NS, "ada", "studio", "cd" * 8, 1, None)
        assert not await look()
        lab.clock.pass_s(5)
    lab.clock.pass_s(20)
    assert not await look()
    lab.clock.pass_s(10)
    assert await look()
    threads.close()
