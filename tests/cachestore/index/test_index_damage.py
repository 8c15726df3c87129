"""An index that may be lost: what a start notices, what it refuses, and what it goes on with."""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir.errors import Conflict, DataLoss, FailedPrecondition, KvasirError
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import Origin
from cachestore_svc.index.refusals import reading_damage
from cachestore_svc.index.sqlite.database.looking import looking_at
from cachestore_svc.index.values import CommitTerms
from cachestore_svc.recovery.on_server import check_not_in_bucket
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Chance, Lab, assert_restores, publish, run_sql, upload, write_all
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot

DATABASE = "kvasir.sqlite3"
LOG = "kvasir.sqlite3-wal"
JOURNAL = "journal"
OTHER_NS = "other"


class Died(Exception):
    """The process ends here."""


def leave(lab: Lab, target: Path, versions: int = 3, namespace: str = NS) -> list[SyntheticSnapshot]:
    """What kill -9 leaves of a store with one agent: a copy made while it runs."""
    agent = SyntheticAgent(SMALL, 1)
    with lab.open() as store:
        contents = [agent.turn(280) for _ in range(versions)]
        for parent, content in enumerate(contents):
            publish(store, "a", content, parent, namespace)
        publish(store, "b", SyntheticAgent(SMALL, 2).turn(30), 0, OTHER_NS)
        shutil.copytree(lab.root, target)
    return contents


@pytest.fixture
def young(lab: Lab, tmp_path: Path) -> tuple[Lab, list[SyntheticSnapshot]]:
    """A store that was killed with its whole index in the log."""
    contents = leave(lab, tmp_path / "young")
    assert (tmp_path / "young" / DATABASE).stat().st_size <= 4096
    return Lab(tmp_path / "young"), contents


def refusal_of(lab: Lab) -> str:
    before = {path: path.read_bytes() for path in lab.root.rglob("*") if path.is_file() and path.name != "lock"}
    for _ in range(2):
        with pytest.raises(KvasirError, match="kvasir store recover") as refused:
            lab.open()
    after = {path: path.read_bytes() for path in lab.root.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before
    return refused.value.reason


def cut_log(lab: Lab) -> None:
    path = lab.root / LOG
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip_log(lab: Lab) -> None:
    data = bytearray((lab.root / LOG).read_bytes())
    data[len(data) // 2] ^= 4
    (lab.root / LOG).write_bytes(data)


def remove_log(lab: Lab) -> None:
    (lab.root / LOG).unlink()


def remove_database(lab: Lab) -> None:
    (lab.root / DATABASE).unlink()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (cut_log, "INDEX_BEHIND"),
        (flip_log, "INDEX_BEHIND"),
        (remove_log, "INDEX_BEHIND"),
        (remove_database, "INDEX_MISSING"),
    ],
)
def test_a_young_store_that_lost_commits_refuses_to_start_and_loses_no_file(
    young: tuple[Lab, list[SyntheticSnapshot]], harm: Callable[[Lab], None], reason: str
) -> None:
    lab, _ = young
    harm(lab)
    assert refusal_of(lab) == reason


def test_a_database_that_is_damaged_beside_a_store_is_kept_out_by_the_next_start_and_costs_no_blob(lab: Lab) -> None:
    """Also after a clean close: else the files of blobs whose rows have other names would be set aside, and removed."""
    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(300), 0)
    with lab.open() as store:
        data, files = (lab.root / DATABASE).read_bytes(), lab.blob_files
        for each in files:
            data = data.replace(each.encode(), each[::-1].encode())
        (lab.root / DATABASE).write_bytes(data)
        assert store.agents.get(NS, "a").lines  # of the memory that SQLite has of it
    with lab.open() as store, pytest.raises(DataLoss, match="kvasir store recover"):
        store.agents.get(NS, "a")
    assert lab.blob_files == files


