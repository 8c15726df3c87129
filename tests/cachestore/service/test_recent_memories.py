"""Behind a start a store reads the memories that were used last, as far as they fit; a missing blob ends nothing."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvasir.server import machine
from kvasir_bench.memory_path.machine import cached_share, drop_cached

from cachestore_svc.blobs.disk import Disk, StrPath
from cachestore_svc.store import reading_ahead
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.reading_ahead import ReadingAhead
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from cachestore_svc.upkeep import care
from tests.cachestore.core.lab import Lab, publish
from tests.cachestore.service.running import StoreHome, store_home
from tests.cachestore.service.running import publish as publish_over_grpc
from tests.made_models.synthetic import SMALL, SyntheticAgent, SyntheticSnapshot

LENGTHS = {"ada": 900, "bob": 600, "eve": 300}
MEMORIES = {name: SyntheticAgent(SMALL, size).turn(size, is_prompt=True) for name, size in LENGTHS.items()}


class SeenDisk(Disk):
    """The names of blobs that are read, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.read_names: list[str] = []

    def read(self, path: StrPath, max_bytes: int) -> memoryview:
        if "/blobs/" in str(path):
            self.read_names.append(Path(path).name)
        return super().read(path, max_bytes)


def size_of(memory: SyntheticSnapshot) -> int:
    return len(memory.manifest_bytes) + sum(digest.size_bytes for digest in memory.digests)


def names_of(memory: SyntheticSnapshot) -> list[str]:
    return [digest.hash for digest in (memory.manifest_digest, *memory.digests)]


def fill(lab: Lab, *namespaces: str) -> None:
    """A memory in each of these namespaces in turn, each used a minute after the one before."""
    with lab.open() as store:
        for (name, memory), namespace in zip(MEMORIES.items(), namespaces, strict=True):
            publish(store, name, memory, 0, namespace)
            lab.clock.pass_s(60)


def read_ahead(store: Store, most_bytes: int | None, resumed: Callable[[], int] = lambda: 0) -> None:
    threads = StoreThreads()
    try:
        asyncio.run(ReadingAhead(AioStore(store, threads), most_bytes, resumed).run())
    finally:
        threads.close()


def test_memories_used_last_are_read_as_far_as_they_fit_and_the_smallest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_ahead, "_READERS", 1)
    lab, disk = Lab(tmp_path), SeenDisk()
    fill(lab, "a", "b", "a")
    room = size_of(MEMORIES["ada"]) + size_of(MEMORIES["eve"])
    with lab.open(disk) as store:
        store.snapshots.get("a", "ada")  # used again
        store.care.used_last()
        for most_bytes, expected in (
            (room, ("eve", "ada")),
            (room - 1, ("ada",)),
            (size_of(MEMORIES["eve"]), ("eve",)),
        ):
            disk.read_names.clear()
            read_ahead(store, most_bytes)
            names = [name for each in expected for name in names_of(MEMORIES[each])]
            assert sorted(disk.read_names) == sorted(names)
            assert set(disk.read_names[:2]) <= set(names_of(MEMORIES[expected[0]]))


def test_a_memory_that_somebody_wants_has_the_disk_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_ahead, "_AT_ONCE", 1)
    monkeypatch.setattr(reading_ahead, "_READERS", 1)
    rests = list[tuple[float, int]]()

    async def rest(seconds: float) -> None:
        rests.append((seconds, len(disk.read_names)))

    lab, disk = Lab(tmp_path), SeenDisk()
    fill(lab, "a", "a", "a")
    resumed = iter([0, 1, 2, 2])  # before the first blob, behind it, behind two rests
    with lab.open(disk) as store:
        disk.read_names.clear()
        monkeypatch.setattr(asyncio, "sleep", rest)
        read_ahead(store, None, lambda: next(resumed, 2))
    assert rests == [(1.0, 1), (1.0, 1)]
    assert sorted(disk.read_names) == sorted(name for memory in MEMORIES.values() for name in names_of(memory))


