"""An index in a bucket: any directory goes on from there, one store at a time, and nothing acknowledged is lost."""

import errno
import random
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.errors import DataLoss, FailedPrecondition, InvalidArgument, KvasirError, Unavailable
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket import bucket as bucket_module
from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.bucket_blobs import BucketBlobs
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.index.catalog import HOUSE, BucketCatalog, CatalogChange
from cachestore_svc.index.sqlite.in_bucket import bucket_catalog
from cachestore_svc.index.sqlite.in_bucket.pages import WrongPages, delta, followed, opened, signed
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.recovery.opening import locked
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import Lab, assert_restores, publish
from tests.made_models.synthetic import SyntheticAgent

WHERE = "s3://bucket/prefix"


class Hooked(Bucket):
    """One where something may happen around the creation of an object of the index."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    def put_new(self, name: str, data: bytes | memoryview) -> bool:
        if not name.startswith("index/"):
            return super().put_new(name, data)
        if hook := self.before:
            self.before = None
            hook()
        is_new = super().put_new(name, data)
        if hook := self.after:
            self.after = None
            hook()
        return is_new


@pytest.fixture
def bucket() -> Hooked:
    return Hooked(MemoryStore(), WHERE)


def _lab(root: Path, bucket: Bucket, **settings: object) -> Lab:
    lab = Lab(root, catalog=WHERE)
    lab.kept_blobs = blobs_of(replace(lab.config(), **settings), Disk(), bucket)  # type: ignore[arg-type]
    return lab


def _opened(lab: Lab, bucket: Bucket, *, only_looks: bool) -> Store:
    blobs = blobs_of(lab.config(), Disk(), bucket, only_looks=only_looks)
    return Store.open(lab.config(), lab.means(), sweeps=not only_looks, blobs=blobs)


def _catalog(root: Path, bucket: Bucket, *, only_looks: bool = False) -> BucketCatalog:
    """The catalog of a store with this directory."""
    blobs = blobs_of(Lab(root, catalog=WHERE).config(), Disk(), bucket, only_looks=only_looks)
    assert isinstance(blobs, BucketBlobs)
    return BucketCatalog(blobs.bucket, blobs.owner, Disk(), lambda: 1, only_looks=only_looks)


def _set(catalog: BucketCatalog, name: str) -> None:
    catalog.write(HOUSE, lambda change: change.set_fact(name, "1" * 5000))


def _has(catalog: BucketCatalog, name: str) -> bool:
    return catalog.read(HOUSE, lambda view: view.fact(name)) is not None


def test_an_empty_directory_goes_on_where_a_lost_one_ended(tmp_path: Path, bucket: Hooked) -> None:
    turn = SyntheticAgent(seed=1).turn(300)
    store = _lab(tmp_path / "a", bucket).open()
    made = publish(store, "ada", turn, 0)
    with _lab(tmp_path / "b", bucket).open() as second:  # the first one was never closed
        assert_restores(second, made, turn)
        with pytest.raises(KvasirError) as refused:
            publish(store, "ada", SyntheticAgent(seed=1).turn(400), 1)
        assert refused.value.reason in ("LOCKED", "BUCKET_TAKEN")
        publish(second, "ada", SyntheticAgent(seed=1).turn(400), 1)
        assert second.care.check(repair=False).is_clean
    store.close()


def test_an_image_that_the_bucket_forgot_costs_no_object_before_it(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway may answer a write, and forget it."""
    monkeypatch.setattr(bucket_catalog, "_MOST_DELTAS", 3)
    put = bucket.put
    monkeypatch.setattr(bucket, "put", lambda name, data: None if name.endswith("whole") else put(name, data))
    first = _catalog(tmp_path / "a", bucket)
    for number in range(8):
        _set(first, f"f{number}")
    first.close()
    bucket._store.put("index/00000000000²." + "pages", b"")  # a digit of another script is no number
    second = _catalog(tmp_path / "b", bucket)
    assert all(_has(second, f"f{number}") for number in range(8))
    second.close()


