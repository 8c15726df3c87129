"""Quotas and the write budget of stores over one database: the changes of each of them count at all."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from kvasir.errors import ResourceExhausted
from kvasir.formats.digest import Digest
from kvasir.formats.manifest_checks import MANIFEST_FORMAT

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.index.catalog import HOUSE, open_postgres
from cachestore_svc.index.postgres import schema
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, publish, upload, write
from tests.cachestore.replicas.conftest import Opened
from tests.made_models.synthetic import SMALL, SyntheticAgent

_QUOTA = 100_000


def blob(size_bytes: int, name: str) -> tuple[Digest, bytes]:
    data = bytes((8, MANIFEST_FORMAT)) + name.encode().ljust(size_bytes - 2)
    return Digest.of(data), data


def put(store: Store, size_bytes: int, name: str, namespace: str = NS) -> Digest:
    """Store so many bytes that nothing holds."""
    digest, data = blob(size_bytes, name)
    write(store, digest, data, BlobKind.MANIFEST, namespace)
    return digest


def refused(store: Store, size_bytes: int, name: str) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught:
        put(store, size_bytes, name)
    assert caught.value.reason == "QUOTA_FULL"
    return caught.value


def counted(url: str) -> dict[str, int]:
    """The bytes that the database counted of each namespace: those of its blobs."""
    sums = "SELECT namespace_id, SUM(size_bytes)::bigint FROM kvasir.blobs GROUP BY namespace_id"
    with psycopg.connect(url) as other:
        names = dict(other.execute("SELECT id, name FROM kvasir.namespaces").fetchall())
        found = dict(other.execute("SELECT namespace_id, bytes FROM kvasir.stored").fetchall())
        assert {each: size for each, size in found.items() if size} == dict(other.execute(sums).fetchall())
    return {names[each]: size for each, size in found.items()}


def test_blobs_of_one_store_fill_the_quota_at_the_other_and_their_end_frees_it(
    labs: tuple[Lab, Lab], opened: Opened
) -> None:
    a, b = opened(quota_bytes=_QUOTA, grace_period_s=60)
    put(a, 60_000, "a")
    sizes = {"quota": _QUOTA, "stored": 60_000, "reserved": 0, "asked": 60_000}
    assert refused(b, 60_000, "b").metadata == {f"{name}_bytes": str(size) for name, size in sizes.items()}
    put(b, 60_000, "b", "other")
    put(b, 40_000, "c")
    refused(a, 1_000, "d")
    a.care.collect_garbage(NS)
    labs[0].clock.pass_s(61)
    assert a.care.collect_garbage(NS).bytes_freed == 100_000
    put(b, _QUOTA, "e")


def test_a_full_quota_gives_up_versions_of_another_store(labs: tuple[Lab, Lab], opened: Opened, url: str) -> None:
    turns = [SyntheticAgent(SMALL, number).turn(300, is_prompt=True) for number in range(3)]
    size = max(sum(len(data) for data in turn.new_blobs.values()) + len(turn.manifest_bytes) for turn in turns)
    a, b = opened(quota_bytes=2 * size, evict_heads=True, grace_period_s=60)
    publish(a, "ada", turns[0], 0)
    publish(a, "bob", turns[1], 0)
    labs[0].clock.pass_s(120)
    publish(b, "eva", turns[2], 0)
    assert [each.agent_id for each in a.agents.page(NS).agents] == ["bob", "eva"]
    assert counted(url)[NS] <= 2 * size


def test_two_stores_together_exceed_a_quota_by_no_more_than_their_open_uploads(opened: Opened, url: str) -> None:
    both, size, most_at_once = opened(quota_bytes=_QUOTA), 3_000, 4
    reasons = set[str]()

    def fill(number: int) -> int:
        done = 0
        for each in range(20):
            try:
                put(both[number % 2], size, f"{number} {each}")
            except ResourceExhausted as error:
                reasons.add(error.reason)
            else:
                done += 1
        return done

    with ThreadPoolExecutor(most_at_once) as threads:
        done = sum(threads.map(fill, range(most_at_once)))
    assert _QUOTA - size < done * size == counted(url)[NS] <= _QUOTA + most_at_once * size
    assert reasons == {"QUOTA_FULL"}
    refused(both[0], size, "last")
    refused(both[1], size, "last")


def test_the_database_counts_every_change_of_blobs(labs: tuple[Lab, Lab], opened: Opened, url: str) -> None:
    both, dice = opened(grace_period_s=60), random.Random(7)
    versions = dict.fromkeys(("ada", "bob", "eva"), 0)
    agents = {name: SyntheticAgent(SMALL, number) for number, name in enumerate(versions)}
    for _ in range(12):
        store, name = dice.choice(both), dice.choice([*versions])
        versions[name] = publish(store, name, agents[name].turn(40), versions[name]).version
        put(dice.choice(both), 5_000, str(dice.random()), dice.choice((NS, "other")))
        if dice.random() < 0.5:
            labs[0].clock.pass_s(61)
            dice.choice(both).care.collect_garbage(None)
        counted(url)


def test_a_database_of_before_counts_its_blobs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, catalog=url)
    with monkeypatch.context() as before:
        before.setattr(schema, "STEPS", schema.STEPS[:4])
        with lab.open() as store:
            publish(store, "ada", SyntheticAgent(SMALL, 1).turn(300), 0)
            put(store, 5_000, "a", "other")
    with lab.open():
        assert counted(url)["other"] == 5_000


def test_bytes_that_one_store_writes_today_spend_the_budget_of_all(opened: Opened) -> None:
    a, b = opened(write_budget_bytes=1_000, write_budget_over="refuse")
    assert b.statistics.written()["today_bytes"] == 0
    put(a, 100_000, "a", "other")
    with pytest.raises(ResourceExhausted) as caught:
        upload(b, SyntheticAgent(SMALL, 1).turn(300))
    assert caught.value.reason == "WRITE_BUDGET_SPENT"
    assert b.statistics.written() == {"today_bytes": 100_000, "budget_bytes": 1_000, "is_spent": True}
    put(a, 1_000, "b", "other")
    assert b.statistics.written()["today_bytes"] == 101_000


def test_a_store_that_has_its_database_alone_shares_no_count(url: str) -> None:
    with closing(open_postgres(url, Disk(), lambda: 0)) as alone:
        assert not alone.is_shared
        assert alone.read(HOUSE, lambda view: view.counted_bytes()) == 0
