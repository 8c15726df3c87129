"""Memory for objects is used again only once nobody has a view of it, and never shows what was there before."""

import random
import threading
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from cachestore_svc.blobs.bucket.bucket import Bucket
from cachestore_svc.blobs.bucket.read_buffers import ReadBuffers

MIB = 1 << 20


def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    buffers = ReadBuffers()
    view = buffers.take(2 * MIB)
    part, owner = view[5:9].toreadonly(), id(view.obj)
    del view
    assert id(buffers.take(2 * MIB).obj) != owner
    del part
    again = [buffers.take(size) for size in (2 * MIB - 100, 2 * MIB)]
    assert owner in [id(each.obj) for each in again]
    assert [len(each) for each in again] == [2 * MIB - 100, 2 * MIB]


def test_equal_bytes_are_not_taken_for_the_same_memory() -> None:
    buffers = ReadBuffers()
    lent = buffers.take(MIB)
    free = id(buffers.take(MIB).obj)
    for _ in range(3):
        assert id(buffers.take(MIB).obj) == free
    assert id(lent.obj) != free


def test_no_more_is_kept_than_the_room_for_it() -> None:
    buffers = ReadBuffers(4 * MIB)
    lent = [buffers.take(MIB) for _ in range(9)]
    assert len({id(each.obj) for each in lent}) == 9
    known = list(buffers._known)
    assert len(known) == 4
    assert all(each is view.obj for each, view in zip(known, lent[-4:], strict=True))
    assert len(buffers.take(5 * MIB)) == 5 * MIB
    assert list(buffers._known) == []


@pytest.mark.parametrize("most", [1 << 40, 3 * MIB])
def test_readers_beside_each_other_get_their_own_bytes(most: int, tmp_path: Path) -> None:
    bucket, chance = Bucket(MemoryStore(), "s3://bucket"), random.Random(7)
    objects = {str(number): chance.randbytes(chance.randrange(4 * MIB)) for number in range(12)}
    for name, data in objects.items():
        bucket.put(name, data)
    wrong = list[str]()

    def read(seed: int) -> None:
        names, held = random.Random(seed), list[tuple[str, memoryview]]()
        for _ in range(10):
            name = names.choice(list(objects))
            held = [*held[-2:], (name, bucket.get(name, most))]  # others are read while these are looked at
            wrong.extend(each for each, data in held if data != objects[each][:most])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
