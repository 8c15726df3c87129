"""What one namespace may ask for: reservations, labels and pages are bounded, whatever is stored."""

import errno
from pathlib import Path

import pytest
from kvasir.digest import Digest
from kvasir.errors import InvalidArgument, ResourceExhausted

from cachestore_svc.disk import Disk
from cachestore_svc.messages import write_agent
from cachestore_svc.records import BlobKind
from cachestore_svc.store import Store
from tests.cachestore.core.lab import MIB, NS, Lab, publish, write_all
from tests.synthetic import SMALL, SyntheticAgent


class SmallDisk(Disk):
    """A disk with 4 GiB free, always."""

    def free_bytes(self, path: Path) -> int:
        return 4 << 30


def test_promises_without_bytes_leave_room_for_other_namespaces(lab: Lab) -> None:
    with lab.open(SmallDisk()) as store:
        for number in range(4):
            store.open_writer("greedy", Digest(f"{number:064x}", 256 * MIB), BlobKind.TENSORS)
        with pytest.raises(ResourceExhausted) as refused:
            store.open_writer("greedy", Digest("ab" * 32, 1), BlobKind.TENSORS)
        assert refused.value.reason == "RESERVATIONS_FULL"
        write_all(store, SyntheticAgent(SMALL, 1).turn(256).new_blobs, "other")


def test_a_full_disk_tells_neither_paths_nor_what_others_have(lab: Lab) -> None:
    with lab.open(SmallDisk(), free_disk_reserve_bytes=4 << 30) as store:
        with pytest.raises(ResourceExhausted) as refused:
            store.open_writer(NS, Digest("ab" * 32, MIB), BlobKind.TENSORS)
        assert refused.value.reason == "DISK_FULL"
        assert refused.value.message == f"disk: no room for {MIB} bytes more beside what must stay free"
        assert refused.value.metadata == {"asked_bytes": str(MIB)}


def test_a_page_of_agents_ends_before_it_is_too_long_for_a_message(store: Store) -> None:
    publish(store, "a00", SyntheticAgent(SMALL, 2).turn(3), 0)
    names = [f"a{number:02}" for number in range(40)]
    labels = {f"{number:02}" + "漢" * 254: "漢" * 256 for number in range(64)}
    for name in names[1:]:
        store.fork_agent(NS, "a00", name)
    for name in names:
        store.update_agent(NS, name, labels=labels)
    listed: list[str] = []
    token = ""
    while True:
        page = store.list_agents(NS, page_token=token)
        assert sum(write_agent(agent).ByteSize() for agent in page.agents) <= 2 * MIB
        listed += [agent.agent_id for agent in page.agents]
        token = page.next_page_token
        if not token:
            break
    assert listed == names


def test_agents_are_asked_for_by_a_few_labels_only(store: Store) -> None:
    with pytest.raises(InvalidArgument) as refused:
        store.list_agents(NS, labels={f"k{number}": "v" for number in range(65)})
    assert refused.value.field == "labels"
    assert store.list_agents(NS, labels={f"k{number}": "v" for number in range(64)}).agents == ()


class FullDisk(Disk):
    """A disk that takes no byte more."""

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space")


def test_a_write_that_found_no_room_names_no_directory(lab: Lab) -> None:
    with lab.open(FullDisk(), ballast_bytes=0) as store:
        with pytest.raises(ResourceExhausted) as refused:
            write_all(store, SyntheticAgent(SMALL, 3).turn(256).new_blobs)
        assert refused.value.reason == "DISK_FULL"
        assert str(lab.root) not in refused.value.message
