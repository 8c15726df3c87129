"""Blobs read as files of the store: the same bytes, without a call; and whatever is wrong there, the store is asked."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvasir.clients import AioStoreClient, blob_memory
from kvasir.formats import manifest as manifests
from kvasir.formats.blob_place import blob_place
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.shared_room import SharedRoom

from inference_svc.memory.outcomes import MissReason
from inference_svc.memory.store import file_reading
from inference_svc.memory.store import files as reads
from inference_svc.memory.store.connection import StoreClients
from inference_svc.memory.store.files import StoreFiles, kept_bytes
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.reading import MOST_BYTES
from inference_svc.memory.store.remote_cache import RemoteCache
from tests.cachestore.service.running import RunningStore, publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent
from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 8}
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
        cache = RemoteCache(StoreClients(client, client, client), "default", StoreFiles(store.data_dir, "default"))
        assert await cache.connection.answers()
        blobs, miss = await cache.blobs.read_blobs(digests, Budget(5.0, 1.0, time.monotonic))
        await cache.connection.close()
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


def test_memory_of_a_file_is_used_again_once_nothing_refers_to_its_bytes(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_memory, "_LEAST_BYTES", 1)
    files, (first, second) = StoreFiles(store.data_dir, "default"), TURN.digests[:2]
    data = files.begin(first).data.result()
    assert data is not None
    rows = np.frombuffer(data, np.uint16)[8:]
    address, expected = rows.ctypes.data, rows.tobytes()
    del data
    others = [files.begin(second).data.result() for _ in range(20)]
    assert rows.tobytes() == expected, "it was read into while an array of it is in use"
    assert all(other is not None and bytes(other) == TURN.new_blobs[second] for other in others)
    del rows
    again = files.begin(first).data.result()
    assert np.frombuffer(again or b"", np.uint16)[8:].ctypes.data == address


def test_a_large_machine_keeps_the_memory_of_a_whole_restore_and_a_small_one_no_more_than_a_little() -> None:
    gib = 1 << 30
    assert kept_bytes(128 * gib) == kept_bytes(2_048 * gib) == MOST_BYTES
    assert [kept_bytes(size * gib) >> 20 for size in (8, 64, 96)] == [256, 256, 384]


def test_all_readers_have_begun_before_a_turn_wants_files(tmp_path: Path) -> None:
    """A thread that begins while others read keeps the event loop waiting, at each of a restore's first files."""
    reads._threads.cache_clear()
    assert len(StoreFiles(tmp_path, "default")._threads._threads._threads) == reads._THREADS


async def until_read(files: StoreFiles) -> None:
    await asyncio.wait([expected.data for expected in files._expected.values()])


async def all_of(files: StoreFiles, digests: Sequence[Digest]) -> list[bytes | None]:
    return [bytes(data) if data is not None else None async for some in files.read_in_order(digests) for data in some]


async def test_blobs_that_a_plan_will_want_are_read_before_it_is_made(store: RunningStore) -> None:
    first, second, *rest = TURN.digests
    blob_place(store.data_dir, "default", second.hash).write_bytes(b"damaged")
    files, room = StoreFiles(store.data_dir, "default"), SharedRoom(1 << 30)
    files.expect(TURN.digests, room)
    files.expect([first], room)  # another turn's: it reads for itself
    assert room.held_units == sum(digest.size_bytes for digest in TURN.digests)
    await until_read(files)
    for digest in TURN.digests:
        blob_place(store.data_dir, "default", digest.hash).unlink()
    found = await all_of(files, TURN.digests)
    assert found == [TURN.new_blobs[first], None, *(TURN.new_blobs[digest] for digest in rest)]
    assert room.held_units == 0
    assert await all_of(files, [first]) == [None], "its bytes were kept"


