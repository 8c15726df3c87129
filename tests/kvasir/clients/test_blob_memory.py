"""Memory for blobs is used again only once no view of it is left, and never shows what was there before."""

import random
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from kvasir.clients.blob_memory import BlobMemory
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FrameAssembler, frames_of
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket

MIB = 1 << 20


def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    memory = BlobMemory(64 * MIB)
    view = memory.take(2 * MIB)
    part, owner = view[5:9].toreadonly(), id(view.obj)
    del view
    assert id(memory.take(2 * MIB).obj) != owner
    del part
    again = [memory.take(size) for size in (2 * MIB - 100, 2 * MIB)]
    assert owner in [id(each.obj) for each in again]
    assert [len(each) for each in again] == [2 * MIB - 100, 2 * MIB]


def test_equal_bytes_are_not_taken_for_the_same_memory() -> None:
    memory = BlobMemory(64 * MIB)
    held = memory.take(MIB)
    free = id(memory.take(MIB).obj)
    assert [id(memory.take(MIB).obj) for _ in range(3)] == [free] * 3
    assert id(held.obj) != free


def test_new_memory_is_not_touched_before_somebody_writes_it() -> None:
    """Whoever touches it does so under the interpreter's lock: 85 MB of a restore stopped an engine for 70 ms."""
    memory = BlobMemory(512 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    views = [memory.take(64 * MIB) for _ in range(4)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
    views[0][:] = bytes(64 * MIB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 100, "such pages are counted here"


@pytest.mark.parametrize(("most_bytes", "ready"), [(8 * MIB, 4), (64 * MIB, 8), (MIB, 0)])
def test_memory_that_was_made_ready_has_its_pages(most_bytes: int, ready: int) -> None:
    memory = BlobMemory(16 * MIB)
    memory.make_ready(2 * MIB, most_bytes)
    assert len(memory._known) == ready
    views, data = [memory.take(2 * MIB) for _ in range(ready)], b"x" * (2 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for view in views:
        view[:] = data
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100
    assert len(memory._known) == ready


def test_small_memory_is_not_made_ready() -> None:
    memory = BlobMemory(16 * MIB)
    memory.make_ready(100, 1 << 60)
    assert not memory._known


def test_no_more_is_kept_than_the_room_for_it() -> None:
    memory = BlobMemory(4 * MIB)
    held = [memory.take(MIB) for _ in range(9)]
    assert len({id(each.obj) for each in held}) == 9
    assert [id(each) for each in memory._known] == [id(each.obj) for each in held[:4]]
    del held[2]
    larger = memory.take(MIB * 5 // 2)  # of the smaller ones those go that nobody holds
    assert sum(map(len, memory._known)) <= 4 * MIB
    assert id(larger.obj) not in map(id, memory._known)
    held.clear()
    larger = memory.take(MIB * 5 // 2)
    assert [id(each) for each in memory._known] == [id(larger.obj)]


Read = Callable[[str], memoryview]


def from_a_bucket(objects: dict[str, bytes]) -> Read:
    bucket = Bucket(MemoryStore(), "s3://bucket")
    for name, data in objects.items():
        bucket.put(name, data)
    return lambda name: bucket.get(name, 3 * MIB)


def from_frames(objects: dict[str, bytes]) -> Read:
    memory = BlobMemory(8 * MIB)

    def read(name: str) -> memoryview:
        digest = Digest.of(objects[name])
        assembler = FrameAssembler([digest], memory.take)
        *rest, last = frames_of(digest, objects[name])
        assert [assembler.add(frame) for frame in rest] == [None] * len(rest)
        whole = assembler.add(last)
        assert whole is not None
        return whole[1]

    return read


@pytest.mark.long(2)
@pytest.mark.parametrize("source", [from_a_bucket, from_frames])
def test_readers_beside_each_other_get_their_own_bytes(source: Callable[[dict[str, bytes]], Read]) -> None:
    chance = random.Random(7)
    objects = {str(number): chance.randbytes(chance.randrange(3 * MIB)) for number in range(12)}
    read = source(objects)

    def look(seed: int) -> list[str]:
        wrong = list[str]()
        names, held = random.Random(seed), list[tuple[str, memoryview]]()
        for _ in range(10):
            name = names.choice(list(objects))
            held = [*held[-2:], (name, read(name))]  # others are read while these are looked at
            wrong.extend(each for each, data in held if data != objects[each])
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(look, range(4))) == [[]] * 4


def test_frames_of_any_sizes_give_the_blob_from_memory_that_grows() -> None:
    chance, memory = random.Random(3), BlobMemory(8 * MIB)
    memory.take(3 * MIB)[:] = b"\xff" * (3 * MIB)
    for size in (0, 1, 70, 5000, 2 * MIB + 5):
        data = chance.randbytes(size)
        digest = Digest.of(data)
        assembler = FrameAssembler([digest], memory.take)
        cuts = sorted({0, size, *(chance.randrange(size + 1) for _ in range(9)), *range(0, size, MIB // 2)})
        [first, *_] = frames_of(digest, data)
        found = assembler.add(first) if size == 0 else None
        for begin, end in pairwise(cuts):
            frame = type(first)(offset=begin, data=data[begin:end])
            if begin == 0:
                frame.digest.CopyFrom(first.digest)
            found = assembler.add(frame)
        assert found == (digest, data)