def test_a_store_without_a_journal_that_names_much_less_than_lies_there_refuses_to_start(lab: Lab) -> None:
    with lab.open() as store:
        for seed in range(3):
            write_all(store, SyntheticAgent(SMALL, seed).turn(256 * 20).new_blobs)
    (lab.root / JOURNAL).unlink()
    with sqlite3.connect(lab.root / DATABASE) as connection:
        connection.execute("DELETE FROM facts")
        connection.execute("DELETE FROM blobs WHERE id > 20")
    connection.close()
    assert refusal_of(lab) == "INDEX_BEHIND"


def test_an_older_copy_of_the_database_is_refused(lab: Lab, tmp_path: Path) -> None:
    agent = SyntheticAgent(SMALL, 1)
    with lab.open() as store:
        publish(store, "a", agent.turn(30), 0)
    old = (lab.root / DATABASE).read_bytes()
    for parent in (1, 2):
        with lab.open() as store:
            publish(store, "a", agent.turn(30), parent)
    (lab.root / DATABASE).write_bytes(old)
    assert refusal_of(lab) == "INDEX_BEHIND"


def test_another_stores_database_is_refused(lab: Lab, tmp_path: Path) -> None:
    other = Lab(tmp_path / "theirs", chance=Chance(100))
    for each, seed in ((lab, 1), (other, 2)):
        with each.open() as store:
            publish(store, "a", SyntheticAgent(SMALL, seed).turn(300), 0)
    shutil.copy(other.root / DATABASE, lab.root / DATABASE)
    assert refusal_of(lab) == "INDEX_FOREIGN"


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "foreign", "directory"])
def test_a_journal_that_is_lost_is_written_again_from_a_sound_index(lab: Lab, tmp_path: Path, harm: str) -> None:
    contents = leave(lab, tmp_path / "left")
    other = Lab(tmp_path / "theirs", chance=Chance(100))
    with other.open() as store:
        publish(store, "x", SyntheticAgent(SMALL, 9).turn(30), 0)
    path = lab.root / JOURNAL
    data = bytearray(path.read_bytes())
    path.unlink()
    if harm == "cut":
        path.write_bytes(data[: data.rindex(b"\n", 0, len(data) - 1) + 1])
    elif harm == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif harm == "foreign":
        shutil.copy(other.root / JOURNAL, path)
    elif harm == "directory":
        path.mkdir()
    for _ in range(2):
        with lab.open() as store:
            assert_restores(store, store.snapshots.get(NS, "a"), contents[-1])
            assert store.care.check().is_clean


class DyingDisk(Disk):
    """Raises in place of a commit."""

    is_dying = False

    def reached(self, point: str) -> None:
        if self.is_dying and point == "index: before commit":
            raise Died


def test_a_group_that_was_synced_and_not_committed_takes_effect_at_the_next_start(lab: Lab, tmp_path: Path) -> None:
    agent, disk = SyntheticAgent(SMALL, 1), DyingDisk()
    first, second = agent.turn(300), agent.turn(300)
    with lab.open(disk) as store:
        publish(store, "a", first, 0)
        cursor = store.events.after(NS, None).cursor
        upload(store, second)
        before = (lab.root / JOURNAL).read_bytes()
        disk.is_dying = True
        taken = store._core.journal.take_back
        store._core.journal.take_back = lambda: shutil.copytree(lab.root, tmp_path / "left")  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(Died):
            store.snapshots.commit(NS, "a", second.manifest_digest, 1, CommitTerms(bind_shared=True))
        disk.is_dying = False
        store._core.journal.take_back = taken  # type: ignore[method-assign]
        taken()
        assert (lab.root / JOURNAL).read_bytes() == before
        assert store.snapshots.get(NS, "a").version == 1
    left = Lab(tmp_path / "left", chance=Chance(50))
    with left.open() as store:
        assert_restores(store, store.snapshots.get(NS, "a"), second)
        assert store.care.check().is_clean
        assert store.events.after(NS, cursor).is_lost
    with left.open() as store:
        assert store.snapshots.get(NS, "a").version == 2


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_commit_in_one_transaction_with_its_blobs_takes_effect_at_the_next_start(
    lab: Lab, *, is_sealed: bool, is_whole: bool
) -> None:
    """As one that awaited them: the index has neither rows nor version, the journal has the version."""
    agent = SyntheticAgent(SMALL, 1)
    first, second = agent.turn(300), agent.turn(300)
    lab = lab.seal(NS) if is_sealed else lab
    with lab.open() as store:
        publish(store, "a", first, 0)
    before = (lab.root / DATABASE).read_bytes()
    with lab.open() as store:
        publish(store, "a", second, 1)
    (lab.root / DATABASE).write_bytes(before)
    if not is_whole:
        lab.file_of(next(iter(second.new_blobs))).unlink()
        assert refusal_of(lab) == "INDEX_BEHIND"
        return
    for _ in range(2):
        with lab.open() as store:
            assert_restores(store, store.snapshots.get(NS, "a"), second)
            assert store.care.check().is_clean


