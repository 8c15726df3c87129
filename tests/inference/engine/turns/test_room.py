"""Room: what is told and accounted is what is allocated, and who waits for room begins as soon as there is some."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from kvasir.errors import FailedPrecondition

from inference_svc.engine import mlx_thread
from inference_svc.engine.api import Ended, FinishReason, Hot, Snapshot, Started, Tokens
from tests.inference.engine.driving import Driver, Listener, driver_with_room_for, tokens_of

BUDGET_TOKENS = 1_536


@pytest.fixture
def small(model_dir: Path, tmp_path: Path) -> Iterator[Driver]:
    with driver_with_room_for(BUDGET_TOKENS, model_dir, tmp_path) as driver:
        yield driver


@pytest.mark.long(2)
def test_who_waits_for_room_begins_when_a_turn_that_says_nothing_has_ended(
    small: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn decodes or prefills in the step in which it ends: the thread must not sleep after it."""
    key, state = small.remember(1_000)
    waiting = Listener()

    def submit_both() -> None:
        small.submit(state.token_ids, Hot(1_000), key, max_tokens=0)
        small.submit(tokens_of(900, 9), listener=waiting, max_tokens=2)

    monkeypatch.setattr(mlx_thread, "_IDLE_POLL_S", 30.0)
    small.submit(tokens_of(5), listener=Listener().at(Ended, 1, submit_both), max_tokens=1)
    before_s = time.monotonic()
    waiting.wait_for(Started)
    assert time.monotonic() - before_s < 15


@pytest.mark.long(3)
def test_a_turn_that_does_not_fit_beside_what_it_was_planned_with_is_planned_again_without_it(small: Driver) -> None:
    """Its fork holds the page that it begins in, so dropping its own memory cannot free all six pages."""
    key, state = small.remember(300)
    prompt = (*state.token_ids[:10], *tokens_of(1_400, 3))
    with pytest.raises(FailedPrecondition) as refused:
        small.turn(prompt, Hot(10), key, max_tokens=100)
    assert refused.value.reason == "HOT_MEMORY_GONE"
    assert small.engine.memories.get(key) is None
    assert small.turn(prompt, key=key, max_tokens=100).cached_tokens == 0


@pytest.mark.long(2)
@pytest.mark.cells_of_a_block
def test_a_turn_that_begins_with_anothers_prefix_is_accounted_beside_the_memory_that_it_was_to_extend(
    driver: Driver,
) -> None:
    prefix, own = tokens_of(1_024, 5), driver.key()
    driver.turn((*prefix, 7), key=driver.key(), namespace="tests", max_tokens=2)
    driver.turn((*prefix[:2], *tokens_of(1_500, 6)), key=own, namespace="tests", max_tokens=2)
    seen: list[tuple[int, int]] = []
    extended: list[object] = []

    def look() -> None:
        seen.append(used_and_accounted(driver))
        extended.extend(one.extends for one in driver.engine._worker.memories.ledger.reservations)

    prompt = (*prefix, *tokens_of(40, 8))
    ended = driver.turn(prompt, Hot(2), own, namespace="tests", max_tokens=20, listener=Listener().at(Tokens, 3, look))
    assert ended.cached_tokens == 1_024
    assert extended == [None]
    [(used, accounted)] = seen
    assert used <= accounted


@pytest.mark.long(3)
@pytest.mark.cells_of_a_block
def test_a_short_turn_that_begins_with_a_long_memorys_prefix_takes_no_more_than_its_own_rows(driver: Driver) -> None:
    prefix, seen = tokens_of(512, 15), list[tuple[int, int]]()
    driver.turn((*prefix, *tokens_of(2_500, 16)), key=driver.key(), namespace="tests", max_tokens=2)
    decoding = Listener().at(Tokens, 3, lambda: seen.append(used_and_accounted(driver)))
    ended = driver.turn((*prefix, *tokens_of(40, 18)), namespace="tests", max_tokens=20, listener=decoding)
    assert ended.cached_tokens == 512
    [(used, accounted)] = seen
    assert used <= accounted


def used_and_accounted(driver: Driver) -> tuple[int, int]:
    """Bytes of all KV that there is, which is what the engine tells; and what its ledger holds."""
    worker = driver.engine._worker
    kvs = [sequence.kv for sequence in worker._scheduler.turns if sequence.kv is not None]
    pages = {page for kv in kvs for page in kv.pages} | worker.memories.pages
    used, ledger = worker.room.used_bytes, worker.memories.ledger
    assert len(pages) * worker._pool.page_bytes == used
    for reservation in ledger.reservations:
        assert reservation.kept_pages() <= reservation.most_pages
    return used, ledger.used_bytes + ledger.promised_bytes


