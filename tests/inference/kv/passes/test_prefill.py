"""A pass that does not come to its end has changed nothing: not a byte of a page that anybody holds."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from kvasir.errors import Cancelled, ResourceExhausted

from inference_svc.kv.model_hooks.row_exact import make_row_exact
from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.kv.greedy import tokens_of
from tests.inference.kv.sequences import (
    PoisonedPool,
    fed,
    full,
    identity_of,
    page_bytes,
    pool_bytes,
    pool_of,
    stored,
    windowed,
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    loaded = load(write_model(tmp_path_factory.mktemp("llama"), LLAMA), "float32").model
    make_row_exact(loaded)
    return ModelRunner(loaded)


def small_pool(runner: ModelRunner, pages: int) -> PoisonedPool:
    return pool_of(runner.layers, policy_of(Rung.Q4, "float32"), pages=pages)


def after(layers: int) -> Callable[[], bool]:
    """Cancels when it was asked so often."""
    asked = iter([False] * layers + [True])
    return lambda: next(asked)


@pytest.mark.long(3)
@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "with a fork"])
def test_a_cancelled_pass_changes_no_byte_and_is_computed_again(
    runner: ModelRunner, layers: int, is_shared: bool
) -> None:
    tokens = tokens_of(600, 1)
    kv, straight = (SequenceKV(small_pool(runner, 20)) for _ in range(2))
    runner.prefill(kv, tokens[:300])
    others = [kv.fork()] if is_shared else []
    held, used = page_bytes(kv.pool, kv.pages), kv.pool.allocator.used
    for compute in (runner.prefill, runner.last_logits):
        with pytest.raises(Cancelled):
            compute(kv, tokens[300:], after(layers))
        assert (kv.length, kv.pool.allocator.used) == (300, used)
        assert page_bytes(kv.pool, kv.pages) == held
    logits = runner.last_logits(kv, tokens[300:])
    runner.prefill(straight, tokens[:300])
    assert mx.array_equal(runner.last_logits(straight, tokens[300:]), logits).item()
    assert stored(kv) == stored(straight)
    assert all(page_bytes(other.pool, other.pages) == held for other in others)


@pytest.mark.long(2)
@pytest.mark.parametrize("tokens", [1400, 300], ids=["parts of two layers", "one part"])
def test_a_gpu_is_not_given_the_layers_behind_a_cancel(
    runner: ModelRunner, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes the part that it has, and no later one; nothing of that is kept, and the pass gives the same bits."""
    kv, straight = (SequenceKV(small_pool(runner, 20)) for _ in range(2))
    monkeypatch.setattr(runner, "is_on_gpu", True)
    given, asynchronous = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda part: (given.append(len(part)), asynchronous(part)))
    with pytest.raises(Cancelled):
        runner.prefill(kv, tokens_of(tokens, 1), after(1))
    assert given == ([2] if tokens > 1000 else [])
    assert (kv.length, kv.pool.allocator.used) == (0, 0)
    logits = runner.last_logits(kv, tokens_of(tokens, 1))
    monkeypatch.undo()
    assert mx.array_equal(runner.last_logits(straight, tokens_of(tokens, 1)), logits).item()
    assert stored(kv) == stored(straight)


def test_a_pass_without_room_changes_no_byte(runner: ModelRunner) -> None:
    """Also where some of its pages would have been there, and where the tail is shared."""
    pool = small_pool(runner, 4)
    kv = SequenceKV(pool)
    runner.prefill(kv, tokens_of(300, 1))
    memory = kv.fork()
    held = page_bytes(pool, kv.pages)
    with pytest.raises(ResourceExhausted) as error:
        runner.prefill(kv, tokens_of(2 * PAGE_TOKENS, 2))
    assert (error.value.reason, error.value.retry_after_s) == ("MEMORY_BUSY", 1.0)  # not: the prompt is too long
    assert error.value.metadata == {"needed_pages": "3", "free_pages": "2"}
    assert (kv.length, memory.length, pool.allocator.used) == (300, 300, 2)
    assert page_bytes(pool, kv.pages) == held == page_bytes(pool, memory.pages)
    memory.release()
    runner.prefill(kv, tokens_of(2 * PAGE_TOKENS, 2))
    assert kv.length == 300 + 2 * PAGE_TOKENS


def test_a_model_that_fails_changes_no_byte(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = SequenceKV(small_pool(runner, 9))
    runner.prefill(kv, tokens_of(100, 1))
    held = page_bytes(kv.pool, kv.pages)

    def fail(_tokens: mx.array, layers: list[Any]) -> mx.array:
        layers[0].update_and_fetch(mx.ones((1, 2, 5, 64)), mx.ones((1, 2, 5, 64)))
        raise ZeroDivisionError

    monkeypatch.setattr(runner, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        runner.prefill(kv, tokens_of(5, 2))
    assert kv.length == 100
    assert page_bytes(kv.pool, kv.pages) == held


def test_a_turn_works_on_a_fork_and_its_memory_is_as_it_was_when_it_is_dropped(runner: ModelRunner) -> None:
    """What saved rows were for: undo costs nothing, and is exact to the bit."""
    pool = small_pool(runner, 20)
    memory = SequenceKV(pool)
    runner.prefill(memory, tokens_of(520, 1))
    held, free = page_bytes(pool, memory.pages), pool.allocator.free
    for keep in (0, 100, 256, 520):
        turn = memory.fork(keep)
        runner.prefill(turn, tokens_of(300, 2 + keep))
        assert stored(turn) != stored(memory)
        del turn
        assert memory.length == 520
        assert page_bytes(pool, memory.pages) == held
        assert pool.allocator.free == free


def test_a_pool_of_one_page_serves_one_block() -> None:
    """A budget below one page is one page: a model that is loaded can say something."""
    pool = PoisonedPool(identity_of([full()]), budget_bytes=1)
    assert pool.allocator.total == 1
    kv = fed(SequenceKV(pool), [200, 56])
    with pytest.raises(ResourceExhausted):
        fed(kv, [1])
    assert kv.length == PAGE_TOKENS


@pytest.mark.parametrize("is_allocated", [True, False])
def test_memory_is_flat_or_grows_with_use(is_allocated: bool) -> None:
    pages = 40
    pool = pool_of([full(), windowed(100)], pages=pages)
    pool = PoisonedPool(pool.identity, pages * pool.page_bytes, is_allocated=is_allocated)
    assert pool_bytes(pool) == (pages if is_allocated else 8) * pool.page_bytes
    kv = fed(SequenceKV(pool), [256] * 12)
    before = stored(kv)
    pool.take(pages - pool.allocator.used)
    assert pool_bytes(pool) == pages * pool.page_bytes
    assert stored(kv) == before, "growing copies what the pages hold"
