"""A copy of the files of PostgreSQL, as a clone of its machine has them, and the server itself never both have one
bucket: whichever lacks the last start of a store, or the last minute of its work, is refused.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from kvasir.errors import FailedPrecondition
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.catalogs_bucket import CatalogOwner
from tests.cachestore.bucket.test_over_s3 import pytestmark as of_s3
from tests.cachestore.replicas.database_facts import Facts
from tests.cachestore.replicas.processes import Replicas
from tests.cachestore.service.running import assert_whole, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.postgres import running_copy

needs_s3, _ = of_s3


class Stores:
    """Stores of one bucket, each over a database, at one time."""

    def __init__(self, root: Path) -> None:
        self._bucket, self._root = Bucket(MemoryStore(), "s3://bucket/agents"), root
        self.now_s = 0.0
        self._listed = ""

    def start(self, facts: Facts, *, takes: bool = False) -> CatalogOwner:
        owner = CatalogOwner(self._bucket, lambda: self.now_s)
        self._listed = owner.take(self._root / "note", self._listed, facts, "5" * 32, takes_from_copy=takes)
        return owner


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def assert_taken(ask: Callable[[], object]) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        ask()
    assert refused.value.reason == "BUCKET_TAKEN"


def test_a_copy_is_refused_once_a_store_of_the_database_started_since(stores: Stores) -> None:
    facts = Facts()
    first = stores.start(facts)
    copied = facts.copied()
    second = stores.start(facts)
    assert_taken(lambda: stores.start(copied))
    for owner in (first, second):
        owner.check()


def test_a_copy_is_refused_once_a_store_of_the_database_worked_for_a_minute_since(stores: Stores) -> None:
    facts = Facts()
    owners = [stores.start(facts), stores.start(facts)]
    copied = facts.copied()
    stores.now_s = 61.0
    owners[0].check()
    assert_taken(lambda: stores.start(copied))
    stores.now_s = 122.0
    for owner in (*owners, *owners):
        owner.check()


def test_the_database_is_refused_once_a_copy_that_lacks_nothing_has_the_bucket(stores: Stores) -> None:
    facts = Facts()
    owner = stores.start(facts)
    theirs = stores.start(facts.copied())
    assert_taken(owner.check)
    assert_taken(lambda: stores.start(facts))
    theirs.check()
    back = stores.start(facts, takes=True)
    assert_taken(theirs.check)
    back.check()


@pytest.mark.parametrize("starts", [False, True])
def test_a_store_that_looks_while_others_replace_the_proof_is_no_copy(
    starts: bool, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts()
    first, other, read = stores.start(facts), stores.start(facts), facts.proofs
    left = 3

    def read_late() -> tuple[str, ...]:
        nonlocal left
        if left:
            left -= 1
            stores.now_s += 61.0
            monkeypatch.setattr(facts, "proofs", read)
            other.check()
            monkeypatch.setattr(facts, "proofs", read_late)
        return read()

    monkeypatch.setattr(facts, "proofs", read_late)
    if starts:
        first = stores.start(facts)
    first.check()
    assert left == 0
    other.check()


class _Cut(Exception):
    """The store is killed."""


def _cut(*_: object) -> None:
    raise _Cut


@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_a_start_that_is_cut_amid_a_new_proof_leaves_the_bucket_to_the_database(
    is_in_bucket: bool, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts()
    beside = stores.start(facts)
    copied = facts.copied()
    where = (Facts, "keep_proof") if is_in_bucket else (Bucket, "swap")
    with monkeypatch.context() as patch:
        patch.setattr(*where, _cut)
        with pytest.raises(_Cut):
            stores.start(facts)
    beside.check()
    stores.start(facts)
    beside.check()
    assert_taken(lambda: stores.start(copied))


def test_a_bucket_of_a_version_without_proofs_is_the_databases(stores: Stores) -> None:
    bucket = stores._bucket
    assert bucket.put_new("kvasir-store", f"{'5' * 32} 00000001 7001.5 catalog".encode())
    owner = stores.start(Facts())
    owner.check()
    assert_taken(lambda: stores.start(Facts()))


def numbers_of(url: str) -> tuple[object, ...]:
    numbers = "system_identifier, left(pg_walfile_name(pg_current_wal_lsn()), 8), oid"
    where = "FROM pg_control_system(), pg_database WHERE datname = current_database()"
    with closing(psycopg.connect(url)) as connection:
        [found] = connection.execute(f"SELECT {numbers} {where}").fetchall()  # type: ignore[arg-type]
        return found


@pytest.mark.long(8)
@needs_s3
def test_of_two_servers_with_the_same_files_one_has_the_bucket(replicas: Replicas) -> None:
    agent = SyntheticAgent(SMALL, 1)
    first, second, third = agent.turn(300), agent.turn(300), SyntheticAgent(SMALL, 2).turn(300)
    database = replicas.url.rpartition("/")[2]
    a = replicas.start("a")
    with a.client() as at_a:
        publish(at_a, "ada", first, 0)
        with running_copy(replicas.server) as copied:
            assert numbers_of(copied.url(database)) == numbers_of(replicas.url), (
                "the server's own do not tell them apart"
            )
            c = replicas.home("c").start(*replicas.options(url=copied.url(database)))
            with c.client() as at_c:
                publish(at_c, "ada", second, 1)
                assert_taken(lambda: publish(at_a, "ada", third, 1))
            a.kill()
            assert "another copy of this database" in replicas.home("b").refusal(*replicas.options())
            b = replicas.start("b", "--accept-older")
            with b.client() as at_b:
                publish(at_b, "bob", third, 0)
                assert_whole(at_b, "ada", first)
            c.kill()
            again = replicas.options(url=copied.url(database))
            assert "another copy of this database" in replicas.home("c").refusal(*again)