def killed_before_commit(lab: Lab, store: Store, disk: DyingDisk, target: Path, act: Callable[[], object]) -> Lab:
    """The directory as it is when the process ends after the journal was told of an act, and before its commit."""
    disk.is_dying = True
    taken = store._core.journal.take_back
    store._core.journal.take_back = lambda: shutil.copytree(lab.root, target)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(Died):
        act()
    disk.is_dying = False
    store._core.journal.take_back = taken  # type: ignore[method-assign]
    taken()
    return Lab(target, lab.clock, Chance(50))


def test_a_sweep_that_takes_effect_at_the_next_start_takes_off_no_mark(lab: Lab, tmp_path: Path) -> None:
    content, disk = SyntheticAgent(SMALL, 1).turn(300), DyingDisk()
    with lab.open(disk, grace_period_s=0.0) as store:
        publish(store, "a", content, 0, origin=Origin.IMPORT)
        store.agents.delete(NS, "a")
        store._core.catalog.write(NS, lambda change: change.mark_unheld(0))
        left = killed_before_commit(lab, store, disk, tmp_path / "left", store.care.collect_garbage)
    for _ in range(2):
        with left.open() as store:
            unmarked = store._core.catalog.read(
                NS, lambda rows: rows.all("SELECT hash FROM blobs WHERE NOT is_brought")
            )
            assert unmarked == []
            assert store.care.check().is_clean


@pytest.mark.parametrize("act", ["roll back", "delete"])
def test_what_takes_back_a_memory_at_the_next_start_shuts_out_its_late_writer(
    lab: Lab, tmp_path: Path, act: str
) -> None:
    agent, disk, kv_hash = SyntheticAgent(SMALL, 1), DyingDisk(), kv_identity_hash(SMALL)
    acts: dict[str, Callable[[Store], object]] = {
        "roll back": lambda store: store.agents.roll_back(NS, "a", 1),
        "delete": lambda store: store.agents.delete(NS, "a"),
    }
    with lab.open(disk) as store:
        for parent in range(2):
            publish(store, "a", agent.turn(30), parent)
        late = store.leases.acquire(NS, "a", kv_hash, "engine").token
        other = store.leases.acquire(NS, "b", kv_hash, "engine").token
        lab.clock.pass_s(3600)
        left = killed_before_commit(lab, store, disk, tmp_path / "left", lambda: acts[act](store))
    with left.open() as store:
        with pytest.raises(Conflict) as fenced:
            store.leases.renew(NS, "a", kv_hash, late)
        assert fenced.value.reason == "LEASE_FENCED"
        store.leases.renew(NS, "b", kv_hash, other)
        assert store.leases.acquire(NS, "a", kv_hash, "another").token.generation > late.generation + 1