@pytest.mark.long(2)
@pytest.mark.cells_of_a_block
def test_a_turn_finds_its_room_also_where_the_memory_whose_beginning_it_shares_cannot_make_any(
    model_dir: Path, tmp_path: Path
) -> None:
    """Of 12 pages an idle memory has 5 and a running turn 4. The next needs 9, of which it shares 4 with the memory: 2
    are missing, and to drop the memory frees only its tail. So it waits, and then begins with what it shares.
    """
    with driver_with_room_for(12 * 256, model_dir, tmp_path) as driver:
        common, waiting, order = tokens_of(1024, 5), Listener(), list[str]()
        driver.turn((*common, 7), key=driver.key(), namespace="tests", max_tokens=2)

        def submit() -> None:
            driver.submit((*common, *tokens_of(40, 8)), listener=waiting, namespace="tests", max_tokens=1200)

        running = Listener().at(Tokens, 3, submit).at(Ended, 1, lambda: order.append("ended"))
        waiting.at(Started, 1, lambda: order.append("started"))
        driver.submit(tokens_of(700, 3), namespace="tests", max_tokens=300, listener=running).end()
        assert waiting.end().cached_tokens == 1024
        assert order == ["ended", "started"]


@pytest.mark.long(3)
def test_a_part_that_a_cancel_keeps_is_copied_before_its_room_is_given_to_another(small: Driver) -> None:
    """As every turn's end: the listener asks for the copy at once, on the thread that would drop the memory."""
    key, copies, waiting = small.key(), list[Future[Snapshot | None]](), Listener()
    kept = Listener()
    kept.at(Tokens, 3, lambda: small.submit(tokens_of(1_400, 9), listener=waiting, max_tokens=2))
    kept.at(Tokens, 8, lambda: kept.handle.result(60).cancel())
    kept.at(Ended, 1, lambda: copies.append(small.engine.memories.snapshot(key, 0)))
    ended = small.submit(tokens_of(600, 3), None, key, kept, keep_partial=True, max_tokens=300).end()
    assert (ended.finish_reason, waiting.end().completion_tokens) == (FinishReason.CANCELLED, 2)
    copy = copies[0].result(60)
    assert copy is not None
    assert copy.state == ended.state.computed


class Way:
    """A memory's way to the store, as the test wants it."""

    def __init__(self) -> None:
        self.is_owed = self.is_awaited = True
        self.wanted = threading.Event()

    def want(self) -> None:
        self.wanted.set()


@pytest.mark.long(2)
def test_a_pinned_memory_is_what_it_was_whatever_its_agent_does_next(driver: Driver) -> None:
    key, state = driver.remember(600)
    files = list(driver.files(key))
    pinned = driver.engine.memories.pin(key, 0, 1).result(60)
    assert pinned is not None
    first = pinned.take_first()
    assert first is not None
    assert pinned.take_first() is None
    assert [data for _, data in first.blocks] == files[:1]
    assert first.tail is None
    driver.turn((*state.token_ids, *tokens_of(400, 9)), Hot(len(state.token_ids)), key, max_tokens=4)
    rest = pinned.piece(1, 9, {}).result(60)
    assert rest is not None
    assert rest.tail is not None
    assert (rest.state, [data for _, data in (*rest.blocks, rest.tail)]) == (state.computed, files[1:])
    driver.engine.memories.drop(key).result(60)
    again = pinned.piece(0, 9, {}).result(60)
    assert again is not None
    assert again.tail == rest.tail
    pinned.release()
    assert pinned.piece(0, 9, {}).result(60) is None


@pytest.mark.long(2)
def test_a_turn_waits_for_the_room_of_a_memory_that_is_being_stored_and_takes_that_of_a_pin_that_is_not(
    small: Driver,
) -> None:
    key, _ = small.remember(1_000)
    pinned, memory, pin = small.engine.memories.pin(key, 0, 1).result(60), Way(), Way()
    assert pinned is not None
    small.engine.memories.tag(key, "tag", memory)
    pinned.goes_as(pin)
    waiting = Listener()
    small.submit(tokens_of(900, 9), listener=waiting, max_tokens=2)
    assert memory.wanted.wait(60)
    assert pin.wanted.wait(60)
    assert small.engine.memories.tag_of(key) == "tag"
    memory.is_awaited = False
    time.sleep(0.05)
    assert not waiting.events, "the pin holds the same pages"
    pin.is_awaited = False
    assert waiting.end().completion_tokens == 2
    assert small.engine.memories.get(key) is None
    assert pinned.piece(0, 1, {}).result(60) is None


def test_a_memory_that_the_store_has_goes_before_one_that_it_lacks(small: Driver) -> None:
    owed, stored = small.key(), small.key()
    small.turn(tokens_of(400, 3), key=owed, max_tokens=2)
    small.turn(tokens_of(400, 4), key=stored, max_tokens=2)
    way = Way()
    way.is_awaited = False  # its last try has just failed
    small.engine.memories.tag(owed, "owed", way)
    small.turn(tokens_of(700, 5), max_tokens=2)
    assert small.engine.memories.tag_of(owed) == "owed"
    assert small.engine.memories.get(stored) is None


@pytest.mark.long(2)
def test_nobody_needs_to_release_a_pin_that_nobody_has(small: Driver) -> None:
    key, _ = small.remember(1_000)
    pinned = small.engine.memories.pin(key, 0, 1).result(60)
    assert pinned is not None
    del pinned
    assert small.turn(tokens_of(900, 9), max_tokens=2).completion_tokens == 2
