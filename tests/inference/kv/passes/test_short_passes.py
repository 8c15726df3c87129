"""A short pass, whose graph is kept, computes what a pass layer by layer does."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import ResourceExhausted
from mlx_lm.models import gemma3_text

from inference_svc.kv import prefill_layer
from inference_svc.kv.attention.geometry import MAX_QUERIES
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.short_pass import ShortPass, most_kept_tokens
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.families import ALL, write_family
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.attention.test_pool_in_place import TOKENS, windowed_identity
from tests.inference.kv.sequences import PoisonedPool, identity_of, stored, values

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]


def not_compiled(runner: ModelRunner, pool: KvPool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have short passes computed without MLX's compiler, which emulated kernels do not bear; the list will have the
    number of tokens of each, filled up.
    """
    counts: list[int] = []
    passes = ShortPass(pool, runner.forward, runner.compute_type)
    traced = passes._traced
    monkeypatch.setattr(passes, "_kept_graph", lambda *given: counts.append(given[2].size) or traced(*given))
    monkeypatch.setattr(runner, "_short", passes)
    return counts


@pytest.mark.long(3)
def test_a_short_pass_computes_what_a_pass_layer_by_layer_does(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled up to a length, from the sequence's beginning on, over a border of blocks, behind a shared tail; and
    without room it changes nothing.
    """
    identity = identity_of(runner.layers, policy_of(Rung.Q4, "float32"))
    here = PoisonedPool(identity, 24 * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)
    monkeypatch.setattr(prefill_layer, "LONG_TOKENS", 200)
    kv, counts, apart = SequenceKV(here), not_compiled(runner, here, monkeypatch), list[float]()
    for count in (5, *[37] * 6, 13, 3, 8, 20):
        own = kv.fork()
        with monkeypatch.context() as layer_by_layer:
            layer_by_layer.setattr(ShortPass, "takes", lambda *_: False)
            expected = runner.last_logits(own, TOKENS[kv.length :][:count])
        memory, before = kv.fork(), stored(kv)
        found = runner.last_logits(kv, TOKENS[kv.length :][:count])
        apart.append(float(mx.abs(found - expected).max()))
        assert kv.length == own.length
        assert stored(memory) == before
        for one, other in zip(values(own), values(kv), strict=True):
            assert np.mean(np.abs(other - one) > 1e-2) < 1e-2, "sums in another order flip a code or a scale"
    assert np.median(apart) < 5e-5
    assert max(apart) < 5e-3, "behind what flipped"
    assert counts == [8, *[48] * 6, 16, 8, 8, 32]
    before, memory = stored(kv), kv.fork()
    taken = here.take(here.allocator.free)
    with pytest.raises(ResourceExhausted):
        runner.last_logits(kv, TOKENS[:5])
    assert (stored(kv), here.allocator.free) == (before, 0)
    here.release(taken)


@pytest.mark.parametrize(("window", "most"), [(128, 127), (512, 256)])
def test_a_graph_is_kept_for_what_stays_in_each_window(window: int, most: int) -> None:
    assert most_kept_tokens(windowed_identity(window), Dialect.CUDA, "bfloat16") == most
    assert most_kept_tokens(windowed_identity(window), Dialect.CUDA, "float32") == MAX_QUERIES
    assert most_kept_tokens(windowed_identity(window), None, "bfloat16") == 0


@pytest.mark.long(7)
def test_a_suffix_that_cannot_be_filled_up_is_computed_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block in front of the window is gone. Its page may be anyone's: 0 x NaN of a page of other bytes would reach
    the tokens behind it.
    """
    monkeypatch.setattr(gemma3_text, "scaled_dot_product_attention", attention_hook.attention)
    monkeypatch.setattr(prefill_layer, "LONG_TOKENS", 200)
    runner = ModelRunner(load(write_family(tmp_path, ALL["gemma3"]), "float32").model)
    identity = identity_of(runner.layers, policy_of(Rung.Q4, "float32"))
    here = PoisonedPool(identity, 24 * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)
    kv, counts = SequenceKV(here), not_compiled(runner, here, monkeypatch)
    runner.prefill(kv, TOKENS[:300])
    runner.prefill(kv, TOKENS[300:351])  # the window of 96 begins with block 1
    for count, parts in ((8, [8]), (12, [8, 8]), (1, [1]), (2, [1, 1])):
        own, other = kv.fork(), kv.fork()
        with monkeypatch.context() as layer_by_layer:
            layer_by_layer.setattr(ShortPass, "takes", lambda *_: False)
            expected = runner.last_logits(own, TOKENS[351 : 351 + count])
        counts.clear()
        found = runner.last_logits(other, TOKENS[351 : 351 + count])
        assert counts == parts
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert other.length == own.length
        for one, two in zip(values(own), values(other), strict=True):
            np.testing.assert_allclose(two, one, atol=1e-2)


def test_a_graph_is_kept_for_a_pass_of_at_most_two_parts() -> None:
    identity = windowed_identity(300)
    pool = KvPool(identity, 16 * KvPool(identity, 1).page_bytes, is_allocated=True, dialect=Dialect.CUDA)
    passes, kv = ShortPass(pool, None, "bfloat16"), SequenceKV(pool)
    [table] = [each for each in kv.tables if each.window]
    kv.length = 1024 + 299  # the first position that a new token sees begins a block
    table.pages, table.valid_from = {4: 1, 5: 2}, 1024
    for behind, taken in {0: (1, 2, 8, 9, 60, 64), 4: (1, 2, 4, 8, 9, 60, 64), 7: range(1, 65)}.items():
        kv.length = 1024 + 299 + behind  # so many rows in front of what a new token sees
        assert [count for count in range(1, 65) if passes.takes(kv, count) and count in taken] == list(taken)
        assert not behind or passes.takes(kv, 8 - behind)
    kv.length = 1024 + 299
    assert not any(passes.takes(kv, count) for count in range(3, 8)), "one after the other"
    assert not passes.takes(kv, 0)
    table.pages[3], table.valid_from = 3, 0
    assert passes.takes(kv, 5)
    kv.length = 40_000
    table.pages = dict.fromkeys(range(150, 157), 1)
    assert passes.takes(kv, 128)
    assert not passes.takes(kv, 129), "that far, MLX's own attention is faster"
    table.pages = {}  # they were nobody's