@pytest.mark.long(3)
@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE agents SET name = 'c' WHERE name = 'a'", "'a' is missing, with versions 1, 2, 3"),
        ("UPDATE versions SET version = 9 WHERE version = 3", "versions 3 are missing"),
        ("DELETE FROM versions WHERE version = 2", "versions 2 are missing"),
        ("DELETE FROM agents WHERE name = 'a'", "'a' is missing"),
        (
            "UPDATE versions SET manifest_id = (SELECT manifest_id FROM versions WHERE version = 1) WHERE version = 3",
            "versions 3 are not those that were committed",
        ),
        ("UPDATE labels SET value = 'z'", "its labels are others"),
        ("UPDATE agents SET is_pinned = 1 WHERE name = 'a'", "its pin"),
        ("UPDATE blobs SET hash = substr(hash, 2) || '0' WHERE kind = 'block'", "not those that were committed"),
        ("UPDATE blobs SET size_bytes = 'many' WHERE kind = 'manifest'", "not those that were committed"),
        ("UPDATE manifests SET token_count = 7", "not those that were committed"),
        ("UPDATE blobs SET namespace_id = 77 WHERE kind = 'block'", "not those that were committed"),
        ("UPDATE blobs SET kind = 'tail' WHERE kind = 'block'", "not those that were committed"),
        ("UPDATE blobs SET kind = 'tail' WHERE kind = 'manifest'", "not those that were committed"),
        ("UPDATE agents SET name = CAST(x'ff41' AS TEXT) WHERE name = 'a'", "'a' is missing"),
        ("UPDATE versions SET origin = 77", "not those that were committed"),
    ],
)
@pytest.mark.parametrize("is_killed", [False, True])
def test_changed_rows_of_one_namespace_keep_only_that_one_out(
    lab: Lab, tmp_path: Path, statement: str, words: str, is_killed: bool
) -> None:
    leave(lab, tmp_path / "left")
    with lab.open() as store:
        store.agents.update(NS, "a", labels={"x": "y"})
        if is_killed:
            shutil.copytree(lab.root, tmp_path / "killed")
    if is_killed:
        lab = Lab(tmp_path / "killed")
    condition = " AND " if "WHERE" in statement else " WHERE "
    if "UPDATE blobs" in statement or "UPDATE versions SET origin" in statement or "manifests" in statement:
        run_sql(lab, f"{statement}{condition}rowid <= 3" if "blobs" in statement else statement)
    else:
        run_sql(lab, statement)
    files = set(lab.blob_files)
    lab.open().close()
    # A clean end makes nothing whole.
    with lab.open(grace_period_s=0.0) as store:
        for ask in (
            lambda: store.snapshots.get(NS, "a"),
            lambda: store.agents.page(NS),
            lambda: store.statistics.of(NS),
        ):
            with pytest.raises(DataLoss, match="kvasir store recover") as lost:
                ask()
            assert lost.value.reason == "INDEX_DAMAGED"
            assert words in lost.value.message
        with pytest.raises(DataLoss):
            publish(store, "new", SyntheticAgent(SMALL, 5).turn(30), 0)
        for _ in range(2):
            store.care.collect_garbage()
        assert set(lab.blob_files) == files
        assert "INDEX_DAMAGED" in {finding.problem for finding in store.care.check(repair=True).findings}
        if "origin" not in statement and "token_count" not in statement:
            assert store.snapshots.get(OTHER_NS, "b").version == 1
            publish(store, "c", SyntheticAgent(SMALL, 6).turn(30), 0, OTHER_NS)


@pytest.mark.parametrize("place", [0, 1])
def test_a_flipped_name_of_one_agent_keeps_at_most_its_namespace_out(lab: Lab, place: int) -> None:
    """The name lies in the table and in SQLite's index of it: where they differ, the journal knows who is right."""
    name = "an-agent-with-a-rare-name"
    with lab.open() as store:
        publish(store, name, SyntheticAgent(SMALL, 1).turn(30), 0)
        publish(store, "b", SyntheticAgent(SMALL, 2).turn(30), 0, OTHER_NS)
        store._core.catalog.write(NS, lambda rows: rows.run("DELETE FROM events"))
    # Without pages that hold what is deleted, which no one reads.
    run_sql(lab, "VACUUM")
    data = bytearray((lab.root / DATABASE).read_bytes())
    places = [at for at in range(len(data)) if data.startswith(name.encode(), at)]
    assert len(places) == 2
    data[places[place]] ^= 2
    (lab.root / DATABASE).write_bytes(data)
    kept_out = []
    for _ in range(2):
        with lab.open() as store:
            assert store.snapshots.get(OTHER_NS, "b").version == 1
            try:
                assert store.snapshots.get(NS, name).version == 1
                assert store.care.check().is_clean
            except DataLoss as lost:
                assert name in lost.message  # noqa: PT017
                kept_out.append(lost)
    assert len(kept_out) in (0, 2)


