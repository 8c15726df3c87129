"""Files that are still being read while those before them become KV: the same memory, however and how far they come."""

import threading
import time

import pytest
from kvasir.errors import Cancelled, DataLoss

from inference_svc.engine import mlx_thread
from inference_svc.engine.api import AgentKey, Hot, Prefilled, Restored, Started, Tokens
from inference_svc.engine.files.incoming import Incoming
from inference_svc.kv import kv_load
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.restoring.conftest import LENGTH
from tests.inference.engine.restoring.test_loading import used_pages
from tests.inference.kv.attention.device.coming_files import play
from tests.running.waiting import eventually

FILES = 7
SUFFIX = tokens_of(20, 3)


@pytest.fixture(autouse=True)
def _no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sleeps wakes up by a letter alone: a change that does not wake it makes its test fail."""
    monkeypatch.setattr(mlx_thread, "_IDLE_POLL_S", 1_000)


@pytest.fixture
def pieces_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU: threads that copy to a GPU would take files so small together, once all seven came."""
    monkeypatch.setattr(kv_load, "_LEAST_BYTES", 1)


def arriving(files: Restored) -> tuple[Restored, Incoming]:
    """The same plan, before any file came."""
    incoming = Incoming(len(files.blobs))
    return Restored((), files.token_ids, files.keep_tokens, files.shareable_tokens, incoming=incoming), incoming


def waiting_for_files(driver: Driver) -> bool:
    """Whether all that came is KV, and a turn is open."""
    turns = driver.engine._thread.post(lambda worker: list(worker._turns)).result(60)
    return any(turn.arrival is not None and turn.arrival.lacks_files for turn in turns)


@pytest.mark.long(3)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("groups", [(1,) * FILES, (3, 4), (6, 1), (FILES,)])
def test_files_that_come_a_few_at_a_time_become_the_memory_that_never_left(
    driver: Driver, memory: tuple[AgentKey, Restored], groups: tuple[int, ...]
) -> None:
    key, files = memory
    prompt, stayed, back = (*files.token_ids, *SUFFIX), driver.fork(key), driver.key()
    expected = driver.turn(prompt, Hot(LENGTH), stayed)
    plan, incoming = arriving(files)
    returning = driver.submit(prompt, plan, back)
    coming = iter(files.blobs)
    for count in groups:
        eventually(lambda: waiting_for_files(driver))
        for _ in range(count):
            incoming.add(next(coming))
    incoming.end()
    assert returning.end().state == expected.state
    assert driver.files(back) == driver.files(stayed)


@pytest.mark.batch_as_alone
def test_files_that_come_whenever_they_like_beside_streams_change_nobody(
    driver: Driver, memory: tuple[AgentKey, Restored]
) -> None:
    key, files = memory
    prompt, other = (*files.token_ids, *SUFFIX), tokens_of(60, 30)
    alone = driver.reply(driver.turn(other, max_tokens=40))
    stayed, back, seen = driver.fork(key), driver.key(), list[int]()
    expected = driver.turn(prompt, Hot(LENGTH), stayed)
    plan, incoming = arriving(files)
    stream, returning = Listener(), Listener()
    stream.at(Tokens, 2, lambda: driver.submit(prompt, plan, back, listener=returning))
    for place, blob in enumerate(files.blobs):  # so late that the stream has to go on while nothing is there
        stream.at(Tokens, 4 + 3 * place, lambda blob=blob: incoming.add(blob))  # type: ignore[misc]
    returning.at(Started, 1, lambda: seen.append(stream.count(Tokens)))
    driver.submit(other, listener=stream, max_tokens=40)
    assert driver.reply(stream.end()) == alone
    assert returning.end().state == expected.state
    assert driver.files(back) == driver.files(stayed)
    assert seen[0] >= 4 + 3 * (FILES - 1), "it began before its last file was there"


@pytest.mark.long(2)
@pytest.mark.cpu_only("it plays CUDA's copies")
@pytest.mark.parametrize("is_beside_a_stream", [False, True])
@pytest.mark.parametrize("least_bytes", [1, kv_load._LEAST_BYTES])
def test_files_that_reach_the_device_late_let_the_turn_go_on_by_themselves(
    driver: Driver,
    memory: tuple[AgentKey, Restored],
    monkeypatch: pytest.MonkeyPatch,
    least_bytes: int,
    *,
    is_beside_a_stream: bool,
) -> None:
    """No letter comes with the bytes, and a stream that kept the thread awake may end before they are there."""
    monkeypatch.setattr(kv_load, "_LEAST_BYTES", least_bytes)
    key, files = memory
    prompt, stayed, back = (*files.token_ids, *SUFFIX), driver.fork(key), driver.key()
    expected, stream = driver.turn(prompt, Hot(LENGTH), stayed), Listener()
    played = play(monkeypatch)
    plan, incoming = arriving(files)

    def come() -> None:
        played.gate.clear()
        for blob in files.blobs:
            incoming.add(blob)
        incoming.end()

    returning = driver.submit(prompt, plan, back)
    eventually(lambda: waiting_for_files(driver))
    if is_beside_a_stream:
        driver.submit(tokens_of(60, 30), listener=stream.at(Tokens, 2, come), max_tokens=4).end()
    else:
        come()
    time.sleep(0.1)
    assert not returning.count(Started)
    played.gate.set()
    assert returning.end().state == expected.state
    assert driver.files(back) == driver.files(stayed)