def test_a_commit_whose_object_is_there_by_the_servers_word_alone_is_written_again(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may answer that a name is taken, and have no such object: nobody else has begun since."""
    first, create, lies = _catalog(tmp_path / "a", bucket), bucket.put_new, [True, True]
    monkeypatch.setattr(bucket, "put_new", lambda name, data: not lies.pop() if lies else create(name, data))
    _set(first, "one")
    first.close()
    second = _catalog(tmp_path / "b", bucket)
    assert _has(second, "one")
    second.close()


def test_a_store_that_was_followed_answers_nothing_more(tmp_path: Path, bucket: Hooked) -> None:
    first = _catalog(tmp_path / "a", bucket)
    _set(first, "one")
    second = _catalog(tmp_path / "b", bucket)
    for refused in (lambda: _set(first, "two"), lambda: _has(first, "one"), first.check_ours):
        with pytest.raises(Unavailable) as error:
            refused()
        assert error.value.reason == "LOCKED"
    assert _has(second, "one")
    assert not _has(second, "two")
    first.close()
    second.close()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("commits", [0, 10])
def test_a_write_during_which_another_store_follows_counts_for_both_or_for_none(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch, moment: str, commits: int
) -> None:
    """After ten commits the follower has removed its own object of the number that the first store writes."""
    monkeypatch.setattr(bucket_catalog, "_MOST_DELTAS", 3)
    catalogs = [_catalog(tmp_path / "a", bucket)]
    _set(catalogs[0], "one")

    def follow() -> None:
        catalogs.append(_catalog(tmp_path / "b", bucket))
        for number in range(commits):
            _set(catalogs[1], f"f{number}")

    setattr(bucket, moment, follow)
    if moment == "after":
        _set(catalogs[0], "two")
    else:
        with pytest.raises(Unavailable, match="another store"):
            _set(catalogs[0], "two")
    catalogs.append(_catalog(tmp_path / "c", bucket))
    assert _has(catalogs[2], "two") == (moment == "after")
    assert all(_has(catalogs[2], name) for name in ("one", *(f"f{number}" for number in range(commits))))
    for each in catalogs:
        each.close()


@pytest.mark.parametrize("commits", [1, 3, 4, 7])
def test_a_store_that_follows_while_the_one_before_gives_up_old_objects_lacks_none_of_its_writes(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """The first store writes, and removes objects, after the second one has read all and before it writes its mark."""
    monkeypatch.setattr(bucket_catalog, "_MOST_DELTAS", 3)
    first = _catalog(tmp_path / "a", bucket)
    names = [f"w{number}" for number in range(commits)]
    bucket.before = lambda: [_set(first, name) for name in names] and None
    second = _catalog(tmp_path / "b", bucket)
    _set(second, "two")
    third = _catalog(tmp_path / "c", bucket)
    assert all(_has(third, name) for name in (*names, "two"))
    for each in (first, second, third):
        each.close()


@pytest.mark.long(14)
@pytest.mark.parametrize("seed", range(12))
def test_of_stores_that_follow_each_other_at_any_moment_no_acknowledged_write_is_lost(
    tmp_path: Path, bucket: Hooked, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others follow within the creation of an object, and give up old objects, so that their numbers are free."""
    monkeypatch.setattr(bucket_catalog, "_MOST_DELTAS", 3)
    chance = random.Random(seed)
    catalogs = [_catalog(tmp_path / "0", bucket)]
    acknowledged, refused, numbers = set[str](), set[str](), count()

    def write_some() -> None:
        for _ in range(chance.randrange(6)):
            write(catalogs[-1])

    def follow() -> None:
        with suppress(FailedPrecondition):  # another one followed within its start
            catalogs.append(_catalog(tmp_path / str(len(catalogs)), bucket))
            write_some()

    def write(catalog: BucketCatalog) -> None:
        name = f"w{next(numbers)}"
        try:
            _set(catalog, name)
        except Unavailable:
            refused.add(name)
        else:
            acknowledged.add(name)

    for _ in range(25):
        if chance.random() < 0.2:
            bucket.before = write_some  # by the store before, between what the next one reads and its mark
            follow()
        if chance.random() < 0.3:
            setattr(bucket, chance.choice(["before", "after"]), follow)
        write(chance.choice(catalogs[-3:]))
    bucket.before = bucket.after = None
    last = _catalog(tmp_path / "last", bucket)
    assert {name for name in acknowledged | refused if _has(last, name)} == acknowledged
    assert refused
    for each in (*catalogs, last):
        each.close()


def test_a_write_whose_answer_was_lost_happens_once_and_waits_for_the_bucket(tmp_path: Path, bucket: Hooked) -> None:
    catalog = _catalog(tmp_path / "a", bucket)
    names = list(bucket.names("index"))

    def cut() -> None:
        raise OSError(errno.ECONNRESET, "no answer")

    for moment in ("before", "after"):
        setattr(bucket, moment, cut)
        _set(catalog, moment)
    assert len(list(bucket.names("index"))) == len(names) + 2
    assert _has(catalog, "before")
    assert _has(catalog, "after")
    catalog.close()


def test_a_store_that_ends_while_the_bucket_is_away_acknowledges_nothing(tmp_path: Path, bucket: Hooked) -> None:
    catalog = _catalog(tmp_path / "a", bucket)

    def away() -> None:
        bucket.before = away
        raise OSError(errno.EHOSTUNREACH, "away")

    bucket.before = away
    ends = threading.Timer(0.2, catalog.close)
    ends.start()
    with pytest.raises(Unavailable) as refused:
        _set(catalog, "one")
    assert refused.value.reason == "CLOSED"
    ends.join()


def test_many_commits_leave_few_objects_and_all_rows(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_catalog, "_MOST_DELTAS", 5)
    catalog = _catalog(tmp_path / "a", bucket)
    for number in range(23):
        _set(catalog, f"f{number}")
    assert len(list(bucket.names("index"))) <= 6
    catalog.close()
    second = _catalog(tmp_path / "b", bucket)
    assert all(_has(second, f"f{number}") for number in range(23))
    second.close()


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_damaged_or_lost_object_of_the_index_is_found(tmp_path: Path, bucket: Hooked, is_missing: bool) -> None:
    catalog = _catalog(tmp_path / "a", bucket)
    for number in range(3):
        _set(catalog, f"f{number}")
    catalog.close()
    name = f"index/{sorted(bucket.names('index'))[1]}"
    data = bytes(bucket.get(name, 1 << 20))
    if is_missing:
        bucket.remove(name)
    else:
        bucket.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataLoss, match="bring back the objects of s3://bucket/prefix/index ") as refused:
        _catalog(tmp_path / "a", bucket)
    assert refused.value.reason == "INDEX_DAMAGED"
    assert "store recover" not in refused.value.message
    bucket.put(name, data)
    catalog = _catalog(tmp_path / "b", bucket)
    assert _has(catalog, "f2")
    catalog.close()


