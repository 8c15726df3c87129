"""Blobs in a bucket: whose it is, what its copies on disk may do, and what is left while it does not answer."""

import errno
import secrets
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import certifi
import pytest
from kvasir.credentials import write_private_text
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, Unavailable
from kvasir.formats.block_hash import kv_identity_hash
from kvasir.formats.digest import Digest
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket import bucket as bucket_module
from cachestore_svc.blobs.bucket.bucket import Bucket, open_bucket, probe
from cachestore_svc.blobs.bucket.disk_tier import DiskTier
from cachestore_svc.blobs.disk import READ_BACK_BYTES, Disk
from cachestore_svc.config import ConfigError, read_settings
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.recovery.medium import blobs_of
from cachestore_svc.recovery.salvage import Found
from cachestore_svc.sealing.sealed_names import PLAIN_NAMES
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish
from tests.made_models.sampling import first_and_in_turn
from tests.made_models.synthetic import SMALL, SyntheticAgent, full_layers, kv_identity

WHERE = "s3://bucket/prefix"


class AwayBucket(Bucket):
    """One that can be away."""

    is_away = False

    def _check(self) -> None:
        if self.is_away:
            raise OSError(errno.EHOSTUNREACH, "the bucket is away")

    def put_new(self, name: str, data: bytes | memoryview) -> bool:
        self._check()
        return super().put_new(name, data)

    def get(self, name: str, most_bytes: int) -> memoryview:
        self._check()
        return super().get(name, most_bytes)

    def remove(self, name: str) -> None:
        self._check()
        super().remove(name)


class CarelessBucket(Bucket):
    """One whose server ignores If-None-Match."""

    def put_new(self, name: str, data: bytes | memoryview) -> bool:
        self.put(name, data)
        return True


class BlindBucket(Bucket):
    """One whose server ignores If-Match."""

    def swap(self, name: str, data: bytes, tag: str) -> bool:
        self.put(name, data)
        return True


class MuteBucket(Bucket):
    """One whose answer to the writer that won is lost."""

    def put_new(self, name: str, data: bytes | memoryview) -> bool:
        super().put_new(name, data)
        return False


@pytest.fixture
def bucket() -> AwayBucket:
    return AwayBucket(MemoryStore(), WHERE)


def _lab(root: Path, bucket: Bucket, tier_bytes: int = 1 << 20) -> Lab:
    """A store on a bucket, opened as its settings say."""
    lab = Lab(root)
    config = replace(lab.config(), blobs=WHERE, blob_tier_bytes=tier_bytes)
    lab.kept_blobs = blobs_of(config, Disk(), bucket)
    return lab


def _put(store: Store, data: bytes) -> Digest:
    digest = Digest.of(data)
    with store.blobs.open_writer(NS, digest, BlobKind.TENSORS) as writer:
        writer.write(0, data)
        writer.finish()
    return digest


def _blobs(count: int) -> list[bytes]:
    turns = (SyntheticAgent(seed=seed).turn(300) for seed in range(count))
    return [next(iter(turn.new_blobs.values())) for turn in turns]


def test_a_bucket_that_lets_a_second_writer_win_is_refused(tmp_path: Path, bucket: AwayBucket) -> None:
    with pytest.raises(FailedPrecondition, match="16 of 16 writers"):
        _lab(tmp_path / "a", CarelessBucket(MemoryStore(), WHERE))
    with pytest.raises(FailedPrecondition, match="If-Match"):
        probe(BlindBucket(MemoryStore(), WHERE), secrets.token_hex)
    probe(bucket, secrets.token_hex)
    assert list(bucket.names("probe")) == []


def test_a_lost_answer_to_the_one_writer_that_won_does_not_accuse_the_server(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="answer"):
        _lab(tmp_path / "a", MuteBucket(MemoryStore(), WHERE))


