"""KV in a running engine: what was freed is never seen, and the thread that it lives on ends in order."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

import pytest

from inference_svc.engine.api import Hot
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.engine.mlx_thread import MlxThread
from tests.inference.engine.driving import Driver, tokens_of
from tests.inference.kv.sequences import poison_behind, poison_free_pages

ResultT = TypeVar("ResultT")


def on_mlx(engine: Engine, work: Callable[[EngineWorker], ResultT]) -> ResultT:
    return engine._thread.post(work).result(60)


def test_freed_rows_full_of_poison_change_no_reply(driver: Driver) -> None:
    """LESSONS 1: a trim that leaves old rows where attention reads them."""
    key, state = driver.remember(700)
    clean = driver.fork(key)
    prompt = (*state.token_ids[:300], *tokens_of(30))

    def poison_memory(worker: EngineWorker) -> None:
        memory = worker.memories.get(key)
        assert memory is not None
        memory.kv.trim_to(300)
        poison_behind(memory.kv)
        poison_free_pages(memory.kv.pool)

    expected = driver.turn(prompt, driver.restored(clean, 300), driver.key())
    on_mlx(driver.engine, poison_memory)
    assert driver.turn(prompt, Hot(300), key).state == expected.state


def test_a_memory_is_given_to_another_only_while_it_has_the_tag_that_was_seen(driver: Driver) -> None:
    key, _ = driver.remember(300)
    memories, target, seen = driver.engine.memories, driver.key(), object()
    memories.tag(key, object())
    assert not memories.fork(key, target, seen).result(60)
    assert memories.get(target) is None
    memories.tag(key, seen)
    assert memories.fork(key, target, seen).result(60)
    assert driver.files(target) == driver.files(key)
    assert memories.tag_of(target) is None


def test_a_thread_that_ended_cancels_what_comes_late() -> None:
    class Idle:
        def step(self, take_mail: object) -> bool:
            return False

        def close(self) -> None:
            return None

    thread = MlxThread(Idle)
    assert thread.post(lambda _worker: 7).result(60) == 7
    with pytest.raises(ZeroDivisionError):
        thread.post(lambda _worker: 1 / 0).result(60)
    thread.close()
    late: Future[int] = thread.post(lambda _worker: 7)
    assert late.cancelled()
    assert wait([late], 0).done == {late}, "as a start waits for its graphs, for two minutes"


def test_a_worker_that_cannot_be_made_reports_why(tmp_path: Path) -> None:
    def fail() -> EngineWorker:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        MlxThread(fail)