def test_blobs_whose_index_is_lost_are_no_new_store(tmp_path: Path, bucket: Hooked) -> None:
    turn = SyntheticAgent(seed=1).turn(300)
    _lab(tmp_path / "crashed before its mark", bucket)
    with _lab(tmp_path / "a", bucket).open() as store:
        made = publish(store, "ada", turn, 0)
    lost = {f"index/{name}": bytes(bucket.get(f"index/{name}", 1 << 30)) for name in bucket.names("index")}
    for name in lost:
        bucket.remove(name)
    folders = [*bucket.folders()]
    before = {f"{folder}/{name}" for folder in folders for name in bucket.names(folder)}
    lab = Lab(tmp_path / "b", catalog=WHERE)
    for looks in (False, True):
        with pytest.raises(DataLoss, match="bring back the objects of s3://bucket/prefix/index ") as refused:
            _opened(lab, bucket, only_looks=looks)
        assert refused.value.reason == "INDEX_DAMAGED"
    assert {f"{folder}/{name}" for folder in bucket.folders() for name in bucket.names(folder)} == before
    for name, data in lost.items():
        bucket.put(name, data)
    with _lab(tmp_path / "c", bucket).open() as store:
        assert_restores(store, made, turn)


def test_the_newest_object_of_the_index_does_not_get_lost_silently(tmp_path: Path, bucket: Hooked) -> None:
    turn = SyntheticAgent(seed=1).turn(300)
    with _lab(tmp_path / "a", bucket).open() as store:
        made = publish(store, "ada", turn, 0)
    catalog = _catalog(tmp_path / "a", bucket)
    _set(catalog, "newest")
    catalog.close()
    newest = max(bucket.names("index"))
    bucket.remove(f"index/{newest}")
    before = bucket.get_tagged("kvasir-store", 256)
    for only_looks in (False, True):
        with pytest.raises(DataLoss, match="--accept-older") as refused:
            _catalog(tmp_path / "b", bucket, only_looks=only_looks)
        assert refused.value.reason == "INDEX_DAMAGED"
    assert bucket.get_tagged("kvasir-store", 256) == before  # the refused start took the bucket from no store
    lab = _lab(tmp_path / "c", bucket, accept_older=True)
    with lab.open(accept_older=True) as store:
        assert_restores(store, made, turn)
    catalog = _catalog(tmp_path / "d", bucket)  # from now on without the option
    assert not _has(catalog, "newest")
    catalog.close()