@pytest.mark.long(10)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("came", range(FILES))
def test_a_file_that_does_not_come_leaves_the_turn_what_a_plan_with_the_files_before_it_does(
    driver: Driver, memory: tuple[AgentKey, Restored], came: int
) -> None:
    _check_cut(driver, memory, came)


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
def test_files_that_end_in_the_middle_are_as_good_as_a_plan_with_so_many(
    driver: Driver, memory: tuple[AgentKey, Restored]
) -> None:
    _check_cut(driver, memory, 4)


def _check_cut(driver: Driver, memory: tuple[AgentKey, Restored], came: int) -> None:
    key, files = memory
    prompt, keep = (*files.token_ids, *SUFFIX), 256 * came
    planned, back = driver.key(), driver.key()
    fewer = Restored(files.blobs[:came], files.token_ids[:keep], keep, files.shareable_tokens) if came else None
    expected = driver.turn(prompt, fewer, planned)
    plan, incoming = arriving(files)
    returning = driver.submit(prompt, plan, back)
    for blob in files.blobs[:came]:
        incoming.add(blob)
    eventually(lambda: waiting_for_files(driver))
    incoming.end()
    ended = returning.end()
    assert (ended.cached_tokens, ended.state) == (keep, expected.state)
    assert driver.files(back) == driver.files(planned)
    assert driver.files(key) == files.blobs


def test_a_turn_without_its_files_keeps_nobody_from_computing_and_the_thread_sleeps(
    driver: Driver, memory: tuple[AgentKey, Restored], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, files = memory
    plan, incoming = arriving(files)
    incoming.add(files.blobs[0])
    returning = driver.submit((*files.token_ids, *SUFFIX), plan, max_tokens=2)
    eventually(lambda: waiting_for_files(driver))
    other = driver.submit(tokens_of(700, 5), max_tokens=2)
    other.end()
    assert other.count(Prefilled) >= 1
    looks, scheduler = list[int](), driver.engine._worker._scheduler
    grant = scheduler.grant
    monkeypatch.setattr(scheduler, "grant", lambda *given, **how: (looks.append(1), grant(*given, **how))[1])
    time.sleep(0.2)
    assert len(looks) <= 2, "it looks again and again"
    for blob in files.blobs[1:]:
        incoming.add(blob)
    assert returning.end().cached_tokens == LENGTH


@pytest.mark.usefixtures("pieces_of_one_file")
@pytest.mark.parametrize("place", [0, 3, FILES - 1])
def test_a_wrong_file_is_named_though_others_were_placed_and_leaves_no_page(
    driver: Driver, memory: tuple[AgentKey, Restored], place: int
) -> None:
    key, files = memory
    used = used_pages(driver)
    plan, incoming = arriving(files)
    returning = driver.submit((*files.token_ids, *SUFFIX), plan, max_tokens=2)
    for blob in files.blobs[:place]:
        incoming.add(blob)
        eventually(lambda: waiting_for_files(driver))
    incoming.add(files.blobs[(place + 1) % FILES])
    with pytest.raises(DataLoss) as error:
        returning.end()
    assert error.value.metadata["blob"] == str(place)
    assert used_pages(driver) == used
    assert driver.files(key) == files.blobs


@pytest.mark.usefixtures("pieces_of_one_file")
@pytest.mark.parametrize("came", [0, 3])
def test_a_cancel_while_files_are_awaited_gives_every_page_back(
    driver: Driver, memory: tuple[AgentKey, Restored], came: int
) -> None:
    _, files = memory
    used = used_pages(driver)
    plan, incoming = arriving(files)
    returning = driver.submit((*files.token_ids, *SUFFIX), plan, max_tokens=2)
    for blob in files.blobs[:came]:
        incoming.add(blob)
    eventually(lambda: waiting_for_files(driver))
    returning.handle.result(60).cancel()
    with pytest.raises(Cancelled):
        returning.end()
    incoming.add(files.blobs[came])  # too late, and nobody minds
    incoming.end()
    assert used_pages(driver) == used
    assert driver.engine._worker.memories.ledger.promised_bytes == 0


@pytest.mark.usefixtures("pieces_of_one_file")
def test_a_file_is_forgotten_once_the_engine_has_taken_it(driver: Driver, memory: tuple[AgentKey, Restored]) -> None:
    _, files = memory
    plan, incoming = arriving(files)
    returning = driver.submit((*files.token_ids, *SUFFIX), plan, max_tokens=2)
    for blob in files.blobs[:5]:
        incoming.add(blob)
    eventually(lambda: waiting_for_files(driver))
    assert incoming._files == [None] * 5
    threading.Thread(target=lambda: [incoming.add(blob) for blob in files.blobs[5:]]).start()
    assert returning.end().cached_tokens == LENGTH