def test_a_container_has_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, disk = Lab(tmp_path / "data"), SeenDisk()
    fill(lab, "a", "a", "a")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CONTAINER", limit)
    for text, memories in ((str(8 * size_of(MEMORIES["eve"])), 1), ("max", 3)):
        limit.write_text(text + "\n")
        with lab.open(disk) as store:
            disk.read_names.clear()
            read_ahead(store, None)
        assert len(disk.read_names) == sum(len(names_of(memory)) for memory in list(MEMORIES.values())[-memories:])


def test_a_blob_that_many_share_is_read_once_and_nothing_when_nothing_may_be(tmp_path: Path) -> None:
    lab, disk = Lab(tmp_path), SeenDisk()
    fill(lab, "a", "a", "a")
    with lab.open(disk) as store:
        publish(store, "twin", MEMORIES["eve"], 0, "a")
        disk.read_names.clear()
        read_ahead(store, 0)
        assert not disk.read_names
        read_ahead(store, None)
    assert sorted(disk.read_names) == sorted(name for memory in MEMORIES.values() for name in names_of(memory))


def test_of_many_namespaces_no_more_memories_are_looked_at_than_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(care, "_USED_LAST", 2)
    lab = Lab(tmp_path)
    fill(lab, "a", "b", "c")
    with lab.open() as store:
        found = [(namespace, manifest) for namespace, manifest, _ in store.care.used_last()]
    assert found == [(namespace, MEMORIES[name].manifest_digest) for namespace, name in (("c", "eve"), ("b", "bob"))]


def test_lost_and_longer_blobs_end_nothing_and_are_no_damage_yet(tmp_path: Path) -> None:
    lab, disk = Lab(tmp_path), SeenDisk()
    fill(lab, "a", "a", "a")
    lost, longer = MEMORIES["eve"].digests[:2]
    with lab.open(disk) as store:
        lab.file_of(lost, "a").unlink()
        with lab.file_of(longer, "a").open("ab") as file:
            file.write(b"more")
        disk.read_names.clear()
        read_ahead(store, None)
        assert set(names_of(MEMORIES["ada"])) <= set(disk.read_names)
        assert not list(store.care.known_damage())


def test_sealed_memories_are_read_as_they_lie_and_not_without_their_key(tmp_path: Path) -> None:
    lab, disk = Lab(tmp_path).seal("a"), SeenDisk()
    fill(lab, "a", "b", "a")
    sealed = [lab.file_of(digest, "a").name for digest in MEMORIES["eve"].digests]
    for masters, are_read in ((lab.masters, True), ((), False)):
        lab.masters = masters
        with lab.open(disk) as store:
            disk.read_names.clear()
            read_ahead(store, None)
        assert set(names_of(MEMORIES["bob"])) <= set(disk.read_names)
        assert set(sealed) <= set(disk.read_names) if are_read else not set(sealed) & set(disk.read_names)


@pytest.fixture
def home_on_disk() -> Iterator[StoreHome]:
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as root, store_home(Path(root) / "h") as home:
        yield home


def test_a_store_that_starts_has_its_memories_in_the_page_cache(home_on_disk: StoreHome) -> None:
    home, memory = home_on_disk, MEMORIES["ada"]
    with home.start().client() as client:
        publish_over_grpc(client, "ada", memory, 0)
    home.started[-1].stop()
    files = [path for path in home.data_dir.rglob("*") if path.name in names_of(memory)]
    for options, is_cached in ((("--read-ahead-bytes", "0"), False), ((), True)):
        drop_cached(files)
        if cached_share(files) > 0.1:
            pytest.skip("this file system keeps files that it should forget")
        drop_cached(files)  # to look at a page has the system read it
        store = home.start(*options)
        give_up = time.monotonic() + 30
        while "read_ahead.done" not in store.log and time.monotonic() < give_up:
            time.sleep(0.02)
        assert (cached_share(files) > 0.9) is is_cached, store.log
        assert store.stop() == 0
