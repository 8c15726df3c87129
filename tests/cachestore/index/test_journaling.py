"""The journal beside a store that serves: what it is told, in which order, and how it stays short."""

import os
import shutil
import sqlite3
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import DataLoss, NotFound, Unavailable

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.core.early_commits import EarlyCommits
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.index.sqlite.journaling.recording import Recorder
from cachestore_svc.index.sqlite.operations import Operation
from cachestore_svc.index.values import CommitTerms, Done
from cachestore_svc.journal.journal_lines import Parsed
from cachestore_svc.store.snapshots import EarlyCommit
from cachestore_svc.store.store import Store
from cachestore_svc.upkeep import collecting
from tests.cachestore.core.lab import NS, Chance, Lab, publish, run_sql, upload, write, write_all
from tests.cachestore.index.lives import recovered, remove_database
from tests.made_models.synthetic import SMALL, SyntheticAgent

JOURNAL = "journal"


class Died(Exception):
    """The process ends here."""


class OrderedDisk(Disk):
    """Notes what happens to the journal, and when a commit begins."""

    def __init__(self, log: Path) -> None:
        self.effects: list[str] = []
        self._log = log

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        super().write(descriptor, data)
        self._note("write", descriptor)

    def fsync(self, descriptor: int) -> None:
        super().fsync(descriptor)
        self._note("fsync", descriptor)

    def reached(self, point: str) -> None:
        self.effects.append(point)

    def _note(self, what: str, descriptor: int) -> None:
        if self._log.exists() and os.fstat(descriptor).st_ino == self._log.stat().st_ino:
            self.effects.append(what)


def test_a_group_is_synced_before_it_is_committed_and_only_one_that_changes_agents_is_reported(lab: Lab) -> None:
    disk = OrderedDisk(lab.root / JOURNAL)
    content = SyntheticAgent(SMALL, 1).turn(30)
    with lab.open(disk) as store:
        disk.effects.clear()
        upload(store, content)
        store.leases.acquire(NS, "b", "ab" * 32, "engine")
        assert set(disk.effects) == {"index: before commit", "index: after commit"}
        disk.effects.clear()
        store.snapshots.commit(NS, "a", content.manifest_digest, 0)
        assert disk.effects == ["write", "fsync", "index: before commit", "index: after commit"]


def test_a_commit_that_awaits_a_blob_is_in_the_transaction_that_lists_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the thread is that submits both. Where the index was quicker, these were two, with a sync each."""
    disk = OrderedDisk(lab.root / JOURNAL)
    agent, listing = SyntheticAgent(SMALL, 1), EarlyCommits.listing

    def late(*given: Any) -> None:
        time.sleep(0.05)
        listing(*given)

    with lab.open(disk) as store:
        publish(store, "a", agent.turn(30), 0)
        content, answer = agent.turn(30), Future[Done]()
        [tail] = content.new_blobs
        write(store, content.manifest_digest, content.manifest_bytes, BlobKind.MANIFEST)
        early = EarlyCommit(store.snapshots.known(NS, content.manifest_digest), [tail], answer)
        store.snapshots.commit_early(NS, early, "a", content.manifest_digest, 1, CommitTerms())
        monkeypatch.setattr(EarlyCommits, "listing", late)
        disk.effects.clear()
        write_all(store, content.new_blobs)
        assert answer.result(10).snapshot.version == 2
        assert disk.effects == ["write", "fsync", "index: before commit", "index: after commit"]


def test_a_journal_stays_short_however_many_commits_there_were(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachestore_svc.journal.journal._LEAST_BYTES", 2000)
    agent = SyntheticAgent(SMALL, 1)
    with lab.open(retained_versions=2, grace_period_s=0.0) as store:
        longest = 0
        for turn in range(60):
            publish(store, "a", agent.turn(3), turn)
            longest = max(longest, (lab.root / JOURNAL).stat().st_size)
            store.care.collect_garbage()
        head = store.snapshots.get(NS, "a")
        assert longest < 8000
        assert store.care.check().is_clean
    with lab.open() as store:
        assert store.snapshots.get(NS, "a") == head
    # And every row is still held to it.
    run_sql(lab, "UPDATE versions SET parent_version = 1")
    with lab.open() as store, pytest.raises(DataLoss):
        store.snapshots.get(NS, "a")


def test_a_journal_that_is_damaged_beside_a_store_is_named_and_written_again_by_the_next_start(lab: Lab) -> None:
    """Also after a clean close, and the index, which is whole, is not called damaged: a recovery would lose more."""
    agent, path = SyntheticAgent(SMALL, 1), lab.root / JOURNAL
    with lab.open() as store:
        for turn in range(5):
            publish(store, "a", agent.turn(3), turn)
        lines = path.read_bytes().split(b"\n")
        lines[3] = lines[3][:-3] + b"???"
        path.write_bytes(b"\n".join(lines))
        assert {finding.problem for finding in store.care.check().findings} == {"DAMAGED_JOURNAL"}
        head = store.snapshots.get(NS, "a")
    with lab.open() as store:
        assert store.care.check().is_clean
        log = store._core.journal
        assert log.shorter(log.size_bytes).position == log.position
        assert store.snapshots.get(NS, "a").manifest == head.manifest


def test_a_damaged_journal_is_not_cut_at_its_damage(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery would take what is left for all that there was, and lose each version behind that, and owners."""
    monkeypatch.setattr("cachestore_svc.journal.journal._LEAST_BYTES", 100)
    agent, path = SyntheticAgent(SMALL, 1), lab.root / JOURNAL
    with lab.open(retained_versions=1) as store:
        for turn in range(9):
            publish(store, "a", agent.turn(3), turn)
        lines = path.read_bytes().split(b"\n")
        lines[4] = lines[4][:-3] + b"???"
        path.write_bytes(b"\n".join(lines))
        store.care.collect_garbage()
        head = store.snapshots.get(NS, "a")
    remove_database(lab.root)
    report = recovered(lab)
    assert (report.is_complete, report.has_whole_journal) == (False, False)
    with lab.open() as store:
        assert store.snapshots.get(NS, "a").manifest == head.manifest
        assert store.agents.get(NS, "a").ownership.waits_for_claim


