"""Two processes over one catalog and one bucket: of each other's publications and removals they know by rows alone.

They are two cores here, each with its own directory, locks and copies, over one catalog, which puts the operations of
all of them in one order."""

import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
from kvasir.errors import DataLoss, KvasirError, NotFound, Unavailable
from kvasir.formats.digest import Digest
from obstore.store import MemoryStore

from cachestore_svc.blobs.blob_writer import Writers
from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket
from cachestore_svc.blobs.bucket.bucket_blobs import BlobsOfNamespace
from cachestore_svc.blobs.bucket.disk_tier import DiskTier
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.space import Space
from cachestore_svc.core import stored_blobs
from cachestore_svc.core.core import Core
from cachestore_svc.facts.records import SnapshotVersion
from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.recovery import asides
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.recovery.opening import INODE, Opened
from cachestore_svc.sealing.sealed_blobs import SealedBackend
from cachestore_svc.store.blobs import _Register
from cachestore_svc.store.store import Store
from tests.cachestore.bucket.test_over_s3 import _PROGRAM, credentials, faults  # noqa: F401
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish, upload
from tests.made_models.synthetic import SyntheticAgent, SyntheticSnapshot
from tests.running.postgres import PostgresServer, postgres  # noqa: F401

WHERE = "s3://bucket/agents"
UNKNOWN = "0" * 32  # the place of a namespace that no row has


class Died(Exception):
    """The process ends here."""


@dataclass
class Moments:
    """Where a request to the bucket is held: for a while, by chance, or until a test lets it go."""

    chance: random.Random | None = None
    before: dict[str, Callable[[], None]] = field(default_factory=dict)  # by method, once
    after: dict[str, Callable[[], None]] = field(default_factory=dict)

    @contextmanager
    def of(self, method: str, name: str) -> Iterator[None]:
        if "/" not in name or name.startswith("probe/"):  # not of a blob
            yield
            return
        self._pass(self.before.pop(method, None), 40 if method == "remove" else 4)
        yield
        self._pass(self.after.pop(method, None), 4)

    def _pass(self, hook: Callable[[], None] | None, most_ms: int) -> None:
        if hook is not None:
            hook()
        if self.chance is not None:
            time.sleep(self.chance.random() ** 4 * most_ms / 1000)


class HeldBucket(Bucket):
    moments: Moments

    def put_new(self, name: str, data: bytes | memoryview) -> bool:
        with self.moments.of("put_new", name):
            return super().put_new(name, data)

    def get(self, name: str, most_bytes: int) -> memoryview:
        with self.moments.of("get", name):
            return super().get(name, most_bytes)

    def names(self, folder: str, *, only_some: bool = False) -> list[str]:
        with self.moments.of("names", f"{folder}/"):
            return super().names(folder, only_some=only_some)

    def remove(self, name: str) -> None:
        with self.moments.of("remove", name):
            super().remove(name)

    def rename(self, name: str, new: str) -> None:
        with self.moments.of("remove", name):
            super().rename(name, new)


@dataclass
class Pair:
    first: Store
    second: Store
    moments: Moments
    root: Path
    starts: Iterator[int] = field(default_factory=count)

    def start_another(self) -> Core:
        """A process of its own that starts, and sets aside what no row has."""
        core = self.first._core
        bucket = core.blobs.sealed.bucket  # type: ignore[attr-defined]
        started = _second(core, bucket, self.root / f"start {next(self.starts)}")._core
        asides.sweep_at_start(started)
        return started

    @property
    def both(self) -> tuple[Store, Store]:
        return self.first, self.second


def _second(core: Core, bucket: Bucket, root: Path) -> Store:
    root.mkdir()
    config = replace(core.config, data_dir=root)
    looks = blobs_of(replace(config, blobs=WHERE, catalog=""), Disk(), bucket, only_looks=True)
    looks.owner, looks._tier = core.blobs.sealed.owner, DiskTier(root / "tier", 1 << 30)  # type: ignore[attr-defined]
    blobs = SealedBackend(looks, core.seals, secrets.token_bytes)
    space = Space(config, core.disk, core.ballast, core.catalog.read(HOUSE, lambda view: view.stored_bytes()))
    own = {"config": config, "blobs": blobs, "space": space, "asides": set()}
    writers = Writers(blobs, space, core.now_unix_ms)
    opened = Opened(replace(core, **own, writers=writers), core.blobs, os.open(root, os.O_RDONLY))  # type: ignore[arg-type]
    return Store(opened)


