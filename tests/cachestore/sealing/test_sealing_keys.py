"""Keys of sealed namespaces: missing, replaced at any moment, destroyed, damaged; and what none of it costs others."""

import os
import shutil
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.formats.blob_place import namespace_place
from kvasir.formats.block_hash import kv_identity_hash

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.facts.records import BlobKind
from cachestore_svc.sealing.key_files import KeyFiles
from cachestore_svc.sealing.keys import KeyRecord, MasterKey
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish, upload
from tests.cachestore.sealing.sealed_lab import NEW, PLAIN_NS, care, left_behind
from tests.made_models.synthetic import SMALL, SyntheticAgent

WRONG = MasterKey(b"w" * 32, "the wrong file")


@pytest.mark.parametrize(
    ("masters", "words"),
    [([], r"no master key was given.*KVASIR_STORE_SEAL_KEY_FILE"), ([WRONG], "the wrong file is another")],
)
def test_without_its_key_a_namespace_is_shut_and_the_others_are_served(
    lab: Lab, masters: list[MasterKey], words: str
) -> None:
    ours, theirs = left_behind(lab)
    right, lab.masters = lab.masters, masters
    with lab.open(grace_period_s=0.0) as store:
        for call in (
            lambda: store.agents.get(NS, "ada"),
            lambda: store.blobs.read(NS, ours.manifest_digest),
            lambda: store.blobs.open_writer(NS, ours.manifest_digest, BlobKind.MANIFEST),
            lambda: store.leases.acquire(NS, "ada", kv_identity_hash(SMALL), "engine-1"),
            lambda: list(store.care.verify(NS)),
        ):
            with pytest.raises(FailedPrecondition, match=f"'{NS}' is sealed.*{words}") as refused:
                call()
            assert (refused.value.reason, refused.value.metadata) == ("NAMESPACE_SEALED", {})
        shut = store.blobs._core.writers.backend.of(NS)
        before = sorted(lab.directory_of(NS).rglob("*"))
        for work in (lambda: shut.prepare(["00" * 32]), lambda: shut.begin("00" * 32)):
            with pytest.raises(FailedPrecondition, match="is sealed"):
                work()
        assert sorted(lab.directory_of(NS).rglob("*")) == before, "no directory of a plain name"
        assert [each.reason for each in store.statistics.ailments()] == ["NAMESPACE_SEALED"]
        assert_restores(store, store.snapshots.get(PLAIN_NS, "bob"), theirs, PLAIN_NS)
        # What can be seen is looked after: nothing is wrong, and nothing is garbage.
        assert store.care.check(repair=True).is_clean
        assert sum(progress.blobs_checked for progress in store.care.scrub()) == len(theirs.digests) + 1
        for _ in range(3):
            assert store.care.collect_garbage().blobs_swept == 0
        file = next((lab.directory_of(NS) / "blobs").glob("*/*"))
        file.write_bytes(file.read_bytes()[:-1])
        assert [finding.problem for finding in store.care.check().findings] == ["WRONG_SIZE"]
        file.unlink()
        assert [finding.problem for finding in store.care.check().findings] == ["MISSING_FILE"]
    lab.masters = right
    with lab.open() as store:
        assert store.agents.get(NS, "ada").agent_id == "ada"


def test_garbage_of_a_shut_namespace_is_collected(lab: Lab) -> None:
    with lab.open() as store:
        upload(store, SyntheticAgent(SMALL, 3).turn(300))
    lab.masters = []
    with lab.open(grace_period_s=0.0) as store:
        lab.clock.pass_s(10_000)
        swept = [store.care.collect_garbage().blobs_swept for _ in range(2)]
        assert swept[1] == 3
        assert not list((lab.directory_of(NS) / "blobs").glob("*/*"))


def bytes_of_files(lab: Lab) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in lab.root.rglob("*") if path.is_file() and "keys" not in path.parts}


def test_a_master_key_is_replaced_without_writing_a_blob(lab: Lab) -> None:
    ours, _ = left_behind(lab)
    before = bytes_of_files(lab)
    care(lab).rotate(lab.masters, NEW)
    assert bytes_of_files(lab) == before
    assert [each.master_ids for each in care(lab).records()] == [(NEW.id,)]
    old, lab.masters = lab.masters, [NEW]
    with lab.open() as store:
        assert_restores(store, store.snapshots.get(NS, "ada"), ours)
    with pytest.raises(FailedPrecondition, match=NEW.id):
        care(lab).rotate(old, WRONG)


