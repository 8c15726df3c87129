"""KV's memory grows with use and goes back to the device: replies are those of an engine that kept all of it."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from inference_svc.engine.api import AgentKey, Hot, Priority, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.kv.pages import pool as pool_module
from inference_svc.kv.pages.pool import KvPool
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.emulated import emulated_engine
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.sequences import pool_bytes

LENGTH, SUFFIX = 600, tokens_of(20, 3)
KERNELS = pytest.param("emulated kernels", marks=[needs_compiler, pytest.mark.cpu_only("a GPU has its own")])


class Stored:
    """A memory that the store has."""

    is_safe, is_owed, is_awaited = True, False, False

    def want(self) -> None:
        """Nobody waits for it."""


@pytest.fixture(scope="module", params=["the device", KERNELS])
def driver(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    options = {"cache_dir": tmp_path_factory.mktemp("digests"), "memory_budget_bytes": 8 << 20, "longest_gap_s": 0}
    with contextlib.ExitStack() as exits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_FIRST_PAGES", 1)
        patch.setattr(ModelRunner, "takes_pool_at_once", False)  # so that a card's pool grows, too
        if request.param != "the device":
            yield exits.enter_context(emulated_engine(model_dir, **options))
        else:
            engine = Engine.open(model_dir, **options)
            exits.callback(engine.close)
            yield Driver(engine)


def pool_of(driver: Driver) -> KvPool:
    return driver.engine._worker._pool


def remembered(driver: Driver) -> AgentKey:
    """An agent whose memory the store has."""
    key, _ = driver.remember(LENGTH, seed=11)
    driver.engine.memories.tag(key, None, Stored())
    return key


@pytest.mark.long(7)
def test_an_idle_engine_keeps_little_and_its_agents_go_on_from_their_files(driver: Driver) -> None:
    first = pool_bytes(pool_of(driver))
    key = remembered(driver)
    files, stayed = driver.restored(key), driver.fork(key)
    expected = driver.reply(driver.turn((*files.token_ids, *SUFFIX), Hot(LENGTH), stayed))
    driver.engine.memories.tag(stayed, None, Stored())
    grown = pool_bytes(pool_of(driver))
    assert grown > first
    assert driver.engine.give_back(0).result(60) == grown - first
    assert pool_bytes(pool_of(driver)) == first
    assert driver.engine.memories.sizes() == {}
    assert driver.reply(driver.turn((*files.token_ids, *SUFFIX), files, driver.key())) == expected


@pytest.mark.long(10)
def test_memory_goes_back_between_two_steps_of_a_reply_and_changes_none_of_its_tokens(driver: Driver) -> None:
    """Pages in use are copied. The memory that the turn extends stays, and so does one that the store lacks."""
    extended = remembered(driver)
    prompt, other = (*driver.restored(extended).token_ids, *SUFFIX), driver.fork(extended)
    expected = driver.reply(driver.turn(prompt, Hot(LENGTH), other))
    unstored, gone, listener, freed = driver.fork(extended), remembered(driver), Listener(), list[Future[int]]()
    driver.engine.memories.drop(other).result(60)  # so that the turn's new page lies in front of those that go
    for count in (3, 8):
        listener.at(Tokens, count, lambda: freed.append(driver.engine.give_back(0)))
    driver.submit(prompt, Hot(LENGTH), extended, listener=listener)
    assert driver.reply(listener.end()) == expected
    assert sum(each.result(60) for each in freed) > 0
    hot = driver.engine.memories.sizes()
    assert gone not in hot
    assert {extended, unstored} <= {*hot}
    files = driver.restored(extended)
    again = driver.turn((*files.token_ids, *SUFFIX), Hot(len(files.token_ids)), driver.fork(extended))
    assert driver.reply(again) == driver.reply(driver.turn((*files.token_ids, *SUFFIX), files, driver.key()))


@pytest.mark.long(2)
def test_a_card_whose_pool_stays_keeps_the_memories_in_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would free nothing by dropping them, and the machine is short of memory that is not the card's."""
    key, pool = remembered(driver), pool_of(driver)
    monkeypatch.setattr(pool, "_first_pages", pool.allocator.total)
    assert driver.engine.give_back(0).result(60) == 0
    assert key in driver.engine.memories.sizes()


@pytest.mark.long(6)
def test_no_more_memories_go_than_the_pages_in_use_behind_them_let_go(driver: Driver) -> None:
    """A running turn has the last page: what lies in front of it stays allocated, whichever memories are dropped."""
    for key in driver.engine.memories.sizes():
        driver.engine.memories.drop(key).result(60)
    keys, listener, freed = [remembered(driver) for _ in range(3)], Listener(), list[Future[int]]()
    wanted = driver.engine.memory_used_bytes
    listener.at(Tokens, 3, lambda: freed.append(driver.engine.give_back(wanted)))
    driver.reply(driver.submit(tokens_of(LENGTH, 12), listener=listener).end())
    assert [each.result(60) for each in freed] == [0]
    left = driver.engine.memories.sizes()
    assert [key in left for key in keys] == [False, True, True]


@pytest.mark.long(2)
def test_a_memory_that_is_spared_stays(driver: Driver) -> None:
    spared, gone = remembered(driver), remembered(driver)
    driver.engine.give_back(0, [spared]).result(60)
    left = driver.engine.memories.sizes()
    assert spared in left
    assert gone not in left


@pytest.mark.parametrize(("max_tokens", "left"), [(0, Priority.INTERACTIVE), (3, Priority.BACKGROUND)])
def test_a_memory_that_was_warmed_stays_as_long_as_one_of_a_person(
    driver: Driver, max_tokens: int, left: Priority
) -> None:
    """A turn is expected, though nobody waited for the warming."""
    key = driver.key()
    driver.turn(tokens_of(40), key=key, max_tokens=max_tokens, priority=Priority.BACKGROUND)
    memory = driver.engine._worker.memories.get(key)
    assert memory is not None
    assert memory.priority is left
