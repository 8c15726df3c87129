"""A bucket that answers wrongly for a while, or is another one: nothing wrong is served, and nothing is given up."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvasir.credentials import write_private_text
from kvasir.errors import DataLoss, FailedPrecondition, Unavailable
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.disk import Disk
from cachestore_svc.recovery.medium import blobs_of
from tests.cachestore.core.lab import NS, Lab, assert_restores, damaged, publish
from tests.made_models.synthetic import SyntheticAgent

WHERE = "s3://bucket/prefix"


class LyingBucket(Bucket):
    """Its server, or a proxy, answers for a while with other bytes than it has."""

    lie: bytes | None = None

    def get(self, name: str, most_bytes: int) -> memoryview:
        return memoryview(self.lie)[:most_bytes] if self.lie is not None else super().get(name, most_bytes)

    def get_tagged(self, name: str, most_bytes: int) -> tuple[bytes, str]:
        data, tag = super().get_tagged(name, most_bytes)
        return (self.lie[:most_bytes] if self.lie is not None else data), tag


@pytest.fixture
def bucket() -> LyingBucket:
    return LyingBucket(MemoryStore(), WHERE)


def _lab(root: Path, bucket: Bucket) -> Lab:
    """A store on a bucket, without copies on its disk, opened as its settings say."""
    lab = Lab(root)
    lab.kept_blobs = blobs_of(replace(lab.config(), blobs=WHERE, blob_tier_bytes=0), Disk(), bucket)
    return lab


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("lie", [b"", b"<html>back soon</html>", bytes(1 << 20)])
def test_a_memory_comes_back_once_its_bucket_answers_truly_again(
    tmp_path: Path, bucket: LyingBucket, lie: bytes, *, is_sealed: bool
) -> None:
    lab, turn = _lab(tmp_path / "a", bucket), SyntheticAgent(seed=1).turn(300)
    if is_sealed:
        lab.seal(NS)
    with lab.open() as store:
        version = publish(store, "ada", turn, 0)
        bucket.lie = lie
        for digest in (turn.manifest_digest, *turn.digests):
            with pytest.raises(DataLoss):
                store.blobs.read(NS, digest)
        assert set(damaged(store)) == {turn.manifest_digest, *turn.digests}
        with pytest.raises(Unavailable):  # nothing is acknowledged, and no other store is taken for the owner
            publish(store, "eve", SyntheticAgent(seed=2).turn(300), 0)
        bucket.lie = None
        assert_restores(store, version, turn)
        assert damaged(store) == []
        publish(store, "eve", SyntheticAgent(seed=2).turn(300), 0)


def test_a_bucket_that_is_empty_for_a_while_is_no_other_stores(tmp_path: Path, bucket: LyingBucket) -> None:
    turn = SyntheticAgent(seed=1).turn(300)
    with _lab(tmp_path / "a", bucket).open() as store:
        whole, bucket._store = bucket._store, MemoryStore()
        bucket._reads = bucket._store
        with pytest.raises(Unavailable, match="no store began there"):
            publish(store, "ada", turn, 0)
        bucket._store = bucket._reads = whole
        assert_restores(store, publish(store, "ada", turn, 0), turn)


def test_a_bucket_that_is_empty_now_is_refused_and_nothing_is_taken_for_lost(
    tmp_path: Path, bucket: LyingBucket
) -> None:
    """As where the server's disk is not mounted."""
    turn = SyntheticAgent(seed=1).turn(300)
    with _lab(tmp_path / "a", bucket).open() as store:
        version = publish(store, "ada", turn, 0)
    empty = Bucket(MemoryStore(), WHERE)
    with pytest.raises(FailedPrecondition, match="has nothing of this store"):
        _lab(tmp_path / "a", empty)
    assert list(empty.names("")) == []
    with _lab(tmp_path / "a", bucket).open() as store:
        assert_restores(store, version, turn)


@pytest.mark.parametrize("is_first_version", [False, True])
def test_a_start_that_is_cut_before_the_bucket_names_it_hinders_no_later_one(
    tmp_path: Path, bucket: LyingBucket, monkeypatch: pytest.MonkeyPatch, *, is_first_version: bool
) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    if is_first_version:
        write_private_text(tmp_path / "a" / "bucket", f"{WHERE} {'5' * 32}\n")
        bucket.put("kvasir-store", b"5" * 32)
    for name in ("put_new", "swap"):
        monkeypatch.setattr(bucket, name, partial(_cut, getattr(bucket, name)))
    with pytest.raises(KeyboardInterrupt):
        _lab(tmp_path / "a", bucket)
    monkeypatch.undo()
    _lab(tmp_path / "a", bucket)


def _cut(write: Callable[..., bool], name: str, *given: Any) -> bool:
    if name == "kvasir-store":
        raise KeyboardInterrupt
    return write(name, *given)


def test_objects_that_the_bucket_forgot_are_found_by_checks_and_by_a_scrub_and_are_written_again(
    tmp_path: Path, bucket: LyingBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway may answer a write, and forget it: nothing can be read then, but nobody goes on in the belief that it
    can."""
    lab, turn = _lab(tmp_path / "a", bucket), SyntheticAgent(seed=1).turn(600)
    lost = turn.digests[0]
    put = bucket.put_new
    monkeypatch.setattr(bucket, "put_new", lambda name, data: lost.hash in name or put(name, data))
    with lab.open() as store:
        publish(store, "ada", turn, 0)
        [finding] = store.care.check(repair=False).findings
        assert (finding.problem, lost.hash in finding.detail) == ("MISSING_FILE", True)
        assert [each.damaged for each in store.care.verify(NS, "ada")][-1] == (lost,)
        assert store.blobs.find_missing(NS, turn.digests) == [lost]
        monkeypatch.undo()
        publish(store, "ada", turn, 1)
        assert store.care.check(repair=False).is_clean
        assert store.blobs.read(NS, lost) == turn.new_blobs[lost]