def test_a_start_over_a_lost_index_leaves_the_store_that_runs_alone(tmp_path: Path, bucket: Hooked) -> None:
    """The running one has the index in memory, and its next commits go on."""
    ada = SyntheticAgent(seed=1)
    turn, next_turn = ada.turn(300), ada.turn(300)
    with _lab(tmp_path / "a", bucket).open() as store:
        made = publish(store, "ada", turn, 0)
        for name in list(bucket.names("index")):
            bucket.remove(f"index/{name}")
        with pytest.raises(DataLoss, match="bring back the objects"):
            _lab(tmp_path / "b", bucket).open()
        assert_restores(store, made, turn)
        assert_restores(store, publish(store, "ada", next_turn, 1), next_turn)


def test_a_bucket_that_stays_away_is_answered_and_its_commit_counts_when_it_is_back(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_catalog, "_WAITS", 2)
    catalog = _catalog(tmp_path / "a", bucket)
    done = list[str]()

    def away() -> None:
        bucket.before = away
        raise OSError(errno.EHOSTUNREACH, "away")

    def write(change: CatalogChange) -> None:
        change.set_fact("one", "1")
        change.after_commit(lambda: done.append("one"))

    bucket.before = away
    for refused in (lambda: catalog.write(HOUSE, write), lambda: _set(catalog, "two"), lambda: _has(catalog, "one")):
        with pytest.raises(Unavailable) as error:
            refused()
        assert error.value.reason == "INDEX_FAILED"
    assert done == []
    bucket.before = None
    assert _has(catalog, "one")
    assert done == ["one"]
    _set(catalog, "three")
    catalog.close()
    second = _catalog(tmp_path / "b", bucket)
    assert [_has(second, name) for name in ("one", "two", "three")] == [True, False, True]
    second.close()


class _Short(sqlite3.Connection):
    """One for whose image there may be no memory."""

    failures: ClassVar[list[Exception]] = []

    def serialize(self, *, name: str = "main") -> bytes:
        if self.failures:
            raise self.failures.pop()
        return super().serialize(name=name)


_NO_MEMORY = [MemoryError(), sqlite3.OperationalError("unable to serialize 'main'")]


@pytest.mark.parametrize("failure", _NO_MEMORY)
def test_a_start_without_memory_for_the_index_is_refused_and_changes_nothing(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    _set(catalog := _catalog(tmp_path / "a", bucket), "one")
    catalog.close()
    names, connect = bucket.names("index"), sqlite3.connect
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", partial(connect, factory=_Short))
        patched.setattr(_Short, "failures", [failure])
        with pytest.raises(Unavailable, match="no memory") as refused:
            _catalog(tmp_path / "a", bucket)
    assert refused.value.reason == "INDEX_FAILED"
    assert bucket.names("index") == names
    second = _catalog(tmp_path / "a", bucket)
    assert _has(second, "one")
    second.close()


@pytest.mark.parametrize("failure", _NO_MEMORY)
def test_a_write_for_whose_image_no_memory_is_left_happens_once_and_counts_when_there_is(
    tmp_path: Path, bucket: Hooked, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=_Short))
    catalog, done = _catalog(tmp_path / "a", bucket), list[int]()

    def work(change: CatalogChange) -> None:
        done.append(1)
        change.set_fact("counted", str(len(done)))

    monkeypatch.setattr(_Short, "failures", [failure, failure])
    with pytest.raises(Unavailable) as refused:
        catalog.write(HOUSE, work)
    with pytest.raises(Unavailable):
        _has(catalog, "counted")  # else it would read what no bucket has
    assert (refused.value.reason, len(done)) == ("INDEX_FAILED", 1)
    _set(catalog, "later")
    assert catalog.read(HOUSE, lambda view: view.fact("counted")) == "1"
    second = _catalog(tmp_path / "b", bucket)  # the first one was never closed
    assert [_has(second, name) for name in ("counted", "later")] == [True, True]
    second.close()
    catalog.close()


