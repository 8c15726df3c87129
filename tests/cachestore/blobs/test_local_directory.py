"""Blobs as files: who may read them, and what lies where one should."""

import os
import stat

import pytest
from kvasir.errors import DataLoss
from kvasir.formats.digest import Digest

from cachestore_svc.facts.records import BlobKind
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Lab, damaged, publish, write
from tests.made_models.synthetic import SMALL, SyntheticAgent


def a_block() -> tuple[Digest, bytes]:
    return next(iter(SyntheticAgent(SMALL, 1).turn(256).new_blobs.items()))


def test_files_are_0600_and_directories_0700(lab: Lab, store: Store) -> None:
    old = os.umask(0)
    try:
        write(store, *a_block(), BlobKind.TENSORS)
    finally:
        os.umask(old)
    for path in [lab.root, *lab.root.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_directory_where_a_blob_should_lie_is_damage_until_it_is_gone(lab: Lab, store: Store) -> None:
    digest, data = a_block()
    write(store, digest, data, BlobKind.TENSORS)
    path = lab.blob_files[digest.hash]
    path.unlink()
    path.mkdir()
    for _ in range(3):
        with pytest.raises(DataLoss) as lost:
            store.blobs.read(NS, digest)
        assert lost.value.metadata == {"digest": digest.hash}
    assert damaged(store, NS) == [digest]
    assert store.blobs.find_missing(NS, [digest]) == [digest]
    path.rmdir()
    write(store, digest, data, BlobKind.TENSORS)
    assert bytes(store.blobs.read(NS, digest)) == data
    assert damaged(store, NS) == []


def test_names_are_data_and_never_paths(lab: Lab, store: Store) -> None:
    for name in ("../../../tmp/x", "..", "a/b", "C:\\x", "A", "a", "日本"):
        publish(store, name, SyntheticAgent(SMALL, 1).turn(30), 0)
        assert store.agents.get(NS, name).agent_id == name
    names = {path.name for path in lab.root.rglob("*")}
    assert not names & {"..", "a", "A", "b", "x", "日本"}


@pytest.mark.parametrize(
    "strange",
    [
        "{shelf}/{other}",
        "{shelf}/{hash}\n{hash}",
        "{shelf}/{hash}\n",
        "{shelf}/\n{hash}",
        "{shelf}/{short}",
        "zz/{hash}",
    ],
)
def test_a_name_that_no_blob_has_is_listed_as_strange_beside_blobs(lab: Lab, store: Store, strange: str) -> None:
    digest, data = a_block()
    write(store, digest, data, BlobKind.TENSORS)
    shelf, hash_ = digest.hash[:2], digest.hash[:-1] + ("0" if digest.hash[-1] != "0" else "1")
    other = ("00" if shelf != "00" else "11") + hash_[2:]
    path = lab.directory_of(NS) / "blobs" / strange.format(shelf=shelf, hash=hash_, other=other, short=hash_[:-1])
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    listing = lab.blobs.of(NS).list()
    assert listing.blobs == {digest.hash}
    assert len(listing.strange) == 1
    path.unlink()
    lab.blob_files[digest.hash].with_name(f"{digest.hash}.part").write_bytes(b"")
    assert lab.blobs.of(NS).list().parts == {digest.hash}