def test_a_bucket_belongs_to_one_store_and_a_store_to_one_bucket(tmp_path: Path, bucket: AwayBucket) -> None:
    lab = _lab(tmp_path / "a", bucket)
    with lab.open() as store:
        _put(store, _blobs(1)[0])
    _lab(tmp_path / "a", bucket)
    with pytest.raises(FailedPrecondition, match="belongs to another store"):
        _lab(tmp_path / "b", bucket)
    with pytest.raises(FailedPrecondition, match="lie in s3://bucket/prefix"):
        _lab(tmp_path / "a", Bucket(MemoryStore(), "s3://another"))
    with Lab(tmp_path / "c").open() as store:
        _put(store, _blobs(1)[0])
    with pytest.raises(FailedPrecondition, match="kvasir agents export"):
        _lab(tmp_path / "c", AwayBucket(MemoryStore(), WHERE))


def _copied(tmp_path: Path, start: str, to: str) -> None:
    """As `cp -a` does."""
    shutil.copytree(tmp_path / start, tmp_path / to)


def test_a_copy_of_a_stores_data_is_refused_and_removes_nothing(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    with lab.open():
        _copied(tmp_path, "a", "b")
    with lab.open() as store:
        digest = _put(store, data)  # which the copy does not know
        with pytest.raises(FailedPrecondition, match="--accept-older") as refused:
            _lab(tmp_path / "b", bucket)
        assert refused.value.reason == "BUCKET_TAKEN"
        assert store.blobs.read(NS, digest) == data
    with _lab(tmp_path / "a", bucket, tier_bytes=0).open() as store:
        assert store.blobs.read(NS, digest) == data


def test_of_two_copies_the_one_that_took_the_bucket_alone_removes_and_acknowledges(
    tmp_path: Path, bucket: AwayBucket
) -> None:
    first, second, third = _blobs(3)
    lab = _lab(tmp_path / "a", bucket)
    with lab.open() as store:
        digest = _put(store, first)
        store.leases.acquire(NS, "ada", kv_identity_hash(SMALL), "engine")
        _copied(tmp_path, "a", "b")
        taking = Lab(tmp_path / "b")
        config = replace(taking.config(), blobs=WHERE, blob_tier_bytes=0, accept_older=True)
        taking.kept_blobs = blobs_of(config, Disk(), bucket)
        store.care.collect_garbage()
        lab.clock.pass_s(2 * 3600)
        for refused in (lambda: _put(store, second), store.care.collect_garbage):
            with pytest.raises(FailedPrecondition) as error:
                refused()
            assert error.value.reason == "BUCKET_TAKEN"
    assert set(bucket.names(lab.blobs.of(NS).place)) == {digest.hash, Digest.of(second).hash}
    with taking.open(accept_older=True) as store:
        with pytest.raises(FailedPrecondition, match="held by engine"):  # which called a store of the same bucket
            store.leases.acquire(NS, "ada", kv_identity_hash(SMALL), "another")
        assert store.blobs.read(NS, digest) == first
        _put(store, third)
    with pytest.raises(FailedPrecondition, match="another copy"):
        _lab(tmp_path / "a", bucket)


def test_data_of_an_earlier_start_in_the_same_directory_are_refused(tmp_path: Path, bucket: AwayBucket) -> None:
    """A volume that was put back has the same inodes."""
    _lab(tmp_path / "a", bucket)
    earlier = (note := tmp_path / "a" / "bucket").read_text()
    _lab(tmp_path / "a", bucket)
    note.write_text(earlier)
    with pytest.raises(FailedPrecondition, match="--accept-older"):
        _lab(tmp_path / "a", bucket)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_start_after_one_that_was_cut_has_the_bucket(
    tmp_path: Path, bucket: AwayBucket, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    _lab(tmp_path / "a", bucket)
    swap = Bucket.swap

    def cut(bucket: Bucket, name: str, data: bytes, tag: str) -> bool:
        if name != "kvasir-store":
            return swap(bucket, name, data, tag)
        if is_replaced:
            assert swap(bucket, name, data, tag)
        raise OSError(errno.ECONNRESET, "no answer")

    monkeypatch.setattr(Bucket, "swap", cut)
    with pytest.raises(Unavailable):
        _lab(tmp_path / "a", bucket)
    monkeypatch.undo()
    _lab(tmp_path / "a", bucket)
    _lab(tmp_path / "a", bucket)


def test_a_start_whose_write_was_repeated_has_the_bucket(
    tmp_path: Path, bucket: AwayBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = Bucket.swap

    def twice(bucket: Bucket, name: str, data: bytes, tag: str) -> bool:
        is_won = swap(bucket, name, data, tag)
        return swap(bucket, name, data, tag) if name == "kvasir-store" else is_won

    _lab(tmp_path / "a", bucket)
    monkeypatch.setattr(Bucket, "swap", twice)
    with _lab(tmp_path / "a", bucket).open() as store:
        _put(store, _blobs(1)[0])


def test_data_of_the_first_bucket_version_open_today(tmp_path: Path, bucket: AwayBucket) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    write_private_text(tmp_path / "a" / "bucket", f"{WHERE} {'5' * 32}\n")
    bucket.put("kvasir-store", b"5" * 32)
    _lab(tmp_path / "a", bucket)
    assert len(bucket.get_tagged("kvasir-store", 256)[0].split()) == 3
    _lab(tmp_path / "a", bucket)


def test_a_look_takes_nothing_from_the_store_that_runs(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    with lab.open() as store:
        digest = _put(store, data)
        looking = blobs_of(lab.config(), Disk(), bucket, only_looks=True)  # the data name the bucket
        assert looking.of(NS).list().blobs == {digest.hash}
        _put(store, _blobs(2)[1])


def test_a_blob_is_acknowledged_once_the_bucket_has_it(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    with lab.open() as store:
        bucket.is_away = True
        with pytest.raises(KvasirError, match="the bucket is away on"):
            _put(store, data)
        assert store.blobs.find_missing(NS, [Digest.of(data)])
        bucket.is_away = False
        digest = _put(store, data)
    assert lab.part_hashes == []
    with _lab(tmp_path / "a", bucket, tier_bytes=0).open() as store:
        assert store.blobs.read(NS, digest) == data


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(
    ("layers", "pieces", "in_parts"),
    first_and_in_turn([(14, 1, False), (48, 4, False), (15, 2, False), (48, 4, True)], seconds=1, first=2),
)
def test_blobs_of_every_size_come_back_byte_for_byte(
    tmp_path: Path,
    bucket: AwayBucket,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    pieces: int,
    *,
    in_parts: bool,
    is_sealed: bool,
) -> None:
    if in_parts:
        monkeypatch.setattr(bucket_module, "_MULTIPART_BYTES", 10 << 20)
        monkeypatch.setattr(bucket_module, "_PART_BYTES", 5 << 20)
    lab = _lab(tmp_path / "data", bucket)  # its copies are smaller
    if is_sealed:
        lab.seal(NS)
    turn = SyntheticAgent(kv_identity("large", full_layers(layers, 8, 128)), 1).turn(256, is_prompt=True)
    assert {-(-digest.size_bytes // READ_BACK_BYTES) for digest in turn.digests} == {pieces}
    with lab.open() as store:
        assert_restores(store, publish(store, "ada", turn, 0), turn)


def test_a_bucket_that_is_away_costs_a_read_and_loses_nothing(tmp_path: Path, bucket: AwayBucket) -> None:
    first, second = _blobs(2)
    with _lab(tmp_path / "a", bucket, len(first) + 100).open() as store:
        digests = [_put(store, first), _put(store, second)]
        bucket.is_away = True
        assert store.blobs.read(NS, digests[1]) == second  # the copy on disk
        with pytest.raises(Unavailable):
            store.blobs.read(NS, digests[0])
        bucket.is_away = False
        assert store.blobs.read(NS, digests[0]) == first
    bucket.is_away = True
    with pytest.raises(Unavailable):
        _lab(tmp_path / "a", bucket)


def test_damage_in_the_bucket_is_found_by_the_digest_and_the_next_write_heals_it(
    tmp_path: Path, bucket: AwayBucket
) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket, tier_bytes=0), _blobs(1)
    with lab.open() as store:
        digest = _put(store, data)
        bucket.put(f"{lab.blobs.of(NS).place}/{digest.hash}", data[:-1] + b"!")
        with pytest.raises(KvasirError, match="damaged"):
            store.blobs.read(NS, digest)
        assert store.blobs.find_missing(NS, [digest]) == [digest]
        _put(store, data)
        assert store.blobs.read(NS, digest) == data


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_scrub_finds_damage_in_the_bucket_behind_a_good_copy(
    tmp_path: Path, bucket: AwayBucket, is_sealed: bool
) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    if is_sealed:
        lab.seal(NS)
    with lab.open() as store:
        digest = _put(store, data)
        [name] = bucket.names(place := lab.blobs.of(NS).place)
        whole = bytes(bucket.get(f"{place}/{name}", 1 << 20))
        bucket.put(f"{place}/{name}", whole[:-1] + bytes([whole[-1] ^ 1]))
        assert store.blobs.read(NS, digest) == data  # the copy on disk
        [progress] = store.care.scrub()
        assert progress.damaged == (digest,)
        assert not store.care.check(repair=True).is_clean
        assert store.blobs.find_missing(NS, [digest]) == [digest]
        bucket.put(f"{place}/{name}", whole)
        store.care.check(repair=True)
        assert store.blobs.read(NS, digest) == data


def test_damaged_bytes_of_a_sealed_blob_stay_in_no_copy(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    with lab.seal(NS).open() as store:
        digest = _put(store, data)
        [name] = bucket.names(place := lab.blobs.of(NS).place)
        whole = bytes(bucket.get(f"{place}/{name}", 1 << 20))
        copy = tmp_path / "a" / "tier" / place / name
        copy.unlink()
        bucket.put(f"{place}/{name}", whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(KvasirError, match="damaged"):
            store.blobs.read(NS, digest)
        bucket.put(f"{place}/{name}", whole)
        store.care.check(repair=True)
        assert store.blobs.read(NS, digest) == data
        assert store.blobs.read(NS, digest) == data
        assert copy.read_bytes()[:-32] == whole


def test_a_recovery_does_not_take_blobs_of_a_bucket_that_is_away_for_lost(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    with lab.open() as store:
        digest = _put(store, data)
    assert [bytes(each) for each, _ in lab.blobs.of(NS).unverified(digest.hash, len(data))] == [data]
    bucket.is_away = True
    with pytest.raises(OSError, match="away"):
        list(lab.blobs.of(NS).unverified(digest.hash, len(data)))


def test_a_recovery_lists_no_bucket_for_a_blob_that_lies_under_its_name(
    tmp_path: Path, bucket: AwayBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, [first, second, third] = _lab(tmp_path / "a", bucket), _blobs(3)
    with lab.open() as store:
        digests = [_put(store, data) for data in (first, second, third)]
    blobs = lab.blobs.of(NS)
    blobs.set_aside(digests[2].hash, 1)
    lists, names = list[str](), bucket.names
    monkeypatch.setattr(bucket, "names", lambda folder, **more: lists.append(folder) or names(folder, **more))
    found = Found(blobs, PLAIN_NAMES)
    assert [found.whole(digest, BlobKind.TENSORS) is not None for digest in digests[:2]] == [True, True]
    assert lists == []
    assert found.whole(digests[2], BlobKind.TENSORS) is not None
    assert found.hashes() == sorted(digest.hash for digest in digests)


def test_a_deleted_blob_leaves_bucket_and_tier_behind_its_row(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data] = _lab(tmp_path / "a", bucket), _blobs(1)
    with lab.open() as store:
        digest = _put(store, data)
        store.care.collect_garbage()
        lab.clock.pass_s(2 * 3600)
        store.care.collect_garbage()
        assert store.blobs.find_missing(NS, [digest])
    assert list(bucket.names(lab.blobs.of(NS).place)) == []
    assert [path for path in (tmp_path / "a" / "tier").glob("*/*") if path.is_file()] == []


# --- the tier ---


def test_the_tier_keeps_what_was_used_last_within_its_bytes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "t", 3 * (1000 + 32))
    for name in "abc":
        tier.put("p", name, name.encode() * 1000)
    assert tier.get("p", "a") == b"a" * 1000
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "t" / "p").iterdir()} == {0o600}
    tier.put("p", "d", b"d" * 1000)
    assert [name for name in "abcd" if tier.get("p", name) is not None] == ["a", "c", "d"]
    assert tier.total_bytes == 3 * 1032
    tier.put("p", "huge", b"h" * 10_000)
    assert tier.get("p", "huge") is None
    again = DiskTier(tmp_path / "t", 2 * 1032)
    assert again.total_bytes == 2 * 1032
    assert again.get("p", "d") == b"d" * 1000


def test_a_namespace_that_reads_much_takes_no_copy_of_another_within_its_part(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "t", 6 * 1032)
    for name in "abcd":
        tier.put("modest", name, bytes(1000))
    for number in range(50):
        tier.put("greedy", str(number), bytes(1000))
        assert tier.get("greedy", str(number)) is not None
    assert [name for name in "abcd" if tier.get("modest", name) is not None] == ["b", "c", "d"]
    assert [number for number in range(50) if tier.get("greedy", str(number)) is not None] == [47, 48, 49]
    tier.put("third", "a", bytes(1000))
    assert tier.get("third", "a") is not None
    for number in range(47, 50):
        tier.remove("greedy", str(number))
    assert tier.total_bytes == 1032 * len(list((tmp_path / "t").glob("*/*")))
    for name in "efghi":
        tier.put("modest", name, bytes(1000))
    assert tier.get("third", "a") is not None
    assert tier.total_bytes == 6 * 1032


class SmallDisk(Disk):
    def __init__(self, root: Path, size_bytes: int) -> None:
        self.left_bytes = lambda: size_bytes - sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    def free_bytes(self, path: Path) -> int:
        return self.left_bytes()


def test_copies_leave_room_for_blobs_that_arrive_on_a_disk_smaller_than_they_may_take(
    tmp_path: Path, bucket: AwayBucket
) -> None:
    disk, blobs = SmallDisk(tmp_path, 4 << 20), _blobs(16)
    assert sum(map(len, blobs)) > 4 << 20
    lab = Lab(tmp_path / "a")
    lab.kept_blobs = blobs_of(replace(lab.config(), blobs=WHERE), disk, bucket)
    with lab.open(disk) as store:
        digests = [_put(store, data) for data in blobs]
        bucket.is_away = True
        assert store.blobs.read(NS, digests[-1]) == blobs[-1]  # of its copy


def test_a_copy_for_which_a_disk_has_no_room_is_not_even_written(tmp_path: Path) -> None:
    """It would take the bytes that must stay free, for as long as it is written, with each blob that is read."""
    tier = DiskTier(tmp_path / "t", 1 << 20, SmallDisk(tmp_path, 4000), 3000)
    tier.put("p", "a", bytes(600))
    assert not (tmp_path / "t" / "p").exists()
    tier.put("p", "b", bytes(400))
    assert tier.get("p", "b") is not None


def test_a_look_gives_up_no_copy_of_a_store_that_runs(tmp_path: Path, bucket: AwayBucket) -> None:
    """As `kvasir keys list` does, which knows nothing of the store's own bytes for copies."""
    lab, [data, other] = _lab(tmp_path / "a", bucket), _blobs(2)
    with lab.open() as store:
        digests = [_put(store, each) for each in (data, other)]
        half = next((tmp_path / "a" / "tier").glob("*")) / ".new-0"
        half.write_bytes(b"half")
        looks = blobs_of(replace(lab.config(), blobs=WHERE, blob_tier_bytes=1), Disk(), bucket, only_looks=True)
        assert looks.of(NS).read(digests[0]) == data
        assert half.exists()
        bucket.is_away = True
        assert [store.blobs.read(NS, each) for each in digests] == [data, other]


def test_a_copy_that_does_not_verify_is_no_copy_and_a_crash_leaves_none(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "t", 1 << 20)
    tier.put("p", "a", b"a" * 100)
    path = tmp_path / "t" / "p" / "a"
    path.write_bytes(path.read_bytes()[:-1])
    assert tier.get("p", "a") is None
    assert not path.exists()
    half = path.with_name(".new-0")
    half.write_bytes(b"half")
    DiskTier(tmp_path / "t", 1 << 20)
    assert not half.exists()


def test_a_copy_with_other_bytes_than_its_digest_is_read_from_the_bucket(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, [data, other] = _lab(tmp_path / "a", bucket), _blobs(2)
    with lab.open() as store:
        digest, another = _put(store, data), _put(store, other)
        copy = tmp_path / "a" / "tier" / lab.blobs.of(NS).place / digest.hash
        whole, strange = copy.read_bytes(), copy.with_name(another.hash).read_bytes()
        flipped = whole[:9] + bytes([whole[9] ^ 1]) + whole[10:]
        for wrong in (flipped, whole[1:], whole[:-33] + whole[-32:], strange, b""):  # `strange` is whole in itself
            copy.write_bytes(wrong)
            assert store.blobs.read(NS, digest) == data
            assert copy.read_bytes() == whole
            bucket.is_away = True
            assert store.blobs.read(NS, digest) == data
            bucket.is_away = False


# --- settings ---


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "http://b/secret",
        "s3://",
        "s3://key:secret@b/x",
        "s3://b/x?k=secret",
        "s3://b/x#secret",
        "s3://[secret",
    ],
)
def test_an_address_that_is_none_of_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="s3://BUCKET/PREFIX") as refused:
        open_bucket(url, None)
    assert "secret" not in refused.value.message
    with pytest.raises(ConfigError, match="--blobs: expected s3://BUCKET/PREFIX") as refused_option:
        read_settings({"data_dir": "/data", "blobs": url or "x"})
    assert "secret" not in str(refused_option.value)


def test_a_file_of_credentials_is_its_owners_alone_and_no_message_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    file = tmp_path / "credentials"
    file.write_text("aws_access_key_id = key\naws_secret_access_key = hidden\nregion = eu-west-1\n")
    with pytest.raises(InvalidArgument, match="chmod 600"):
        open_bucket(WHERE, file)
    file.chmod(0o600)
    assert open_bucket(WHERE, file).where == WHERE
    file.write_text("hidden-secret\n")
    with pytest.raises(InvalidArgument, match="name = value") as refused:
        open_bucket(WHERE, file)
    assert "hidden" not in refused.value.message


def test_editions_of_a_blob_that_are_set_aside_at_one_moment_both_stay(tmp_path: Path, bucket: AwayBucket) -> None:
    lab, hash_ = _lab(tmp_path / "a", bucket), "ab" * 32
    assert lab.kept_blobs is not None
    blobs = lab.kept_blobs.of(NS)
    for name, data in ((hash_, b"whole"), (f"again/{hash_}/1", b"damaged")):
        bucket.put(f"{blobs.place}/{name}", data)
    asides = [blobs.set_aside(hash_, 1000, edition) for edition in (0, 1)]
    assert {bytes(data) for data, _ in blobs.unverified(hash_, 100)} == {b"whole", b"damaged"}
    assert blobs.list().asides == set(asides)
    assert [lab.kept_blobs.remove_aside(each) for each in asides] == [5, 7]