@contextmanager
def _pair(lab: Lab, bucket: HeldBucket) -> Iterator[Pair]:
    bucket.moments = Moments()
    lab.kept_blobs = blobs_of(replace(lab.config(), blobs=WHERE, catalog=""), Disk(), bucket)
    with lab.open(grace_period_s=0, accept_older=True) as store:
        second = _second(store._core, bucket, lab.root.with_name("second"))
        yield Pair(store, second, bucket.moments, lab.root.parent)


@pytest.fixture(params=["memory", "memory, sealed", pytest.param("servers", marks=pytest.mark.fleet)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Over SQLite and objects in memory; over PostgreSQL and versitygw."""
    if request.param != "servers":
        lab = Lab(tmp_path / "first")
        if request.param.endswith("sealed"):
            lab.seal(NS)
        with _pair(lab, HeldBucket(MemoryStore(), WHERE)) as made:
            yield made
        return
    if not Path(_PROGRAM).exists():
        pytest.skip("no versitygw here: see the head of test_over_s3.py")
    server: PostgresServer = request.getfixturevalue("postgres")
    bucket = open_bucket(WHERE, request.getfixturevalue("credentials"))
    held = HeldBucket(bucket._store, WHERE)
    with _pair(Lab(tmp_path / "first", catalog=server.url(server.new_database())), held) as made:
        yield made


def _forget(store: Store, agent: str) -> None:
    with suppress(NotFound):
        store.agents.delete(NS, agent, force=True)


def _sweep(store: Store) -> None:
    """What is unheld is marked by one pass, and goes by the next."""
    for _ in range(2):
        store.care.collect_garbage(NS)


def test_a_blob_that_is_published_while_another_process_removes_it_stays(pair: Pair) -> None:
    turn = SyntheticAgent(seed=1).turn(70)
    publish(pair.first, "ada", turn, 0)
    _forget(pair.first, "ada")
    made = []
    pair.moments.before["remove"] = lambda: made.append(publish(pair.second, "bob", turn, 0))
    _sweep(pair.first)
    assert_restores(pair.first, made[0], turn)
    for store in pair.both:
        _sweep(store)
    shown = pair.second.snapshots.get(NS, "bob")
    assert_restores(pair.second, shown, turn)
    assert_restores(pair.first, shown, turn)


def test_an_object_that_a_start_sets_aside_before_its_row_comes_is_written_again(pair: Pair) -> None:
    turn = SyntheticAgent(seed=2).turn(70)
    started = list[Core]()
    pair.moments.after["put_new"] = lambda: started.append(pair.start_another())
    made = publish(pair.first, "ada", turn, 0)
    assert started[0].asides
    for store in pair.both:
        _sweep(store)
        assert_restores(store, made, turn)
    assert pair.first.care.check(repair=False).is_clean


def test_a_process_keeps_no_copy_of_a_blob_that_another_one_removed(pair: Pair) -> None:
    kept, gone = SyntheticAgent(seed=1).turn(70), SyntheticAgent(seed=2).turn(70)
    for agent, turn in (("kept", kept), ("gone", gone)):
        assert_restores(pair.second, publish(pair.first, agent, turn, 0), turn)
    copies = pair.second._core.blobs.sealed._tier.names  # type: ignore[attr-defined]
    [before] = copies().values()
    _forget(pair.first, "gone")
    _sweep(pair.first)
    pair.second.care.collect_own()
    [after] = copies().values()
    assert len(before) - len(after) == 1 + len(gone.digests)
    assert_restores(pair.second, pair.first.snapshots.get(NS, "kept"), kept)


def test_a_writer_that_fails_removes_nothing_that_another_process_listed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = SyntheticAgent(seed=3).turn(70)
    made = []

    def fail() -> None:
        made.append(publish(pair.second, "bob", turn, 0))
        raise OSError("the bucket went away")

    pair.moments.after["put_new"] = fail
    with pytest.raises(KvasirError):
        upload(pair.first, turn)
    for store in pair.both:
        assert_restores(store, made[0], turn)


def test_a_blob_that_is_replaced_while_a_reader_finds_it_damaged_is_read(pair: Pair) -> None:
    """Its new bytes and its row come after the reader saw the wrong bytes, and before the reader notes them."""
    turn = SyntheticAgent(seed=4).turn(70)
    made = publish(pair.second, "ada", turn, 0)
    digest = turn.digests[0]
    first, second = (store._core for store in pair.both)
    name = f"{second.blobs.of(NS).place}/{second.seals.names_of(NS).digest(digest).hash}"
    second.blobs.sealed.bucket.put(name, b"wrong")  # type: ignore[attr-defined]

    def replace_it() -> None:
        stored_blobs.quarantine(second, NS, [digest])
        upload(pair.second, turn)

    pair.moments.after["get"] = lambda: pair.moments.after.update(get=replace_it)  # the reader looks twice
    assert Digest.of(pair.first.blobs.read(NS, digest)) == digest
    assert first.catalog.read(NS, lambda view: view.damaged_blobs()) == []
    assert_restores(pair.first, made, turn)


def _lab_with(bucket: Bucket, root: Path) -> Lab:
    lab = Lab(root)
    lab.kept_blobs = blobs_of(replace(lab.config(), blobs=WHERE, catalog="", blob_tier_bytes=0), Disk(), bucket)
    return lab


def test_all_editions_of_a_namespace_that_no_row_knows_are_set_aside(tmp_path: Path) -> None:
    """By a start, and by a check that repairs. An index of an earlier time may not know the namespace."""
    bucket = Bucket(MemoryStore(), WHERE)
    lab, place, first, second = _lab_with(bucket, tmp_path), "a" * 32, "b" * 64, "c" * 64

    def leave() -> None:
        for name in (first, f"again/{first}/1", f"again/{second}/2"):
            bucket.put(f"{place}/{name}", b"left")

    def lie_there() -> set[str]:
        return {name.partition(".aside-")[0] for name in bucket.names(place)}

    with lab.open():
        leave()
    with lab.open() as store:
        assert lie_there() == {first, second}
        assert len(store._core.asides) == 3  # both editions: one may be damaged
        leave()
        lab.clock.pass_s(1)
        store.care.check(repair=True)
        assert lie_there() == {first, second}
        assert store.care.check(repair=False).is_clean


def test_objects_that_a_start_condemned_before_it_was_cut_are_set_aside_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row has it, perhaps because the index is of an earlier time: it is not removed before it has rested."""
    bucket, data = Bucket(MemoryStore(), WHERE), b"left"
    lab, hash_ = _lab_with(bucket, tmp_path), Digest.of(data).hash
    with lab.open() as store:
        publish(store, "ada", SyntheticAgent(seed=1).turn(70), 0)
        place = store._core.blobs.of(NS).place
    bucket.put(f"{place}/{hash_}", data)

    def fail(name: str, new: str) -> None:
        raise OSError(f"{name} {new}")

    monkeypatch.setattr(bucket, "rename", fail)
    with suppress(KvasirError):
        lab.open().close()
    monkeypatch.undo()
    with lab.open() as store:
        for passed_s, is_there in ((0, True), (3601, False)):
            lab.clock.pass_s(passed_s)
            store.care.collect_garbage(NS)
            store.care.collect_garbage()
            assert any(name.startswith(f"{hash_}.aside-") for name in bucket.names(place)) == is_there


def test_a_reader_of_a_damaged_edition_takes_another_and_fails_if_the_bucket_is_away(tmp_path: Path) -> None:
    bucket, data = HeldBucket(MemoryStore(), WHERE), b"the bytes"
    bucket.moments, digest = Moments(), Digest.of(data)
    blobs = _lab_with(bucket, tmp_path).blobs.of(NS)
    bucket.put(f"{blobs.place}/{digest.hash}", b"wrong")
    for edition in (1, 2):
        bucket.put(f"{blobs.place}/again/{digest.hash}/{edition}", data)

    def go_away() -> None:
        raise OSError("the bucket went away")

    def then(do: Callable[[], None]) -> None:
        """Before the second object is asked for."""
        bucket.moments.after["get"] = lambda: bucket.moments.before.update(get=do)

    then(go_away)
    with pytest.raises(Unavailable):
        blobs.read(digest)
    then(lambda: bucket.remove(f"{blobs.place}/again/{digest.hash}/2"))
    assert blobs.read(digest) == data


def test_a_start_that_listed_a_blob_before_it_came_back_leaves_its_new_object(pair: Pair) -> None:
    """Its list has the object of before, whose removal is still on its way; the row has the next edition since."""
    turn, core = SyntheticAgent(seed=1).turn(70), pair.first._core
    publish(pair.first, "ada", turn, 0)
    blobs, bucket = core.blobs.of(NS), core.blobs.sealed.bucket  # type: ignore[attr-defined]
    listed = blobs.list().editions
    names = [f"{blobs.place}/{name}" for name in bucket.names(blobs.place)]
    lay_there = {name: bytes(bucket.get(name, 1 << 20)) for name in names}
    _forget(pair.first, "ada")
    _sweep(pair.first)
    publish(pair.second, "ada", turn, 0)
    for name, data in lay_there.items():
        bucket.put(name, data)
    stored_blobs.set_unlisted_aside(core, NS, listed, core.now_unix_ms())
    pair.start_another()
    for name in names:
        bucket.remove(name)
    assert blobs.list().editions == {hash_: {1} for hash_ in listed}
    assert_restores(pair.second, pair.second.snapshots.get(NS, "ada"), turn)


def test_a_start_that_stood_still_believes_its_list_no_more(pair: Pair) -> None:
    """Its names rested, and were used again since. A publication that fails would remove a blob's only object."""
    turn, core = SyntheticAgent(seed=1).turn(70), pair.first._core
    for _ in range(2):
        publish(pair.first, "ada", turn, 0)
        listed, listed_unix_ms = core.blobs.of(NS).list().editions, core.now_unix_ms()
        _forget(pair.first, "ada")
        _sweep(pair.first)
    assert set(map(frozenset, listed.values())) == {frozenset({1})}
    core.catalog.write(NS, lambda change: change.free_names(1 << 60))
    made = publish(pair.second, "ada", turn, 0)
    rest_ms = stored_blobs.name_rest_ms(core)
    assert stored_blobs.set_unlisted_aside(core, NS, listed, listed_unix_ms - rest_ms) == []
    _Register(core).withdraw(NS, turn.digests, {digest.hash: 0 for digest in turn.digests})
    assert_restores(pair.first, made, turn)


def test_an_object_of_an_earlier_edition_than_its_row_is_left_where_it_lies(pair: Pair) -> None:
    """So it is behind an index of an earlier time, whose names were used again since."""
    turn, core = SyntheticAgent(seed=1).turn(70), pair.first._core
    for _ in range(2):
        publish(pair.first, "ada", turn, 0)
        _forget(pair.first, "ada")
        _sweep(pair.first)
    publish(pair.first, "ada", turn, 0)
    blobs, bucket = core.blobs.of(NS), core.blobs.sealed.bucket  # type: ignore[attr-defined]
    for name in list(bucket.names(blobs.place)):
        _, hash_, edition = name.split("/")
        assert edition == "2"
        bucket.rename(f"{blobs.place}/{name}", f"{blobs.place}/{hash_}")
    core.catalog.write(NS, lambda change: change.free_names(1 << 60))
    for _ in range(2):
        pair.start_another()
    assert set(map(frozenset, blobs.list().editions.values())) == {frozenset({0})}
    assert_restores(pair.second, pair.second.snapshots.get(NS, "ada"), turn)


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["accepted", "elsewhere"])
def test_removals_that_an_index_of_an_earlier_time_waits_for_take_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    """Their names were used again since: by a blob's only object, and by one of a memory that this index lacks."""
    bucket, turns = Bucket(MemoryStore(), WHERE), [SyntheticAgent(seed=seed).turn(70) for seed in range(2)]
    lab = _lab_with(bucket, tmp_path)

    def fail(name: str) -> None:
        raise OSError(name)

    with lab.open(grace_period_s=0) as store:
        for turn in turns:
            publish(store, "ada", turn, 0)
            _forget(store, "ada")
        with monkeypatch.context() as failing:
            failing.setattr(bucket, "remove", fail)
            _sweep(store)
        publish(store, "ada", turns[0], 0)
        place = store._core.blobs.of(NS).place
        if is_elsewhere:  # as after a standby was promoted
            store._core.catalog.write(HOUSE, lambda change: change.set_fact(INODE, "there"))
    names = bucket.names(place)
    later = {name for name in names if "/" in name}
    assert {name.split("/")[2] for name in later} == {"1"}
    for name in later:
        bucket.rename(f"{place}/{name}", f"{place}/{name.split('/')[1]}")
    with lab.open(grace_period_s=0, accept_older=not is_elsewhere) as store:
        assert_restores(store, store.snapshots.get(NS, "ada"), turns[0])
        _sweep(store)
        assert set(bucket.names(place)) == set(names) - later
        lab.clock.pass_s(1000)
        _sweep(store)
    with lab.open(grace_period_s=0) as store:
        assert_restores(store, store.snapshots.get(NS, "ada"), turns[0])
        assert len(store._core.asides) == len(turns[1].digests) + 1


@pytest.mark.parametrize("later", [(), (1, 2)])
@pytest.mark.parametrize("moment", ["names", "remove"])
def test_a_start_takes_no_blob_of_a_namespace_that_another_process_begins_meanwhile(
    pair: Pair, moment: str, later: tuple[int, ...]
) -> None:
    """Its index is of an earlier time than objects that lie there, of which an engine sends one again."""
    turn, core, made = SyntheticAgent(seed=1).turn(70), pair.first._core, list[SnapshotVersion]()
    place, hash_ = core.blobs.of(NS).place, core.seals.names_of(NS).digest(turn.digests[0]).hash
    for name in (hash_, *(f"again/{hash_}/{edition}" for edition in later)):
        core.blobs.sealed.bucket.put(f"{place}/{name}", b"left")  # type: ignore[attr-defined]
    pair.moments.before[moment] = lambda: made.append(publish(pair.second, "ada", turn, 0))
    started = pair.start_another()
    assert_restores(pair.first, made[0], turn)
    assert len(started.asides) == (len(later) if moment == "remove" else 0)
    assert pair.first.care.check(repair=False).is_clean


@pytest.mark.parametrize("is_read", [False, True])
def test_a_blob_that_a_start_set_aside_before_it_was_killed_goes_back_at_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, is_read: bool
) -> None:
    """Between the look at the namespaces that found its own begun, and the object's way back. A reader that comes
    before the next start finds none, and the blob is in quarantine."""
    turn, core, made = SyntheticAgent(seed=1).turn(70), pair.first._core, list[SnapshotVersion]()
    blobs = core.blobs.of(NS)
    name = f"{blobs.place}/{core.seals.names_of(NS).digest(turn.digests[0]).hash}"
    core.blobs.sealed.bucket.put(name, b"left")  # type: ignore[attr-defined]
    pair.moments.before["remove"] = lambda: made.append(publish(pair.second, "ada", turn, 0))

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as dying:
        dying.setattr(BlobsOfNamespace, "restore", die)
        with pytest.raises(Died):
            pair.start_another()
    assert blobs.size_bytes(turn.digests[0].hash) is None
    if is_read:
        with pytest.raises(DataLoss):
            pair.first.blobs.read(NS, turn.digests[0])
    started = pair.start_another()
    assert not started.asides
    assert core.catalog.read(NS, lambda view: view.damaged_blobs()) == []
    assert_restores(pair.first, made[0], turn)
    assert pair.first.care.check(repair=False).is_clean


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_start_goes_on_where_another_process_took_a_blob_that_it_brings_back(pair: Pair, *, is_gone: bool) -> None:
    """Another start was first, or a collection: the object had lain aside for as long as it may."""
    turn, core = SyntheticAgent(seed=1).turn(70), pair.first._core
    made, blobs, digest = publish(pair.first, "ada", turn, 0), core.blobs.of(NS), turn.digests[0]
    blobs.set_aside(digest.hash, core.now_unix_ms())
    [aside] = blobs.list().asides
    others = [lambda: core.blobs.remove_aside(aside)] if is_gone else [pair.start_another]
    pair.moments.before["remove"] = lambda: others.pop()()
    started = pair.start_another()
    assert not others
    assert not started.asides
    assert core.catalog.read(NS, lambda view: view.damaged_blobs()) == ([digest] if is_gone else [])
    if not is_gone:
        assert_restores(pair.first, made, turn)