def test_names_of_namespaces_are_read_though_their_look_up_is_damaged(lab: Lab, tmp_path: Path) -> None:
    """A recovery reads the tables alone: what an old index still knows is not lost with a page of a look-up."""
    leave(lab, tmp_path / "old")
    with Lab(tmp_path / "old").open():
        pass
    database = tmp_path / "old" / DATABASE
    with contextlib.closing(sqlite3.connect(database)) as connection:
        [(page,)] = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_namespaces_1'"
        )
        [(size,)] = connection.execute("PRAGMA page_size")
    with database.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    with looking_at(database, Disk()) as view:
        assert set(view.namespaces_anyway()) == {NS, OTHER_NS}


def test_what_is_set_aside_rests_and_then_goes(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
        path = lab.blob_files[content.digests[0].hash]
    orphan = path.with_name(path.name[:2] + "0" * 62)
    shutil.copy(path, orphan)
    with lab.open(grace_period_s=60.0) as store:
        [aside] = orphan.parent.glob(f"{orphan.name}.aside-*")
        assert store.care.check().set_aside == 1
        store.care.collect_garbage()
        assert aside.read_bytes() == path.read_bytes()
    lab.clock.pass_s(30)
    with lab.open(grace_period_s=60.0) as store:
        store.care.collect_garbage()
        assert aside.exists()
        lab.clock.pass_s(31)
        assert store.care.collect_garbage().bytes_freed == path.stat().st_size
        assert not aside.exists()
        assert store.care.check().set_aside == 0


def test_what_is_set_aside_and_cannot_be_removed_ends_no_collection(lab: Lab) -> None:
    content = SyntheticAgent(SMALL, 1).turn(300)
    with lab.open() as store:
        publish(store, "a", content, 0)
        path = lab.blob_files[content.digests[0].hash]
    strange = path.with_name(path.name[:2] + "0" * 62)
    strange.mkdir()
    with lab.open(grace_period_s=0.0) as store:
        assert store.care.collect_garbage().bytes_freed == 0
        assert store.care.check().set_aside == 1


def test_a_start_of_an_earlier_store_begins_a_journal(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "a", SyntheticAgent(SMALL, 1).turn(30), 0)
    (lab.root / JOURNAL).unlink()
    run_sql(lab, "DELETE FROM facts WHERE name = 'journal'")
    with lab.open() as store:
        assert store.care.check().is_clean
        publish(store, "b", SyntheticAgent(SMALL, 2).turn(30), 0)
    (lab.root / DATABASE).unlink()
    with pytest.raises(FailedPrecondition):
        lab.open()


@pytest.mark.parametrize(
    ("catalog", "step"),
    [
        ("", "stop the store and run: kvasir store recover"),
        ("postgresql://kvasir@db/kvasir", "bring its database back by the server's own tools"),
        ("s3://bucket/prefix", "bring back the objects of s3://bucket/prefix/index"),
    ],
)
def test_damage_names_a_step_that_an_index_of_its_kind_has(catalog: str, step: str) -> None:
    with pytest.raises(DataLoss, match=step) as lost, reading_damage(catalog):
        raise ValueError("no number")
    assert ("kvasir store recover" in lost.value.message) is (catalog == "")


@pytest.mark.parametrize(("command", "step"), [("recover", "a start brings back"), ("copy-index", "copy the bucket")])
def test_a_command_about_a_file_names_another_way_for_an_index_in_a_bucket(command: str, step: str) -> None:
    check_not_in_bucket("postgresql://kvasir@db/kvasir", command)
    with pytest.raises(FailedPrecondition, match=step) as refused:
        check_not_in_bucket("s3://bucket/prefix", command)
    assert refused.value.reason == "INDEX_FOREIGN"
