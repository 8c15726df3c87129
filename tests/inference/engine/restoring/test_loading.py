"""A memory that comes back while others speak: in pieces between their steps, changing nobody, and leaving nothing."""

from pathlib import Path

import pytest
from kvasir.errors import Cancelled, DataLoss

from inference_svc.engine.api import AgentKey, Hot, Restored, Started, Tokens
from inference_svc.kv.host_copies import landings
from tests.inference.engine.driving import Driver, Listener, driver_with_room_for, tokens_of
from tests.inference.engine.restoring.conftest import LENGTH
from tests.inference.kv.attention.device.coming_files import play
from tests.inference.kv.sequences import poison_free_pages

SUFFIX = tokens_of(20, 3)


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
def test_a_restore_in_pieces_beside_streams_that_come_and_go_changes_nobody(
    driver: Driver, memory: tuple[AgentKey, Restored]
) -> None:
    key, files = memory
    prompts = [tokens_of(60 + place, 30 + place) for place in range(3)]
    limits = (40, 7, 30)
    alone = [driver.reply(driver.turn(prompt, max_tokens=most)) for prompt, most in zip(prompts, limits, strict=True)]
    prompt = (*files.token_ids, *SUFFIX)
    stayed, back = driver.fork(key), driver.key()
    expected = driver.turn(prompt, Hot(LENGTH), stayed, max_tokens=24)
    first, second, third, returning = (Listener() for _ in range(4))
    seen: list[int] = []

    def begin() -> None:
        driver.submit(prompts[1], listener=second, max_tokens=limits[1])  # it leaves while files are left
        driver.submit(prompt, files, back, listener=returning, max_tokens=24)
        seen.append(first.count(Tokens))

    first.at(Tokens, 3, begin)
    first.at(Tokens, 6, lambda: driver.submit(prompts[2], listener=third, max_tokens=limits[2]))
    returning.at(Started, 1, lambda: seen.append(first.count(Tokens)))
    driver.submit(prompts[0], listener=first, max_tokens=limits[0])
    streams = [driver.reply(listener.end()) for listener in (first, second, third)]
    assert returning.end().state == expected.state
    assert streams == alone
    assert driver.files(back) == driver.files(stayed)
    before, after = seen
    assert after - before >= 6, "the stream waited for more than a file"


@pytest.mark.cpu_only("it plays CUDA's copies")
def test_streams_speak_while_files_are_on_their_way(
    driver: Driver, memory: tuple[AgentKey, Restored], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, files = memory
    prompt, stream, returning, seen = (*files.token_ids, *SUFFIX), Listener(), Listener(), list[int]()
    alone = driver.reply(driver.turn(tokens_of(60, 30), max_tokens=30))
    expected = driver.turn(prompt, Hot(LENGTH), driver.fork(key), max_tokens=4)
    played, back = play(monkeypatch), driver.key()

    def begin() -> None:
        played.gate.clear()
        driver.submit(prompt, files, back, listener=returning, max_tokens=4)

    stream.at(Tokens, 2, begin).at(Tokens, 12, played.gate.set)
    returning.at(Started, 1, lambda: seen.append(stream.count(Tokens)))
    driver.submit(tokens_of(60, 30), listener=stream, max_tokens=30)
    assert driver.reply(stream.end()) == alone
    assert returning.end().state == expected.state
    assert driver.files(back)[: len(files.blobs) - 1] == files.blobs[:-1]
    assert seen[0] >= 12, "it came while nothing could arrive"


@pytest.mark.cpu_only("it plays CUDA's copies")
def test_an_engine_that_closes_leaves_no_room_for_files_behind(
    memory: tuple[AgentKey, Restored], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, files = memory
    play(monkeypatch)
    with driver_with_room_for(2 * LENGTH, model_dir, tmp_path) as other:
        other.turn((*files.token_ids, *SUFFIX), files, other.key(), max_tokens=1)
        assert landings._landings()._all
    assert not landings._landings()._all


@pytest.mark.long(3)
@pytest.mark.parametrize("pieces", [0, 1, 2, 4, 6, 8])
def test_a_cancel_after_any_piece_gives_every_page_back(
    driver: Driver, memory: tuple[AgentKey, Restored], pieces: int
) -> None:
    key, files = memory
    prompt, stream, returning = (*files.token_ids, *SUFFIX), Listener(), Listener()
    expected = driver.turn(prompt, files, max_tokens=2)
    used = used_pages(driver)

    def begin() -> None:
        driver.submit(prompt, files, listener=returning, max_tokens=2)
        stream.at(Tokens, 2 + pieces, lambda: returning.handle.result(60).cancel())

    driver.submit(tokens_of(60, 30), listener=stream.at(Tokens, 2, begin), max_tokens=40)
    stream.end()
    if pieces < 7:
        with pytest.raises(Cancelled):
            returning.end()
    assert used_pages(driver) == used
    worker = driver.engine._worker
    assert worker.memories.ledger.promised_bytes == 0
    driver.engine._thread.post(lambda worker: poison_free_pages(worker._pool)).result(60)
    assert driver.turn(prompt, files, max_tokens=2).state == expected.state
    assert driver.files(key) == files.blobs


@pytest.mark.batch_as_alone
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_number_that_is_none_ends_its_turn_at_any_piece_and_nobody_else(
    driver: Driver, memory: tuple[AgentKey, Restored], place: int
) -> None:
    _, files = memory
    alone = driver.reply(driver.turn(tokens_of(60, 30), max_tokens=30))
    blobs = list(files.blobs)
    blobs[place] = blobs[place][:-2] + b"\xff\xff"  # the last bias of the last layer
    damaged = Restored(tuple(blobs), files.token_ids, LENGTH)
    used, stream, returning = used_pages(driver), Listener(), Listener()
    stream.at(Tokens, 2, lambda: driver.submit(files.token_ids, damaged, listener=returning))
    driver.submit(tokens_of(60, 30), listener=stream, max_tokens=30)
    assert driver.reply(stream.end()) == alone
    with pytest.raises(DataLoss) as error:
        returning.end()
    assert error.value.metadata["blob"] == str(place)
    assert used_pages(driver) == used


def used_pages(driver: Driver) -> int:
    """Pages in use, once the worker has done what came before."""
    return driver.engine._thread.post(lambda worker: worker.memories.ledger.used_pages).result(60)