def test_a_start_goes_on_where_another_brought_back_what_it_set_aside(pair: Pair) -> None:
    turn, core, made = SyntheticAgent(seed=1).turn(70), pair.first._core, list[SnapshotVersion]()
    blobs, before = core.blobs.of(NS), pair.moments.before
    name = f"{blobs.place}/{core.seals.names_of(NS).digest(turn.digests[0]).hash}"
    core.blobs.sealed.bucket.put(name, b"left")  # type: ignore[attr-defined]

    def begin() -> None:
        made.append(publish(pair.second, "ada", turn, 0))
        # The old name's removal is the next one, and then the object goes back.
        before["remove"] = lambda: before.update(remove=lambda: others.append(pair.start_another()))

    others, before["remove"] = list[Core](), begin
    started = pair.start_another()
    assert len(others) == 1
    assert not started.asides
    assert_restores(pair.first, made[0], turn)


def test_two_starts_set_aside_what_lies_at_a_place_that_nobody_knows(pair: Pair) -> None:
    bucket, others = pair.first._core.blobs.sealed.bucket, list[Core]()  # type: ignore[attr-defined]
    names = [f"{number:064x}" for number in range(70)]
    for name in names:
        bucket.put(f"{UNKNOWN}/{name}", b"left")
    pair.moments.before["remove"] = lambda: others.append(pair.start_another())
    pair.start_another()
    assert {each.hash for each in others[0].asides} == set(names)
    assert {name.partition(".aside-")[0] for name in bucket.names(UNKNOWN)} == set(names)
    assert all(".aside-" in name for name in bucket.names(UNKNOWN))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_check_reports_each_object_that_no_row_has_whether_it_could_set_it_aside(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """Behind an old list it sets nothing aside: the names may be used again."""
    turn, care = SyntheticAgent(seed=1).turn(70), pair.first.care
    publish(pair.first, "ada", turn, 0)
    bucket = pair.first._core.blobs.sealed.bucket  # type: ignore[attr-defined]
    place, names = pair.first._core.blobs.of(NS).place, {f"{number:064x}" for number in range(3)}
    for name in names:
        bucket.put(f"{place}/{name}", b"left")
    if is_late:
        monkeypatch.setattr(stored_blobs, "name_rest_ms", lambda _: 0)
    found = care.check(repair=True).findings
    assert [(each.problem, each.is_repaired) for each in found] == [("ORPHAN_FILE", not is_late)] * 3
    assert (set(bucket.names(place)) >= names) == is_late
    assert care.check(repair=False).is_clean != is_late


def test_a_publication_that_failed_under_another_name_leaves_the_row_its_object(pair: Pair) -> None:
    turn, core = SyntheticAgent(seed=1).turn(70), pair.first._core
    publish(pair.first, "ada", turn, 0)
    digest = turn.manifest_digest
    _Register(pair.second._core).withdraw(NS, [digest], {digest.hash: 1})
    assert core.catalog.read(NS, lambda view: view.free_editions([digest.hash])) == {digest.hash: 0}


@dataclass
class Lives:
    """Agents that share their blobs are published, forgotten and swept by two processes at once."""

    pair: Pair
    chance: random.Random
    turns: list[SyntheticSnapshot] = field(default_factory=list)
    commits: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.turns = [SyntheticAgent(seed=seed).turn(70) for seed in range(3)]

    def live(self, number: int, seed: int) -> None:
        chance = random.Random(seed)
        store = self.pair.both[number % 2]
        for _ in range(8):
            which = chance.randrange(len(self.turns))
            agent = f"agent {which} {chance.randrange(2)}"
            match chance.randrange(5):
                case 0:
                    _forget(store, agent)
                case 1:
                    _sweep(store)
                case 2 if chance.random() < 0.3:
                    self.pair.start_another()
                case _:
                    self._publish(store, agent, self.turns[which])

    def _publish(self, store: Store, agent: str, turn: SyntheticSnapshot) -> None:
        for _ in range(4):
            try:
                head = store.snapshots.get(NS, agent).version
            except NotFound:
                head = 0
            try:
                publish(store, agent, turn, head)
            except KvasirError as error:
                if error.reason not in ("BLOB_MISSING", "HEAD_MOVED", "WRITE_IN_PROGRESS", "BLOB_NOT_FOUND"):
                    raise
                self.refused += 1
            else:
                self.commits += 1
                return

    def check(self) -> None:
        """Every version that is there can be read, by both."""
        for store in self.pair.both:
            for agent in store.agents.page(NS).agents:
                which = int(agent.agent_id.split()[1])
                assert_restores(store, store.snapshots.get(NS, agent.agent_id), self.turns[which])


@pytest.mark.long(22)
@pytest.mark.parametrize("seed", range(4))
def test_no_version_names_a_missing_blob_while_two_processes_sweep_and_publish(pair: Pair, seed: int) -> None:
    chance = pair.moments.chance = random.Random(seed)
    lives = Lives(pair, chance)
    for _ in range(4):
        seeds = [chance.randrange(1 << 30) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lives.live, range(4), seeds))
        lives.check()
    assert lives.commits > 20
