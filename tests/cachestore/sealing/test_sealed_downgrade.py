"""What is deleted from a data directory never makes a sealed namespace a plain one."""

import shutil
from itertools import combinations
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition
from kvasir.formats.blob_place import namespace_place

from cachestore_svc.__main__ import open_store
from cachestore_svc.config import read_settings
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.recovering import recover
from cachestore_svc.sealing.sealed_list import add_to_list, read_list
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import NS, Chance, Lab, assert_restores, publish
from tests.cachestore.sealing.canaries import found_in, secrets_of
from tests.cachestore.sealing.sealed_lab import NEW, PLAIN_NS, care, left_behind
from tests.made_models.synthetic import SMALL, SyntheticAgent

TRACES = ("record", "copy", "mark")
LATER = SyntheticAgent(SMALL, 4).turn(300)


def traces(lab: Lab) -> dict[str, Path]:
    """What says in the data directory that the namespace is sealed."""
    record = lab.root / "keys" / namespace_place(NS)
    return {"record": record, "copy": Path(f"{record}.copy"), "mark": lab.directory_of(NS) / "sealed"}


def delete(lab: Lab, names: tuple[str, ...] = TRACES) -> None:
    for name in names:
        traces(lab)[name].unlink()


def refuses_to_write(store: Store) -> None:
    with pytest.raises(FailedPrecondition, match=f"'{NS}' is sealed: its key record .* is missing") as refused:
        publish(store, "late", LATER, 0)
    assert refused.value.reason == "NAMESPACE_SEALED"


@pytest.mark.parametrize(
    "deleted",
    [
        pytest.param(each, id="-".join(each), marks=() if len(each) > 2 or each == TRACES[:1] else pytest.mark.long(2))
        for count in (1, 2, 3)
        for each in combinations(TRACES, count)
    ],
)
def test_one_copy_of_the_record_brings_all_back_and_without_any_the_namespace_is_shut(
    lab: Lab, deleted: tuple[str, ...]
) -> None:
    ours, _ = left_behind(lab)
    delete(lab, deleted)
    for _ in range(2):
        with lab.open() as store:
            if {"record", "copy"} <= set(deleted):
                refuses_to_write(store)
                assert [each.reason for each in store.statistics.ailments()] == ["NAMESPACE_SEALED"]
                assert store.agents.get(PLAIN_NS, "bob")
            else:
                assert_restores(store, store.snapshots.get(NS, "ada"), ours)
                assert all(path.exists() for path in traces(lab).values())
    assert found_in(lab.root, secrets_of(LATER)) == []


def test_the_index_alone_knows_that_a_namespace_without_a_file_was_sealed(lab: Lab) -> None:
    lab.open().close()
    delete(lab)
    with lab.open() as store:
        refuses_to_write(store)


def test_the_mark_alone_knows_it_before_the_first_start(lab: Lab) -> None:
    delete(lab, ("record", "copy"))
    with lab.open() as store:
        refuses_to_write(store)


@pytest.mark.parametrize("lost", [("kvasir.sqlite3",), ("kvasir.sqlite3", "journal")])
def test_an_index_is_not_built_again_from_sealed_files_as_if_they_were_plain(lab: Lab, lost: tuple[str, ...]) -> None:
    left_behind(lab)
    delete(lab)
    for name in lost:
        (lab.root / name).unlink()
    with pytest.raises(FailedPrecondition, match=f"'{NS}' is sealed: its key record"):
        recover(lab.config(), Means(lab.clock, Chance(500)), [NS, PLAIN_NS], lambda *_: None, lab.masters)


def test_in_an_emptied_directory_what_the_owner_lists_is_refused_until_it_is_sealed_again(lab: Lab) -> None:
    left_behind(lab)
    shutil.rmtree(lab.root)
    with lab.open(sealed_namespaces=(NS,)) as store:
        refuses_to_write(store)
        publish(store, "bob", SyntheticAgent(SMALL, 2).turn(30), 0, PLAIN_NS)
    lister = care(lab, sealed_namespaces=(NS,))
    with pytest.raises(FailedPrecondition, match=f"'{NS}' is sealed: its key record"):
        lister.records()
    assert care(lab, sealed_namespaces=(NS,)).seal(NS, NEW).namespace == NS
    lab.masters = [NEW]
    with lab.open(sealed_namespaces=(NS,)) as store:
        publish(store, "late", LATER, 0)
    assert found_in(lab.root, secrets_of(LATER)) == []


def test_the_list_is_read_with_the_settings_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list"
    settings = read_settings({"data_dir": tmp_path, "sealed_file": path})
    assert settings.store_config().sealed_namespaces == ()
    add_to_list(path, ["work", "a b"])
    add_to_list(path, ["home", "work"])
    assert settings.store_config().sealed_namespaces == ("a b", "home", "work")
    path.chmod(0o622)
    with pytest.raises(FailedPrecondition, match=r"list of sealed namespaces.*chmod 600"):
        settings.store_config()
    path.chmod(0o600)
    path.write_text("x" * 300)
    with pytest.raises(FailedPrecondition, match=r"list of sealed namespaces.*expected 1 to 256 bytes"):
        settings.store_config()


def test_a_start_adds_sealed_namespaces_that_the_list_lacks(lab: Lab, tmp_path: Path) -> None:
    """A crash between the key's record and the list, or a namespace of an older Kvasir."""
    lab.open().close()
    path = tmp_path / "list"
    open_store(read_settings({"data_dir": lab.root, "sealed_file": path})).close()
    assert read_list(path) == (NS,)
