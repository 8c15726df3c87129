"""The store looks after itself: opening, locking, migrating, events that outlive restarts, check and repair."""

import errno
import fcntl
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from kvasir.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable

from cachestore_svc.commands import care
from cachestore_svc.commands.command_line import FOUND_PROBLEMS, OK
from cachestore_svc.facts.records import MAX_LEASE_TTL_S, AgentDeleted, AgentUpdated, BlobKind, Committed, EventCursor
from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.index.sqlite.database import migrations
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, damaged, publish, upload, write
from tests.cachestore.core.start_up import fill
from tests.made_models.synthetic import SMALL, SyntheticAgent

YESTERDAY = Path(__file__).parent / "yesterday"


def test_what_was_committed_is_there_after_a_restart(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        done = publish(store, "a", content, 0)
    with lab.open() as store:
        assert_restores(store, store.snapshots.get(NS, "a"), content)
        assert store.snapshots.get(NS, "a") == done
        assert store.statistics.of(NS).blob_bytes == done.total_bytes


def test_every_commit_of_the_index_is_synced_and_references_are_kept_by_the_database(store: Store) -> None:
    """The model of a power loss trusts SQLite's commits: this is what it trusts."""

    def pragma(name: str) -> object:
        return store._core.catalog.read(HOUSE, lambda rows: rows.one(f"PRAGMA {name}"))

    expected = {"journal_mode": ("wal",), "synchronous": (2,), "foreign_keys": (1,), "locking_mode": ("exclusive",)}
    assert {name: pragma(name) for name in expected} == expected
    if sys.platform == "darwin":
        assert (pragma("fullfsync"), pragma("checkpoint_fullfsync")) == ((1,), (1,))


def test_a_directory_has_one_store_and_the_refusal_names_its_process(lab: Lab) -> None:
    with lab.open():
        with pytest.raises(Unavailable, match=str(os.getpid())) as refused:
            lab.open()
        assert refused.value.reason == "LOCKED"
        assert refused.value.metadata == {"pid": str(os.getpid())}
    lab.open().close()


def test_a_file_system_that_locks_nothing_is_no_other_process(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some network shares: who looks for a process that holds the directory finds none."""

    def no_locks(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(Unavailable, match="ENOLCK on the data directory") as refused:
        lab.open()
    assert refused.value.reason == "DISK_FAILED"


def test_a_dead_process_holds_no_lock(lab: Lab) -> None:
    code = f"""
import pathlib, sys, time
from tests.cachestore.core.lab import Lab
store = Lab(pathlib.Path({str(lab.root)!r})).open()
print("open", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(Unavailable, match=str(holder.pid)):
            lab.open()
        holder.send_signal(signal.SIGKILL)
    lab.open().close()


def test_a_closed_store_refuses_and_closes_twice(lab: Lab) -> None:
    store = lab.open()
    store.close()
    store.close()
    with pytest.raises(Unavailable) as refused:
        store.statistics.of(NS)
    assert refused.value.reason == "CLOSED"


def test_a_newer_database_is_refused_and_left_alone(lab: Lab) -> None:
    lab.open().close()
    with sqlite3.connect(lab.root / "kvasir.sqlite3") as connection:
        connection.execute("INSERT INTO migrations VALUES (999, 0)")
    connection.close()
    with pytest.raises(FailedPrecondition, match="newer") as refused:
        lab.open()
    assert refused.value.reason == "DATA_TOO_NEW"


def test_a_step_that_fails_leaves_the_database_as_it_was(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes back the step before it: today's code opens what it left."""
    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(3), 0)

    def sound(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE tomorrow (id INTEGER)")

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE leases")
        raise RuntimeError("broken step")

    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, sound, broken))
        with pytest.raises(RuntimeError, match="broken step"):
            lab.open()
    with lab.open() as store:
        assert store.care.check().is_clean


def test_yesterdays_data_directory_opens_today(lab: Lab) -> None:
    """Made by the first form of the database; it is never made anew, so that every later step must take it along."""
    lab.root.mkdir()
    with sqlite3.connect(lab.root / "kvasir.sqlite3") as connection:
        connection.executescript((YESTERDAY / "form-1.sql").read_text())
    connection.close()
    agent = SyntheticAgent(SMALL, 1)
    first, second = agent.turn(300, is_prompt=True), agent.turn(30)
    for content in (first, second):
        for digest, data in {**content.new_blobs, content.manifest_digest: content.manifest_bytes}.items():
            path = lab.directory_of(NS) / "blobs" / digest.hash[:2] / digest.hash
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    with lab.open() as store:
        assert store.care.check().is_clean
        assert_restores(store, store.snapshots.get(NS, "a", version=1), first)
        assert_restores(store, store.snapshots.get(NS, "a", version=2), second)
        assert dict(store.agents.get(NS, "a").labels) == {"made": "yesterday"}
        lab.clock.pass_s(MAX_LEASE_TTL_S)  # somebody had a lease yesterday
        publish(store, "a", agent.turn(30), 2)


def test_a_start_sweeps_what_a_crash_left_and_nothing_else(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
    shelf = lab.blob_files[content.digests[0].hash].parent
    part = shelf / f"{shelf.name}{'0' * 62}.part"
    orphan = shelf / f"{shelf.name}{'1' * 62}"
    of_nobody = lab.root / "namespaces" / ("ab" * 16) / "blobs" / "cd" / ("cd" * 32)
    of_nobody.parent.mkdir(parents=True)
    for path in (part, orphan, of_nobody):
        path.write_bytes(b"left")
    with lab.open() as store:
        assert not any(path.exists() for path in (part, orphan, of_nobody))
        assert [len(list(path.parent.glob(f"{path.name}.aside-*"))) for path in (orphan, of_nobody)] == [1, 1]
        report = store.care.check()
        assert (report.is_clean, report.set_aside) == (True, 2)
        assert_restores(store, store.snapshots.get(NS, "a"), content)


def test_a_start_finds_a_row_without_its_file_and_reports_it(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
    lab.blob_files[content.digests[0].hash].unlink()
    with lab.open() as store:
        assert damaged(store, NS) == [content.digests[0]]
        upload(store, content)
        assert damaged(store, NS) == []


def test_a_start_with_5000_blobs_takes_a_twentieth_of_what_100000_may(lab: Lab) -> None:
    """100,000 may take two seconds, and are measured by `python -m tests.cachestore.core.start_up`. A start costs
    something with no blob, too: hence 0.2 s here."""
    fill(lab.root, 5_000)
    times = []
    for _ in range(3):
        began = time.process_time()
        with lab.open() as store:
            times.append(time.process_time() - began)
            assert (store.statistics.of(NS).blob_count, damaged(store, NS)) == (5_000, [])
    assert min(times) < 0.2


# --- events ---


def test_events_come_in_order_once_and_over_a_restart(lab: Lab) -> None:
    with lab.open() as store:
        start = store.events.after(NS, None).cursor
        agent = SyntheticAgent(SMALL, 1)
        first = publish(store, "a", agent.turn(3), 0)
        store.agents.update(NS, "a", labels={"x": "y"})
        [forked] = store.agents.fork(NS, "a", "b").lines
        half = store.events.after(NS, start, limit=2)
        assert [event.body for event in half.events] == [Committed(first), AgentUpdated("a")]
    with lab.open() as store:
        back = store.agents.roll_back(NS, "a", 1)
        store.agents.delete(NS, "a")
        rest = store.events.after(NS, half.cursor)
        assert [event.body for event in rest.events] == [Committed(forked), Committed(back), AgentDeleted("a")]
        assert not rest.is_lost
        assert store.events.after(NS, rest.cursor).events == ()


def test_a_cursor_that_is_too_old_of_the_future_or_of_another_history_has_lost_events(lab: Lab) -> None:
    with lab.open(event_history=3) as store:
        start = store.events.after(NS, None).cursor
        agent = SyntheticAgent(SMALL, 1)
        for turn in range(3):
            publish(store, "a", agent.turn(3), turn)
        assert len(store.events.after(NS, start).events) == 3
        publish(store, "a", agent.turn(3), 3)
        for cursor in (start, EventCursor(start.incarnation, 99), EventCursor("other", 3)):
            batch = store.events.after(NS, cursor)
            assert (batch.is_lost, batch.events, batch.cursor.sequence) == (True, (), 4)


def test_a_database_copied_back_is_another_incarnation(lab: Lab) -> None:
    with lab.open() as store:
        before = store.events.after(NS, None).cursor
    with lab.open() as store:
        assert store.events.after(NS, None).cursor.incarnation == before.incarnation
    database = lab.root / "kvasir.sqlite3"
    copy = lab.root / "backup"
    copy.write_bytes(database.read_bytes())
    copy.replace(database)
    with lab.open() as store:
        assert store.events.after(NS, None).cursor.incarnation != before.incarnation
        assert store.events.after(NS, before).is_lost


def test_an_absurd_limit_is_refused(store: Store) -> None:
    for limit in (0, -1, 1001):
        with pytest.raises(InvalidArgument):
            store.events.after(NS, None, limit)


# --- check and repair ---


def dangle(lab: Lab) -> None:
    with sqlite3.connect(lab.root / "kvasir.sqlite3") as connection:
        connection.execute("INSERT INTO prefixes VALUES (1, 'x', 999)")
    connection.close()


def test_check_finds_a_row_that_names_nothing(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(600)
    with lab.open() as store:
        publish(store, "a", content, 0)
    dangle(lab)
    with lab.open() as store:
        assert {finding.problem for finding in store.care.check().findings} == {"DANGLING_ROW"}
        assert_restores(store, store.snapshots.get(NS, "a"), content)


def test_check_finds_a_reference_that_is_gone_while_the_store_runs_and_repairs_it(store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(600)
    publish(store, "a", content, 0)
    store._core.catalog.write(NS, lambda rows: rows.run("DELETE FROM manifest_blobs WHERE position = 1"))
    assert {finding.problem for finding in store.care.check().findings} == {"WRONG_REFERENCES", "INDEX_DAMAGED"}
    store.care.check(repair=True)
    assert store.care.check().is_clean
    assert_restores(store, store.snapshots.get(NS, "a"), content)


def test_check_walks_files_both_ways_and_repairs_them(lab: Lab, store: Store) -> None:
    content = SyntheticAgent(SMALL, 1).turn(600)
    publish(store, "a", content, 0)
    missing, short, gone_bad = (lab.blob_files[digest.hash] for digest in content.digests)
    orphan = missing.parent / (missing.name[:2] + "0" * 62)
    strange = missing.parent / "notes.txt"
    orphan.write_bytes(b"x")
    strange.write_bytes(b"x")
    missing.unlink()
    whole = gone_bad.read_bytes()
    short.write_bytes(short.read_bytes()[:-1])
    details = [finding.detail for finding in store.care.check().findings]
    assert [each for each in details if each.startswith(missing.name) and each.endswith(" bytes, found none")]
    found = sorted((finding.problem, finding.detail[:64]) for finding in store.care.check().findings)
    assert found == sorted(
        [
            ("MISSING_FILE", missing.name),
            ("ORPHAN_FILE", orphan.name),
            ("STRANGE_FILE", "notes.txt"),
            ("WRONG_SIZE", short.name),
        ]
    )
    assert all(
        finding.is_repaired or finding.problem == "STRANGE_FILE" for finding in store.care.check(repair=True).findings
    )
    assert not orphan.exists()
    assert strange.exists()
    assert {digest.hash for digest in damaged(store, NS)} == {missing.name, short.name}
    # Only a re-hash sees bytes of the right length.
    gone_bad.write_bytes(bytes(len(whole)))
    [progress] = store.care.scrub()
    assert [digest.hash for digest in progress.damaged] == [gone_bad.name]
    # What can be read again is taken out of quarantine.
    gone_bad.write_bytes(whole)
    assert {f.detail: f.is_repaired for f in store.care.check(repair=True).findings}[gone_bad.name]
    write(store, content.digests[0], content.new_blobs[content.digests[0]], BlobKind.TENSORS)
    write(store, content.digests[1], content.new_blobs[content.digests[1]], BlobKind.TENSORS)
    strange.unlink()
    assert store.care.check().is_clean


def test_a_second_scrub_names_damage_of_the_first_until_it_is_stored_again(
    lab: Lab, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    content = SyntheticAgent(SMALL, 1).turn(600)
    publish(store, "a", content, 0)
    digest = content.digests[0]
    lab.blob_files[digest.hash].write_bytes(b"")
    for found in ({"damaged": [digest.hash], "known": []}, {"damaged": [], "known": [digest.hash]}):
        assert care.scrub(store, as_json=True) == FOUND_PROBLEMS
        shown = json.loads(capsys.readouterr().out)
        assert {name: shown[name] for name in found} == found
    assert care.scrub(store, as_json=False) == FOUND_PROBLEMS
    assert f"damaged, as was found before: {digest.hash}" in capsys.readouterr().out
    upload(store, content)
    assert care.scrub(store, as_json=True) == OK


def test_verify_of_an_agent_reads_its_blobs_and_no_others(lab: Lab, store: Store) -> None:
    content, other = SyntheticAgent(SMALL, 1).turn(600), SyntheticAgent(SMALL, 2).turn(600)
    publish(store, "a", content, 0)
    publish(store, "b", other, 0)
    for digest in (content.digests[0], other.digests[0]):
        lab.blob_files[digest.hash].write_bytes(b"")
    *_, last = store.care.verify(NS, "a")
    assert (last.blobs_checked, last.blobs_total, last.damaged) == (4, 4, (content.digests[0],))
    assert damaged(store, NS) == [content.digests[0]]
    with pytest.raises(NotFound):
        store.care.verify(NS, "c")


def test_a_check_beside_writers_finds_nothing_wrong(lab: Lab, store: Store) -> None:
    is_over = Event()

    def look() -> Iterator[object]:
        while not is_over.is_set():
            yield from store.care.check(repair=True).findings

    with ThreadPoolExecutor(1) as threads:
        findings = threads.submit(lambda: list(look()))
        try:
            for number in range(30):
                content = SyntheticAgent(SMALL, number).turn(30)
                publish(store, f"agent-{number % 7}-{number}", content, 0, f"ns-{number % 5}")
                store.care.collect_garbage()
        finally:
            is_over.set()
    assert findings.result() == []
