"""A pass that only makes a graph writes nothing that anybody reads, and keeps no page."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import ResourceExhausted

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.short_pass import ShortPass
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_runner import ModelRunner
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.attention.test_pool_in_place import TOKENS
from tests.inference.kv.sequences import PoisonedPool, identity_of, stored
from tests.made_models.sampling import first_and_in_turn

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
GRAPHS = pytest.mark.parametrize("tokens", [0, 1, 8], ids=["step", "token", "short pass"])


def pool_for(runner: ModelRunner, pages: int) -> KvPool:
    identity = identity_of(runner.layers, policy_of(Rung.Q4, "float32"))
    return KvPool(identity, pages * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)


def keep(runner: ModelRunner, batch: DecodeBatch, pool: KvPool, tokens: int, depth: int) -> None:
    """As the engine's worker does."""
    if tokens:
        runner.keep_graph(pool, tokens, depth)
    else:
        batch.keep_graph(depth)


def page_bytes(pool: KvPool, pages: list[int]) -> list[bytes]:
    return [np.asarray(array[mx.array(pages)]).tobytes() for array in pool.arrays]


@pytest.mark.long(10)
@GRAPHS
@pytest.mark.parametrize("depth", first_and_in_turn([300, 0, 2_100], seconds=4))
def test_a_graph_made_amid_a_reply_changes_no_bit_of_it_and_no_page_that_anybody_holds(
    tokens: int, depth: int, runner: ModelRunner
) -> None:
    """A step is enqueued when it is made, and one page alone is free."""
    here = pool_for(runner, 16)
    kv, memory = SequenceKV(here), SequenceKV(here)
    runner.last_logits(kv, TOKENS[:30])
    runner.last_logits(memory, TOKENS[40:70])
    alone, beside = kv.fork(), kv.fork()
    replies = []
    for each, makes_graphs in ((alone, False), (beside, True)):
        batch, reply = runner.new_batch(here, 0), list[mx.array]()
        batch.join(each)
        for place in range(3):
            logits = batch.step([TOKENS[30 + place]])
            if makes_graphs:
                others = here.take(here.allocator.free - 1)
                [free] = set(range(16)) - {page for page in range(16) if here.allocator.holders(page)}
                held = [page for page in range(16) if page != free]
                mx.eval(logits)
                before = page_bytes(here, held)
                keep(runner, batch, here, tokens, depth)
                assert page_bytes(here, held) == before
                assert (here.allocator.free, here.allocator.holders(free)) == (1, 0)
                assert np.asarray(here.arrays[0][free]).any(), "it was computed, not only traced"
                here.release(others)
            reply.append(logits)
        batch.leave(each)
        replies.append(reply)
    assert all(mx.array_equal(one, other) for one, other in zip(*replies, strict=True))
    assert stored(alone) == stored(beside)


@GRAPHS
def test_a_graph_is_not_made_where_no_page_is_free(tokens: int, runner: ModelRunner) -> None:
    here = pool_for(runner, 4)
    batch, held = runner.new_batch(here, 0), here.take(4)
    before = page_bytes(here, held)
    with pytest.raises(ResourceExhausted):
        keep(runner, batch, here, tokens, 0)
    assert (here.allocator.free, page_bytes(here, held)) == (0, before)


@GRAPHS
def test_a_pass_that_fails_gives_its_page_back_and_nothing_waits_for_it(
    tokens: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Metal each pass takes the result of the one before it."""
    here = pool_for(runner, 4)
    batch, forgotten, evaluate = runner.new_batch(here, 0), list[KvPool](), mx.eval
    monkeypatch.setattr(KvPool, "forget_failed_pass", lambda pool: forgotten.append(pool))

    def fails(*given: Any) -> None:
        if isinstance(given[0], mx.array) and given[0].ndim == 2:  # the logits
            raise RuntimeError("the device has no memory")
        evaluate(*given)

    with monkeypatch.context() as broken:
        broken.setattr(mx, "eval", fails)
        with pytest.raises(RuntimeError):
            keep(runner, batch, here, tokens, 0)
    assert (here.allocator.free, forgotten) == (4, [here])


@pytest.mark.long(2)
@pytest.mark.parametrize(("count", "depth"), [(8, 0), (48, 2_100)])
def test_a_graph_kept_ahead_is_the_one_that_a_turn_needs(
    count: int, depth: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX finds it by shapes and types."""
    identity = identity_of(runner.layers, policy_of(Rung.Q4, "float32"))
    here = PoisonedPool(identity, 40 * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)
    passes, asked = ShortPass(here, runner.forward, runner.compute_type), list[object]()
    traced = passes._traced
    monkeypatch.setattr(
        passes, "_kept_graph", lambda *given: asked.append([(a.shape, a.dtype) for a in given[2:]]) or traced(*given)
    )
    passes.keep_graph(count, depth)
    kv = SequenceKV(here)
    for table in kv.tables:
        table.pages = dict(enumerate(here.take(-(-depth // 256))))
    kv.length = depth
    passes.logits(kv, TOKENS[:count], lambda _: None)
    kept, needed = asked
    assert kept == needed
