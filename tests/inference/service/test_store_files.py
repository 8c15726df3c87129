"""Blobs read as files of the store: the same bytes, without a call; and whatever is wrong there, the store is asked."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvasir.clients import AioStoreClient
from kvasir.formats.blob_place import blob_place
from kvasir.formats.digest import Digest

from inference_svc.memory.outcomes import MissReason
from inference_svc.memory.store.files import StoreFiles
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache
from tests.cachestore.service.running import RunningStore, publish, store_home
from tests.synthetic import SMALL, SyntheticAgent

TURN = SyntheticAgent(SMALL, 1).turn(256 * 3 + 10, is_prompt=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    with store_home(tmp_path / "h") as home:
        running = home.start()
        with running.client() as client:
            publish(client, "ada", TURN, 0)
        yield running


def read(store: RunningStore, *digests: Digest) -> tuple[list[bytes], MissReason | None, int]:
    """What an engine gets, why not more, and how many blobs the store itself sent for it."""

    async def ask() -> tuple[list[bytes], MissReason | None]:
        client = AioStoreClient.connect(store.address, retry_reads=False)
        cache = RemoteCache(client, "default", StoreFiles(store.data_dir, "default"))
        assert await cache.answers()
        blobs, miss = await cache.read_blobs(digests, Budget(5.0, 1.0, time.monotonic))
        await cache.close()
        return [bytes(blob) for blob in blobs], miss.reason if miss is not None else None

    with store.client() as client:
        before = client.get_stats().counters["blobs_read"]
        blobs, why = asyncio.run(ask())
        return blobs, why, client.get_stats().counters["blobs_read"] - before


def test_blobs_are_read_where_they_lie_and_the_store_sends_none(store: RunningStore) -> None:
    blobs, why, sent = read(store, *TURN.digests)
    assert blobs == [TURN.new_blobs[digest] for digest in TURN.digests]
    assert (why, sent) == (None, 0)


@pytest.mark.parametrize("wrong", ["gone", "cut", "a link", "a pipe"])
def test_what_is_no_such_file_is_asked_of_the_store(store: RunningStore, tmp_path: Path, wrong: str) -> None:
    path = blob_place(store.data_dir, "default", TURN.digests[1].hash)
    data = path.read_bytes()
    path.unlink()
    if wrong == "cut":
        path.write_bytes(data[:-1])
    elif wrong == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif wrong == "a pipe":
        os.mkfifo(path)
    blobs, why, _ = read(store, *TURN.digests)
    assert blobs == [TURN.new_blobs[TURN.digests[0]]]
    assert why in (MissReason.BLOB_DAMAGED, MissReason.BLOB_MISSING)


def test_a_flipped_bit_is_found_and_the_store_quarantines_the_blob(store: RunningStore) -> None:
    path = blob_place(store.data_dir, "default", TURN.digests[1].hash)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    blobs, why, _ = read(store, *TURN.digests)
    assert (len(blobs), why) == (1, MissReason.BLOB_DAMAGED)
    with store.client() as client:
        assert client.get_stats().damaged_blob_count == 1
        assert client.find_missing([TURN.digests[1]]) == [TURN.digests[1]]


def test_memory_of_a_file_is_used_again_once_nothing_refers_to_its_bytes(store: RunningStore) -> None:
    files, (first, second) = StoreFiles(store.data_dir, "default"), TURN.digests[:2]
    data = files.read(first)
    assert data is not None
    rows = np.frombuffer(data, np.uint16)[8:]
    address, expected = rows.ctypes.data, rows.tobytes()
    del data
    others = [files.read(second) for _ in range(20)]
    assert rows.tobytes() == expected, "it was read into while an array of it is in use"
    assert all(other is not None and bytes(other) == TURN.new_blobs[second] for other in others)
    del rows
    again = files.read(first)
    assert np.frombuffer(again or b"", np.uint16)[8:].ctypes.data == address
