"""Bytes that are written in a day: counted durably, told, and refused beyond the budget only where that was wished."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from kvasir.errors import KvasirError, ResourceExhausted

from cachestore_svc.blobs.ballast import Ballast
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.index.catalog import CatalogChange, SqliteCatalog
from cachestore_svc.index.write_budget import WriteBudget
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, publish, upload, write
from tests.made_models.synthetic import SMALL, SyntheticAgent

DAY = 86_400.0
TURNS = [SyntheticAgent(SMALL, seed).turn(300, is_prompt=True) for seed in (1, 2, 3)]
SIZES = [sum(len(data) for data in turn.new_blobs.values()) + len(turn.manifest_bytes) for turn in TURNS]


def today(store: Store, namespace: str = NS) -> int:
    return store.statistics.of(namespace).written_today_bytes


def test_bytes_are_counted_by_day_and_namespace_and_survive_a_restart(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "ada", TURNS[0], 0)
        publish(store, "bob", TURNS[0], 0)  # its blobs are here already
        publish(store, "eva", TURNS[1], 0, namespace="other")
        assert (today(store), today(store, "other")) == (SIZES[0], SIZES[1])
        assert store.statistics.written()["today_bytes"] == SIZES[0] + SIZES[1]
    with lab.open() as store:
        assert today(store) == SIZES[0]
        publish(store, "ida", TURNS[2], 0)
        assert today(store) == SIZES[0] + SIZES[2]
        lab.clock.pass_s(DAY)
        assert today(store) == 0
        lab.clock.set_by_s = -DAY  # the same day again
        assert today(store) == SIZES[0] + SIZES[2]


class UncommittingDisk(Disk):
    """Fails each commit of the index, once it is told to."""

    fails = False

    def reached(self, point: str) -> None:
        if self.fails and point == "index: before commit":
            raise OSError(5, "it failed")


def test_bytes_of_a_write_that_was_not_committed_do_not_count(lab: Lab) -> None:
    disk = UncommittingDisk()
    with lab.open(disk) as store:
        assert store.statistics.written()["today_bytes"] == 0
        disk.fails = True
        with pytest.raises(KvasirError):
            upload(store, TURNS[0])
        disk.fails = False
        assert store.statistics.written()["today_bytes"] == 0
        publish(store, "ada", TURNS[0], 0)
        assert store.statistics.written()["today_bytes"] == today(store) == SIZES[0]


def test_a_blob_counts_once_where_its_commit_holds_the_first_look_at_the_day(tmp_path: Path) -> None:
    disk, looks = Disk(), list[Future[object]]()
    ballast = Ballast(tmp_path / "ballast", 0, disk)
    catalog = SqliteCatalog(tmp_path / "index", disk, ballast, lambda: 0)
    with closing(catalog), ThreadPoolExecutor() as threads:
        budget = WriteBudget(catalog, lambda: 0, None, refuses=False)

        def write_and_look(change: CatalogChange) -> None:
            change.make_namespace()
            budget.count(change, NS, 5)
            looks.append(threads.submit(budget.today))
            time.sleep(0.2)  # the look waits for this commit

        catalog.write(NS, write_and_look)
        looks[0].result()
        assert budget.today() == {NS: 5}


def test_what_a_turn_writes_beside_its_blobs_is_as_little_as_the_setting_says(lab: Lab) -> None:
    def beside() -> int:
        return sum((lab.root / name).stat().st_size for name in ("kvasir.sqlite3-wal", "journal"))

    agent = SyntheticAgent(SMALL, 1)
    with lab.open() as store:
        publish(store, "ada", agent.turn(300, is_prompt=True), 0, bind_shared=True)
        for turn in range(1, 6):
            before = beside()
            publish(store, "ada", agent.turn(300, is_prompt=True), turn, bind_shared=True)
            assert 0 < beside() - before < 200_000


def test_a_spent_budget_is_told_and_refuses_nothing(lab: Lab) -> None:
    with lab.open(write_budget_bytes=SIZES[0]) as store:
        assert not store.statistics.written()["is_spent"]
        publish(store, "ada", TURNS[0], 0)
        assert store.statistics.written()["is_spent"]
        publish(store, "eva", TURNS[1], 0)


def test_where_it_was_wished_tensors_are_refused_until_midnight_and_manifests_are_not(lab: Lab) -> None:
    budget = 2 * SIZES[0]
    with lab.open(write_budget_bytes=budget, write_budget_over="refuse") as store:
        upload(store, TURNS[0])
        publish(store, "ada", TURNS[0], 0)
        with pytest.raises(ResourceExhausted) as refused:
            upload(store, TURNS[1])
        assert refused.value.reason == "WRITE_BUDGET_SPENT"
        assert int(refused.value.metadata["written_bytes"]) == today(store)
        assert 0 < (refused.value.retry_after_s or 0) <= DAY
        write(store, TURNS[1].manifest_digest, TURNS[1].manifest_bytes, BlobKind.MANIFEST)
        upload(store, SyntheticAgent(SMALL, 9).turn(1, is_prompt=True), namespace="other")  # the eighth for the others
        lab.clock.pass_s(refused.value.retry_after_s or 0)
        publish(store, "eva", TURNS[1], 0)