@pytest.mark.parametrize("uncached", [0, 1, -1])
async def test_blobs_are_not_cached_if_one_was_not_when_it_was_begun(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch, uncached: int
) -> None:
    files, cached = StoreFiles(store.data_dir, "default"), set(TURN.digests)
    monkeypatch.setattr(reads, "is_file_cached", lambda path, _: path.name in {digest.hash for digest in cached})
    monkeypatch.setattr(file_reading, "is_cached", lambda *_: bool(cached))
    assert files.are_cached(TURN.digests)
    assert files.are_cached([])
    cached.remove(TURN.digests[uncached])
    assert files.are_cached(TURN.digests) is (uncached == 1), "only three are looked at"
    cached.clear()
    files.expect(TURN.digests, SharedRoom(1 << 30))
    await until_read(files)
    cached.update(TURN.digests)  # as they are, now that they were read
    assert not files.are_cached(TURN.digests)
    assert await all_of(files, TURN.digests) == [TURN.new_blobs[digest] for digest in TURN.digests]
    assert files.are_cached(TURN.digests)


async def test_a_look_at_files_keeps_nobody_from_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(reads, "is_file_cached", lambda *_: opened.append(threading.get_ident()))
    client: Any = None
    cache = RemoteCache(StoreClients(client, client, client), "default", StoreFiles(tmp_path, "default"))
    assert not await cache.blobs.are_cached(TURN.digests)
    assert opened
    assert threading.get_ident() not in opened


async def test_files_that_no_plan_wants_are_forgotten_and_take_little_room(
    store: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SOON_S", 0.1)
    files, size_bytes = StoreFiles(store.data_dir, "default"), TURN.digests[0].size_bytes
    room = SharedRoom(8 * 2 * size_bytes)
    room.take("other", size_bytes)
    files.expect(TURN.digests, room)
    assert list(files._expected) == [TURN.digests[0]], "an eighth of the room at most, with what others hold"
    await until_read(files)
    await asyncio.sleep(0.2)
    blob_place(store.data_dir, "default", TURN.digests[0].hash).unlink()
    assert (room.held("default"), await all_of(files, TURN.digests[:1])) == (0, [None])


@pytest.mark.long(3)
def test_a_killed_engines_memory_comes_back_from_the_files_up_to_one_that_is_damaged(
    model: Path, tmp_path: Path
) -> None:
    house = House(tmp_path, model)
    house.engine.options += ["--store-data-dir", str(house.data_dir)]
    prompt = "<|im_start|>" * 1_500
    try:
        house.start()
        with house.client() as client:
            said = {name: client.reply(agent_id=name, prompt=prompt, sampling=GREEDY).text for name in ("ada", "bob")}
            more = {name: prompt + text + " Go on." for name, text in said.items()}
            stayed = client.reply(agent_id="ada", prompt=more["ada"], sampling=GREEDY)
        with house.store_client() as client:
            before = client.get_stats().counters["blobs_read"]
        house.engine.kill()
        house.engine.start()
        with house.client() as client:
            back = client.reply(agent_id="bob", prompt=more["bob"], sampling=GREEDY)
        assert (back.started.source, back.token_ids) == (pb.CACHE_SOURCE_WARM, stayed.token_ids)
        assert back.started.cached_tokens == stayed.started.cached_tokens > 1_500
        log = house.engine.log
        assert all(f"{part}_ms" in log for part in ("lookup", "first_file", "queue", "load", "read", "read_waited"))
        assert all(f"{part}_ms" in log for part in ("copied", "named", "written", "committed", "ended", "stored"))
        with house.store_client() as client:
            sent = client.get_stats().counters["blobs_read"] - before
            assert sent < 1_500 // 256, "manifests alone are asked for"
            [line] = client.get_agent("bob").lines
            manifest = manifests.parse(client.get_snapshot("bob", line.kv_identity_hash)[1])
        house.engine.kill()
        path = blob_place(house.data_dir, "default", manifest.blocks[3].hash)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        house.engine.start()
        with house.client() as client:
            again = client.reply(agent_id="bob", prompt=more["bob"] + back.text, sampling=GREEDY)
        assert (again.started.cached_tokens, again.started.miss) == (3 * 256, pb.MISS_REASON_BLOB_DAMAGED)
    finally:
        house.close()