def test_damage_that_a_reader_meets_is_refused_with_a_step_that_a_bucket_has(tmp_path: Path, bucket: Hooked) -> None:
    lab = _lab(tmp_path / "a", bucket)
    catalog = _catalog(tmp_path / "a", bucket)
    _set(catalog, "one")
    catalog.write(HOUSE, lambda change: change.run("UPDATE facts SET value = CAST(X'ff' AS TEXT) WHERE name = 'one'"))
    with pytest.raises(DataLoss, match="bring back the objects of s3://bucket/prefix/index "):
        _has(catalog, "one")
    catalog.close()
    with pytest.raises(DataLoss, match="bring back the objects of s3://bucket/prefix/index "):
        with locked(lab.config(), Disk()):
            raise ValueError("no number")


def test_a_large_object_of_the_index_has_one_writer(bucket: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another store creates it after this one has looked."""
    monkeypatch.setattr(bucket_module, "_MULTIPART_BYTES", 10)
    monkeypatch.setattr(bucket, "size_bytes", lambda name: bucket.put(name, b"of the other store"))
    bucket.put("index/1", b"of the other store")
    assert not bucket.put_new("index/1", b"of this one, and large")
    assert bytes(bucket.get("index/1", 100)) == b"of the other store"


def test_a_look_writes_nothing_and_disturbs_no_store(tmp_path: Path, bucket: Hooked) -> None:
    catalog = _catalog(tmp_path / "a", bucket)
    _set(catalog, "one")
    before = sorted(bucket.names("index"))
    looking = _catalog(tmp_path / "a", bucket, only_looks=True)
    assert _has(looking, "one")
    _set(looking, "own")
    assert sorted(bucket.names("index")) == before
    _set(catalog, "two")
    looking.close()
    catalog.close()


def test_an_index_is_where_it_was_begun(tmp_path: Path, bucket: Hooked) -> None:
    _lab(tmp_path / "a", bucket).open().close()
    for root in ("a", "b"):
        lab = Lab(tmp_path / root)
        with pytest.raises(FailedPrecondition, match="--catalog s3://bucket/prefix") as refused:
            blobs_of(replace(lab.config(), blobs=WHERE), Disk(), bucket)
        assert refused.value.reason == "INDEX_FOREIGN"
    other = Hooked(MemoryStore(), WHERE)
    blobs_of(replace(Lab(tmp_path / "c").config(), blobs=WHERE), Disk(), other)
    with pytest.raises(FailedPrecondition, match="lies elsewhere"):
        _lab(tmp_path / "d", other)
    Lab(tmp_path / "e").open().close()
    with pytest.raises(FailedPrecondition, match="begin without --catalog"):
        Lab(tmp_path / "e", catalog=WHERE).open()
    with pytest.raises(InvalidArgument, match="they lie there, too"):
        _lab(tmp_path / "f", bucket, blobs="s3://another")


# --- pages ---


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=6), st.lists(st.binary(min_size=1, max_size=3), max_size=6))
def test_a_delta_leads_from_one_image_to_the_other(first: list[bytes], second: list[bytes]) -> None:
    before, after = (_image(pages) for pages in (first, [b"h", *second]))
    assert followed(before, delta(before, after)) == after


def _image(pages: list[bytes]) -> bytes:
    """Pages of 512 bytes, of which the first has their size where SQLite has it."""
    image = bytearray(b"".join(page.ljust(512, b".") for page in pages))
    image[16:18] = (512).to_bytes(2, "big") if image else b""
    return bytes(image)


def test_an_object_follows_one_other_alone() -> None:
    data = signed(b"one", b"pages")
    assert opened(b"one", data)[0] == b"pages"
    for chain, wrong in ((b"two", data), (b"one", data[:-1]), (b"one", b"")):
        with suppress(WrongPages):
            opened(chain, wrong)
            raise AssertionError(wrong)
    with pytest.raises(WrongPages):
        followed(b"", b"no pages")
