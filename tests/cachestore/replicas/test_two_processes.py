"""Two store processes over one PostgreSQL and one bucket: each answers all, and one that dies or stands still does no
harm. `tests/cachestore/bucket/test_over_s3.py` says where the S3 server comes from.
"""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.clients import StoreClient
from kvasir.errors import Conflict, FailedPrecondition, KvasirError
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.bucket.bucket import open_bucket
from cachestore_svc.blobs.bucket.owning import OWNER, Note, noted
from cachestore_svc.recovery.medium import BUCKET_NOTE
from tests.cachestore.bucket.test_over_s3 import NEEDS_SERVER, Faults
from tests.cachestore.replicas.processes import WHERE, Link, Replicas
from tests.cachestore.service.running import assert_whole, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import step_clock_of

pytestmark = NEEDS_SERVER
KV = kv_identity_hash(SMALL)


@pytest.fixture
def link(faults: Faults) -> Iterator[Link]:
    with closing(Link(faults._port)) as made:
        yield made


def head_of(client: StoreClient, agent: str) -> int:
    return client.get_snapshot(agent)[0].version


def test_each_store_has_the_commits_of_the_other_and_survives_it(replicas: Replicas) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first, second = agent.turn(30), agent.turn(30)
    a, b = replicas.start("a"), replicas.start("b")
    with a.client() as at_a, b.client() as at_b:
        publish(at_a, "ada", first, 0)
        a.kill()
        assert_whole(at_b, "ada", first)
        assert publish(at_b, "ada", second, 1).version == 2


@pytest.mark.long(5)
def test_after_a_kill_of_one_the_other_has_all_and_a_new_directory_may_join(replicas: Replicas) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first, second, third = (agent.turn(300) for _ in range(3))
    a, b = replicas.start("a"), replicas.start("b")
    with a.client() as at_a, b.client() as at_b:
        watch = at_b.watch(timeout_s=60)
        next(watch)
        lease = at_a.acquire_lease("ada", KV, "engine-1", ttl_s=60).lease
        at_a.put_blobs(first.new_blobs)
        at_b.put_manifest(first.manifest_bytes)  # its blobs came to the other
        at_a.commit("ada", first.manifest_digest, 0, lease=lease)
        assert next(watch).committed.version == 1
        watch.close()
        assert_whole(at_b, "ada", first)
        a.kill()
        with pytest.raises(FailedPrecondition, match="held by engine-1"):
            at_b.acquire_lease("ada", KV, "engine-2")
        at_b.put_blobs(second.new_blobs)
        at_b.put_manifest(second.manifest_bytes)
        assert at_b.commit("ada", second.manifest_digest, 1, lease=lease).version == 2
        at_b.release_lease("ada", KV, lease)
    with replicas.start("c").client() as at_c:
        assert publish(at_c, "ada", third, 2).version == 3
        assert_whole(at_c, "ada", first, version=1)
    assert b.stop() == 0


@pytest.mark.long(7)
@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_store_that_starts_behind_a_step_of_the_databases_clock_gives_no_lease_twice(
    replicas: Replicas, step_s: float
) -> None:
    a = replicas.start("a")
    with a.client() as at_a:
        at_a.acquire_lease("ada", KV, "engine-1", ttl_s=60)
        lease = at_a.acquire_lease("bob", KV, "engine-1", ttl_s=60).lease
    a.kill()
    step_clock_of(replicas.url, step_s)
    with replicas.start("b").client() as at_b:
        for agent in ("ada", "bob"):
            with pytest.raises(FailedPrecondition, match="held by engine-1") as refused:
                at_b.acquire_lease(agent, KV, "engine-2")
            assert int(refused.value.metadata["left_ms"]) <= 60_001
        at_b.release_lease("bob", KV, lease)
        assert at_b.acquire_lease("bob", KV, "engine-2").lease.generation == 2