class WaitingDisk(Disk):
    """Stands still before a commit, which then fails."""

    def __init__(self) -> None:
        self.is_failing = False
        self.stands, self.goes_on = threading.Event(), threading.Event()

    def reached(self, point: str) -> None:
        if self.is_failing and point == "index: before commit":
            self.stands.set()
            self.goes_on.wait(60)
            raise Died


def test_a_journal_shortened_beside_a_commit_that_fails_tells_nothing_of_it(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachestore_svc.journal.journal._LEAST_BYTES", 100)
    agent, disk = SyntheticAgent(SMALL, 1), WaitingDisk()
    with lab.open(disk, retained_versions=1) as store:
        for turn in range(9):
            publish(store, "a", agent.turn(3), turn)
        core, is_read, shorter = store._core, threading.Event(), store._core.journal.shorter
        assert core.journal.is_long

        def read(size_bytes: int) -> Parsed:
            told = shorter(size_bytes)
            is_read.set()
            return told

        monkeypatch.setattr(core.journal, "shorter", read)

        def fail() -> None:
            with pytest.raises(Died):
                store.agents.update(NS, "a", labels={"x": "y"})

        disk.is_failing = True
        with ThreadPoolExecutor(2) as threads:
            failing = threads.submit(fail)
            assert disk.stands.wait(60)
            shortening = threads.submit(collecting.shorten, core)
            is_read.wait(0.5)
            disk.goes_on.set()
            for each in (failing, shortening):
                each.result()
        disk.is_failing = False
        assert not core.journal.is_long
        shutil.copytree(lab.root, tmp_path / "left")
    with Lab(tmp_path / "left", chance=Chance(50)).open() as store:
        assert store.care.check().is_clean
        assert store.snapshots.get(NS, "a").version == 9


def test_labels_pins_forks_rollbacks_and_deletions_reach_the_journal(lab: Lab) -> None:
    agent = SyntheticAgent(SMALL, 1)

    def work(store: Store) -> None:
        for turn in range(4):
            publish(store, "a", agent.turn(30), turn)
        store.agents.update(NS, "a", labels={"x": "y", "z": "w"}, is_pinned=True, retained_versions=3)
        store.agents.update(NS, "a", labels={"x": "", "z": "v"}, is_pinned=False)
        store.agents.fork(NS, "a", "f")
        store.agents.roll_back(NS, "a", 3)
        store.agents.fork(NS, "a", "g")
        store.agents.delete(NS, "g")
        with pytest.raises(NotFound):
            store.agents.update(NS, "nobody", labels={"x": "y"})

    with lab.open(retained_versions=2) as store:
        work(store)
        assert store.care.check().is_clean
        told = store._core.journal.shorter(store._core.journal.size_bytes).state[NS].agents
    assert set(told) == {"a", "f"}
    assert told["a"].labels == {"z": "v"}
    assert told["a"].facts[:2] == (0, 3)
    assert sorted(version for _, version in told["a"].versions) == [3, 4, 5]


def test_a_journal_that_takes_nothing_more_fails_only_what_it_must_be_told(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
        index, goes_on = store._core.catalog, threading.Event()
        store._core.journal._is_broken = True
        index._submit(Operation(NS, lambda _: goes_on.wait(60), is_write=False))
        told = index._submit(Operation(NS, lambda rows: rows.run("UPDATE agents SET is_pinned = 1"), is_write=True))
        untold = index._submit(Operation(NS, lambda rows: rows.run("UPDATE lines SET used_unix_ms = 1"), is_write=True))
        goes_on.set()
        assert untold.result(60) == 1
        with pytest.raises(Unavailable):
            told.result(60)


class _Stuck:
    """A connection that cannot be rolled back."""

    in_transaction = True

    def execute(self, sql: str) -> None:
        if sql in ("COMMIT", "ROLLBACK"):
            raise sqlite3.OperationalError(sql)


def test_a_group_is_taken_back_also_where_its_transaction_cannot_be(lab: Lab) -> None:
    with lab.open() as store:
        taken: list[bool] = []
        journal = store._core.journal
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "take_back", lambda: taken.append(True))
            patch.setattr(Recorder, "record", lambda self, rows: None)
            with pytest.raises(sqlite3.OperationalError):
                store._core.catalog._commit(_Stuck(), [])  # type: ignore[arg-type]
        assert taken == [True]
