"""A step that fails ends the MLX thread, and nobody who waits for it waits for ever."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kvasir.errors import KvasirError, Unavailable

from inference_svc.engine.api import Hot, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.model import device_memory
from tests.inference.engine.driving import Driver, Listener, tokens_of


@pytest.mark.long(2)
def test_a_closed_engine_leaves_neither_weights_nor_pages(model_dir: Path, tmp_path: Path) -> None:
    """On a GPU with room for one model the next one could not be loaded."""
    device_memory.give_back(is_first=False)
    before = device_memory.active_bytes()
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    Driver(engine).remember(600)
    assert device_memory.active_bytes() > before
    engine.close()
    device_memory.give_back(is_first=False)
    assert device_memory.active_bytes() < before + 4096, "numbers that a GPU keeps"
    assert engine.memories.sizes(), "who still has the engine may ask it"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_fails_ends_every_turn_and_refuses_the_next(model_dir: Path, tmp_path: Path) -> None:
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    driver = Driver(engine)

    def fail(_take_mail: Callable[[], None]) -> bool:
        raise RuntimeError("a fault of the schedule")

    def break_it() -> None:
        engine._worker.step = fail  # type: ignore[method-assign]

    try:
        decoding = driver.submit(
            tokens_of(20), listener=Listener().at(Tokens, 3, break_it), max_tokens=200, logit_bias=((0, -1000.0),)
        )
        with pytest.raises(Unavailable):
            decoding.end()
        with pytest.raises(Unavailable):
            driver.turn(tokens_of(20))
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_is_told_even_if_nothing_can_be_undone_any_more(model_dir: Path, tmp_path: Path) -> None:
    engine = Engine.open(model_dir, cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    driver = Driver(engine)
    key, state = driver.remember(100)

    def fail(*_args: object) -> None:
        raise RuntimeError("the device is gone")

    def break_it() -> None:
        engine._worker.step = fail  # type: ignore[method-assign,assignment]
        engine._worker._decoder.batch.leave = fail  # type: ignore[method-assign]

    settings = {"max_tokens": 200, "logit_bias": ((0, -1000.0),)}
    try:
        others = [driver.submit(tokens_of(20, seed), **settings) for seed in range(3)]
        extending = driver.submit((*state.token_ids, 5), Hot(100), key, Listener().at(Tokens, 9, break_it), **settings)
        for turn in (*others, extending):
            with pytest.raises(KvasirError):
                turn.end()
        memory = engine.memories.get(key)
        assert memory is not None, "nothing of a turn is in it"
        assert memory.state == state
    finally:
        engine.close()