def test_what_a_replaced_or_destroyed_key_left_is_written_over(lab: Lab) -> None:
    def wrapped_in(record: KeyRecord) -> list[bytes]:
        return [each.key.hex().encode() for each in record.wrapped]

    path = lab.root / "keys" / namespace_place(NS)
    half = path.with_name(path.name + ".new")
    [record] = [each for each in KeyFiles(lab.root, Disk()).read().values() if each]
    half.write_bytes(path.read_bytes())  # a crash of an earlier change
    kept = [os.open(each, os.O_RDONLY) for each in (path, half, path.with_name(path.name + ".copy"))]
    try:
        care(lab).rotate(lab.masters, NEW)
        [newer] = [each for each in KeyFiles(lab.root, Disk()).read().values() if each]
        kept.append(os.open(path, os.O_RDONLY))
        care(lab).erase(NS)
        left = [os.pread(descriptor, 1 << 16, 0) for descriptor in kept]
    finally:
        for descriptor in kept:
            os.close(descriptor)
    assert not [key for data in left for key in (*wrapped_in(record), *wrapped_in(newer)) if key in data]


class FailingDisk(Disk):
    """Fails at one of its effects on key files."""

    def __init__(self, death: int) -> None:
        self.left = death

    def _effect(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "it failed")

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        self._effect()
        super().write(descriptor, data)

    def rename(self, source: Path, target: Path) -> None:
        self._effect()
        super().rename(source, target)
        self._effect()


def opens_all(lab: Lab, master: MasterKey) -> bool:
    records = KeyFiles(lab.root, Disk()).read().values()
    return all(record and master.id in [each.master_id for each in record.wrapped] for record in records)


def test_a_rotation_that_ends_anywhere_leaves_one_master_key_that_opens_all(lab: Lab, tmp_path: Path) -> None:
    lab.seal("second", "third")
    old = lab.masters
    for death in range(1, 100):
        copy = Lab(tmp_path / f"copy-{death}", masters=[*old, NEW])
        shutil.copytree(lab.root, copy.root)
        disk = FailingDisk(death)
        try:
            care(copy, disk).rotate(old, NEW)
        except KvasirError:
            assert opens_all(copy, old[0]) or opens_all(copy, NEW)
            care(copy).rotate(old, NEW)
        else:
            assert disk.left > 0
            break
        found = KeyFiles(copy.root, Disk()).read()
        assert [[each.master_id for each in record.wrapped] for record in found.values() if record] == [[NEW.id]] * 3
    assert death > 20


def test_a_destroyed_key_is_gone_from_the_disk_and_the_namespace_never_opens_again(lab: Lab) -> None:
    left_behind(lab)
    [record] = [each for each in KeyFiles(lab.root, Disk()).read().values() if each]
    gone = care(lab).erase(NS)
    assert (gone.files, gone.bytes > 1000, gone.master_ids) == (3, True, ())
    wrapped = record.wrapped[0].key.hex().encode()
    assert not [path for path in lab.root.rglob("*") if path.is_file() and wrapped in path.read_bytes()]
    with lab.open() as store:
        for _ in range(2):
            with pytest.raises(FailedPrecondition, match="its key was destroyed") as refused:
                store.agents.get(NS, "ada")
            assert int(refused.value.metadata["erased_unix_ms"]) > 0, "engines drop what they have of it"
        assert store.agents.get(PLAIN_NS, "bob")
    with pytest.raises(FailedPrecondition, match="in use, or sealed already"):
        care(lab).seal(NS, NEW)


def test_one_damaged_copy_of_a_key_is_repaired_and_two_shut_the_namespace(lab: Lab) -> None:
    ours, _ = left_behind(lab)
    path = lab.root / "keys" / namespace_place(NS)
    whole = path.read_bytes()
    for harmed in (path, path.with_name(path.name + ".copy")):
        harmed.write_bytes(whole[:-10] + b"x" + whole[-9:])
        with lab.open() as store:
            assert_restores(store, store.snapshots.get(NS, "ada"), ours)
        assert harmed.read_bytes() == whole
    shutil.rmtree(path.parent)
    with lab.open() as store:
        with pytest.raises(FailedPrecondition, match="is missing or damaged"):
            publish(store, "ada", SyntheticAgent(SMALL, 4).turn(30), 1)


def test_a_namespace_that_held_anything_is_not_sealed(lab: Lab) -> None:
    with lab.open() as store:
        publish(store, "bob", SyntheticAgent(SMALL, 2).turn(30), 0, PLAIN_NS)
        store.agents.delete(PLAIN_NS, "bob")
        store.leases.acquire("leased", "ada", kv_identity_hash(SMALL), "engine-1")
    for namespace in (NS, PLAIN_NS, "leased"):
        with pytest.raises(FailedPrecondition) as refused:
            care(lab).seal(namespace, NEW)
        assert refused.value.reason == "NAMESPACE_IN_USE"
    mark = lab.directory_of("third") / "sealed"
    mark.parent.mkdir()
    mark.touch()  # a crash before the key was written
    assert care(lab).seal("third", NEW).master_ids == (NEW.id,)
