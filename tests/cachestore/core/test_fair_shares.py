"""What one namespace may ask for: reservations, labels and pages are bounded, whatever is stored."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import InvalidArgument, ResourceExhausted
from kvasir.formats.digest import Digest

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.blobs.local_directory import LocalDirectory
from cachestore_svc.edge.messages import write_agent
from cachestore_svc.facts.records import AgentRecord, BlobKind
from cachestore_svc.index import listing
from cachestore_svc.index.sqlite import agents
from cachestore_svc.store.store import Store
from tests.cachestore.core.lab import MIB, NS, Lab, publish, write_all
from tests.made_models.synthetic import SMALL, SyntheticAgent


class SmallDisk(Disk):
    """A disk with 4 GiB free, always."""

    def free_bytes(self, path: Path) -> int:
        return 4 << 30


def test_promises_without_bytes_leave_room_for_other_namespaces(lab: Lab) -> None:
    with lab.open(SmallDisk()) as store:
        for number in range(4):
            store.blobs.open_writer("greedy", Digest(f"{number:064x}", 256 * MIB), BlobKind.TENSORS)
        with pytest.raises(ResourceExhausted) as refused:
            store.blobs.open_writer("greedy", Digest("ab" * 32, 1), BlobKind.TENSORS)
        assert refused.value.reason == "RESERVATIONS_FULL"
        write_all(store, SyntheticAgent(SMALL, 1).turn(256).new_blobs, "other")


def test_one_namespace_leaves_room_on_the_disk_whether_there_are_others_or_not(lab: Lab) -> None:
    """Without quotas one namespace could fill the disk down to the reserve, and the others wrote nothing any more."""
    settings: dict[str, object] = {"max_blob_bytes": 8 << 30, "free_disk_reserve_bytes": 512 * MIB}
    with lab.open(SmallDisk(), **settings) as store:
        store.blobs.open_writer("greedy", Digest("ab" * 32, 900 * MIB), BlobKind.TENSORS)
        with pytest.raises(ResourceExhausted) as refused:
            store.blobs.open_writer("greedy", Digest("cd" * 32, 2300 * MIB), BlobKind.TENSORS)
        assert refused.value.reason == "DISK_SHARE_FULL"
        assert set(refused.value.metadata) == {"held_bytes", "asked_bytes"}
        store.blobs.open_writer("greedy", Digest("cd" * 32, 2 << 30), BlobKind.TENSORS)
        store.blobs.open_writer("newcomer", Digest("ef" * 32, 512 * MIB), BlobKind.TENSORS)
    with lab.open(SmallDisk(), namespace_quota_bytes={"greedy": 4 << 30}, **settings) as store:
        store.blobs.open_writer("greedy", Digest("ab" * 32, 900 * MIB), BlobKind.TENSORS)
        store.blobs.open_writer("greedy", Digest("cd" * 32, 2300 * MIB), BlobKind.TENSORS)


def test_a_refused_reservation_tells_only_ones_own_numbers(lab: Lab) -> None:
    with lab.open(SmallDisk(), max_blob_bytes=256 * MIB) as store:
        for number in range(4):
            store.blobs.open_writer(NS, Digest(f"{number:064x}", 256 * MIB), BlobKind.TENSORS)
        with pytest.raises(ResourceExhausted) as refused:
            store.blobs.open_writer(NS, Digest("ab" * 32, 77), BlobKind.TENSORS)
        assert refused.value.reason == "RESERVATIONS_FULL"
        assert [word for word in refused.value.message.split() if word.isdigit()] == [str(1 << 30), "77"]


def test_a_full_disk_tells_neither_paths_nor_what_others_have(lab: Lab) -> None:
    with lab.open(SmallDisk(), free_disk_reserve_bytes=4 << 30) as store:
        with pytest.raises(ResourceExhausted) as refused:
            store.blobs.open_writer(NS, Digest("ab" * 32, MIB), BlobKind.TENSORS)
        assert refused.value.reason == "DISK_FULL"
        room = f"disk: no room for {MIB} bytes more beside what must stay free"
        assert refused.value.message == f"{room} (--free-disk-reserve-bytes)"
        assert refused.value.metadata == {"asked_bytes": str(MIB)}


def test_a_page_of_agents_ends_before_it_is_too_long_for_a_message(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_PAGE_BYTES", 32 << 10)  # a thirtieth of the agents that it would take
    publish(store, "a00", SyntheticAgent(SMALL, 2).turn(3), 0)
    names = [f"a{number:02}" for number in range(40)]
    labels = {f"{number:02}" + "漢" * 254: "漢" * 256 for number in range(2)}
    for name in names[1:]:
        store.agents.fork(NS, "a00", name)
    for name in names:
        store.agents.update(NS, name, labels=labels)
    listed: list[str] = []
    token = ""
    while True:
        page = store.agents.page(NS, page_token=token)
        assert sum(write_agent(agent).ByteSize() for agent in page.agents) <= 32 << 10
        listed += [agent.agent_id for agent in page.agents]
        token = page.next_page_token
        if not token:
            break
    assert listed == names


def test_another_namespace_is_answered_in_the_middle_of_a_long_page(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_AGENTS_AT_ONCE", 2)
    publish(store, "a0", SyntheticAgent(SMALL, 2).turn(3), 0)
    for number in range(1, 6):
        store.agents.fork(NS, "a0", f"a{number}")
    order: list[str] = []
    others = ThreadPoolExecutor(1)

    def noted(*given: Any) -> list[AgentRecord]:
        if not order:  # in the first operation of the page, on the thread of the index
            index = store._core.catalog
            others.submit(index.read, "other", lambda _: order.append("other"))
            while not len(index._reads):
                time.sleep(0.001)
        found = real(*given)
        order.extend(agent.agent_id for agent in found)
        return found

    real = agents._records_of
    monkeypatch.setattr(agents, "_records_of", noted)
    assert len(store.agents.page(NS).agents) == 6
    others.shutdown(wait=True)
    assert order.index("other") < order.index("a5")


def test_an_agents_labels_take_little_however_they_are_set(store: Store) -> None:
    """Rows are in no quota, forks are free, and a listing reads them on the one thread of the index."""
    publish(store, "a", SyntheticAgent(SMALL, 2).turn(3), 0)
    store.agents.update(NS, "a", labels={"first": "漢" * 256, "second": "漢" * 256, "third": "漢" * 256})
    with pytest.raises(InvalidArgument, match="at most 4096 bytes in all, got") as refused:
        store.agents.update(NS, "a", labels={f"{number}": "漢" * 256 for number in range(3)})
    assert refused.value.field == "labels"
    assert set(store.agents.get(NS, "a").labels) == {"first", "second", "third"}


def test_agents_are_requested_by_a_few_labels_only(store: Store) -> None:
    with pytest.raises(InvalidArgument) as refused:
        store.agents.page(NS, labels={f"k{number}": "v" for number in range(65)})
    assert refused.value.field == "labels"
    assert store.agents.page(NS, labels={f"k{number}": "v" for number in range(64)}).agents == ()


class FullDisk(Disk):
    """A disk that once takes no byte more."""

    is_full = False

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space")
        super().write(descriptor, data)


def test_a_write_that_found_no_room_names_no_directory(lab: Lab) -> None:
    disk = FullDisk()
    with lab.open(disk, ballast_bytes=0) as store:
        disk.is_full = True
        with pytest.raises(ResourceExhausted) as refused:
            write_all(store, SyntheticAgent(SMALL, 3).turn(256).new_blobs)
        assert refused.value.reason == "DISK_FULL"
        assert str(lab.root) not in refused.value.message


def test_a_namespace_waits_for_no_other_to_name_a_blob(tmp_path: Path) -> None:
    blobs, hash_, entered = LocalDirectory(tmp_path, Disk()), "ab" * 32, threading.Event()

    def name(namespace: str) -> None:
        with blobs.of(namespace).naming(hash_):
            entered.set()

    with blobs.of("a").naming(hash_):
        threading.Thread(target=name, args=("b",), daemon=True).start()
        assert entered.wait(60)
        entered.clear()
        threading.Thread(target=name, args=("a",), daemon=True).start()
        assert not entered.wait(0.1)
    assert entered.wait(60)