@pytest.mark.long(5)
def test_of_writers_of_one_agent_at_both_one_wins_each_version(replicas: Replicas) -> None:
    stores = [replicas.start(name) for name in "ab"]
    won: dict[int, list[str]] = {}
    lock = threading.Lock()

    def write(number: int) -> None:
        with stores[number % 2].client() as client:
            agent = SyntheticAgent(SMALL, number)
            for _ in range(8):
                turn = agent.turn(30)
                try:
                    parent = head_of(client, "ada")
                except KvasirError:
                    parent = 0
                try:
                    version = publish(client, "ada", turn, parent).version
                except Conflict:
                    continue
                with lock:
                    won.setdefault(version, []).append(turn.manifest_digest.hash)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert sorted(won) == list(range(1, max(won) + 1))
    assert [len(each) for each in won.values()] == [1] * len(won)
    newest = max(won)
    for store in stores:
        with store.client() as client:
            shown, _ = client.get_snapshot("ada")
            assert (shown.version, [Digest.from_proto(shown.manifest).hash]) == (newest, won[newest])


@pytest.mark.long(8)
def test_a_replica_that_is_unlike_and_a_copy_of_the_database_are_refused(replicas: Replicas, tmp_path: Path) -> None:
    a = replicas.start("a")
    with a.client() as client:
        publish(client, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
    b = replicas.home("b")
    others = b.refusal(*replicas.options(where="s3://bucket/others"))
    assert "differs in: blobs" in others
    assert "differs in: grace-period-s" in b.refusal(*replicas.options(), "--grace-period-s", "60")
    assert "another store has this database open" in b.refusal("--catalog", replicas.url)
    a.stop()
    copy = replicas.copy_of_database()
    assert "start with --blobs s3://bucket/agents" in b.refusal(*replicas.options(where="s3://bucket/others"))
    assert "another copy of this database" in b.refusal(*replicas.options(url=copy))
    a = replicas.start("a")
    with replicas.home("c").start(*replicas.options(url=copy), "--accept-older").client() as at_copy:
        publish(at_copy, "bob", SyntheticAgent(SMALL, 2).turn(300), 0)
        with a.client() as client, pytest.raises(FailedPrecondition) as refused:
            publish(client, "bob", SyntheticAgent(SMALL, 3).turn(300), 0)
        assert refused.value.reason == "BUCKET_TAKEN"
    a.kill()
    assert "another copy of this database" in replicas.home("a").refusal(*replicas.options())


@pytest.mark.long(4)
def test_a_bucket_of_an_earlier_version_goes_to_its_own_directory_before_others_join(replicas: Replicas) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(300)
    a = replicas.start("a")
    with a.client() as client:
        publish(client, "ada", turn, 0)
    a.stop()
    now = noted(a.data_dir / BUCKET_NOTE)
    assert now
    Note(WHERE, now.store, ("5" * 32,)).write(a.data_dir / BUCKET_NOTE)  # as that version left both
    open_bucket(WHERE, replicas.credentials).put(OWNER, f"{now.store} {'5' * 32} 42".encode())
    assert "start this version once in that directory" in replicas.home("b").refusal(*replicas.options())
    for name in "ab":
        with replicas.start(name).client() as client:
            assert_whole(client, "ada", turn)


@pytest.mark.long(2)
def test_a_user_of_the_database_without_rights_of_its_server_may_open_it(replicas: Replicas) -> None:
    name = replicas.url.rpartition("/")[2]
    with psycopg.connect(replicas.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE plain_{name} LOGIN")  # type: ignore[arg-type]
        connection.execute(f"GRANT ALL ON DATABASE {name} TO plain_{name}")  # type: ignore[arg-type]
    replicas.url = replicas.url.replace("kvasir@", f"plain_{name}@")
    for store in (replicas.start("a"), replicas.start("b")):
        with store.client() as client:
            client.list_agents()


@pytest.mark.long(2)
def test_a_replica_that_starts_leaves_the_upload_of_another_alone(replicas: Replicas, link: Link) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(300)
    a = replicas.start("a", link=link)
    link.hold(b"GET /bucket/agents/kvasir-store")  # the objects are there, and no row
    with ThreadPoolExecutor() as pool, a.client() as client:
        sent = pool.submit(publish, client, "ada", turn, 0)
        assert link.held.wait(60)
        b = replicas.start("b")
        link.goes.set()
        assert sent.result().version == 1
        with b.client() as at_b:
            assert_whole(at_b, "ada", turn)
            assert_whole(client, "ada", turn)


def sweep(client: StoreClient) -> None:
    for _ in range(2):
        client.collect_garbage()


@pytest.mark.long(2)
def test_a_removal_of_a_process_that_stood_still_takes_nothing_that_another_published_since(
    replicas: Replicas, link: Link
) -> None:
    turn = SyntheticAgent(SMALL, 1).turn(300)
    options = "--grace-period-s", "0"
    a, b = replicas.start("a", *options, link=link), replicas.start("b", *options)
    with a.client() as at_a, b.client() as at_b, ThreadPoolExecutor() as pool:
        publish(at_a, "ada", turn, 0)
        at_a.delete_agent("ada", force=True)
        link.hold(b"GET /bucket/agents/kvasir-store")  # its look before a removal
        swept = pool.submit(sweep, at_a)
        assert link.held.wait(60)
        a.process.send_signal(signal.SIGSTOP)
        link.goes.set()
        sweep(at_b)  # removes what that one was about to
        publish(at_b, "bob", turn, 0)
        a.process.send_signal(signal.SIGCONT)
        swept.result()
        for client in (at_a, at_b):
            assert_whole(client, "bob", turn)


@pytest.mark.long(4)
def test_a_removal_that_arrives_late_takes_nothing_that_another_published_since(replicas: Replicas, link: Link) -> None:
    """Its process is killed after it sent it."""
    turn = SyntheticAgent(SMALL, 1).turn(300)
    options = "--grace-period-s", "0"
    a, b = replicas.start("a", *options, link=link), replicas.start("b", *options)
    with a.client() as at_a, b.client() as at_b, ThreadPoolExecutor() as pool:
        publish(at_a, "ada", turn, 0)
        at_a.delete_agent("ada", force=True)
        link.hold(b"?delete")
        swept = pool.submit(sweep, at_a)
        assert link.held.wait(60)
        a.kill()
        sweep(at_b)
        publish(at_b, "bob", turn, 0)
        link.goes.set()
        with pytest.raises(KvasirError):
            swept.result()
        sweep(at_b)
    with replicas.start("c", *options).client() as at_c:  # it has no copies on its disk
        assert_whole(at_c, "bob", turn)


@pytest.mark.long(3)
def test_a_commit_of_a_process_that_stood_still_is_fenced(replicas: Replicas) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first, late, other = agent.turn(30), SyntheticAgent(SMALL, 2).turn(30), agent.turn(30)
    a, b = replicas.start("a"), replicas.start("b")
    with a.client() as at_a, b.client() as at_b, ThreadPoolExecutor() as pool:
        publish(at_a, "ada", first, 0)
        lease = at_a.acquire_lease("ada", KV, "engine-1", ttl_s=1).lease
        at_a.put_blobs(late.new_blobs)
        at_a.put_manifest(late.manifest_bytes)
        a.process.send_signal(signal.SIGSTOP)
        committed = pool.submit(at_a.commit, "ada", late.manifest_digest, 1, lease=lease, timeout_s=60)
        theirs = _acquired(at_b, "engine-2")
        at_b.put_blobs(other.new_blobs)
        at_b.put_manifest(other.manifest_bytes)
        assert at_b.commit("ada", other.manifest_digest, 1, lease=theirs).version == 2
        a.process.send_signal(signal.SIGCONT)
        with pytest.raises(Conflict):
            committed.result()
        for client in (at_a, at_b):
            assert_whole(client, "ada", other, version=2)


def _acquired(client: StoreClient, owner: str) -> pb.LeaseToken:
    """Once the lease before ended."""
    while True:
        with suppress(FailedPrecondition):
            return client.acquire_lease("ada", KV, owner).lease
