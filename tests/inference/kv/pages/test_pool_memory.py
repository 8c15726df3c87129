"""What a write to a pool costs in memory: not a second array, which MLX makes if anybody still reads the first."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import ResourceExhausted

from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.probing.real_layouts import REAL_LAYOUTS
from tests.inference.engine.families import GEMMA3, write_family
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.kv.sequences import fed, full, identity_of, pool_bytes, stored, windowed

CPU_ONLY = pytest.mark.cpu_only("on a GPU kernels write where the pages lie")
IDS = list(range(3, 40)) * 10


@CPU_ONLY
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_array_of_a_pool_of_a_given_size_is_copied(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """By prefill with and without logits, behind a tail, on a fork, and by decoding on forks, also without a copy."""
    directory = tmp_path_factory.mktemp("model")
    path = write_model(directory, LLAMA) if name == "llama" else write_family(directory / name, GEMMA3)
    runner, policy = ModelRunner(load(path, "float32").model), policy_of(Rung.Q4, "float32")
    pages = (96 << 20) // runner.new_pool(policy, 1).page_bytes
    pool = runner.new_pool(policy, 96 << 20, is_allocated=True)
    kv = SequenceKV(pool)

    def costs(work: Callable[[], object]) -> None:
        pool.evaluate()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        work()
        pool.evaluate()
        spent = mx.get_peak_memory() - before
        assert spent < pool.arrays[0].nbytes, f"{spent} bytes beside a pool of {pool_bytes(pool)}"

    for count in (256, 256, 44, 100):
        costs(lambda count=count: runner.prefill(kv, IDS[:count]))
    costs(lambda: runner.last_logits(kv, IDS[:10]))
    forks = [kv.fork() for _ in range(3)]
    costs(lambda: runner.prefill(forks[0], IDS[:10]))
    for decoded_budget in (1 << 30, 0):
        batch = runner.new_batch(pool, decoded_budget)
        for fork in forks:
            batch.join(fork)
        for _ in range(2):
            costs(lambda batch=batch: mx.eval(batch.step([5, 6, 7])))
        for fork in forks:
            batch.leave(fork)
    assert pool_bytes(pool) == pages * pool.page_bytes


def test_a_pool_that_grows_copies_fewer_pages_than_it_has_then() -> None:
    """It doubles, however few are taken at a time."""
    identity = identity_of([full(), windowed(100)])
    pool = KvPool(identity, 200 * KvPool(identity, 1).page_bytes)
    kv, copied_bytes = SequenceKV(pool), 0
    for _ in range(70):
        before = pool_bytes(pool)
        fed(kv, [256])
        copied_bytes += before if pool_bytes(pool) != before else 0
    used_bytes = pool.allocator.used * pool.page_bytes
    assert 70 * pool.page_bytes < used_bytes <= pool_bytes(pool) <= 2 * used_bytes
    assert 0 < copied_bytes < pool_bytes(pool)


@pytest.mark.parametrize("model", REAL_LAYOUTS)
def test_the_pool_of_an_idle_engine_takes_at_most_64_mib(model: str) -> None:
    identity = identity_pb2.KvIdentity(layers=REAL_LAYOUTS[model], policy=policy_of(Rung.Q4, "bfloat16"))
    pool = KvPool(identity, 8 << 30)
    assert 0 < pool_bytes(pool) <= 64 << 20
    assert pool.give_back() == mx.get_cache_memory() == 0


def test_a_pool_gives_the_memory_behind_its_last_page_back_and_keeps_every_row() -> None:
    """The lowest pages are taken first, so that what is left lies in front."""
    identity = identity_of([full(), windowed(100)])
    pool = KvPool(identity, 200 * KvPool(identity, 1).page_bytes)
    kept, gone = SequenceKV(pool), SequenceKV(pool)
    fed(kept, [600])
    before = stored(kept)
    fed(gone, [256] * 40)
    grown = pool_bytes(pool)
    gone.release()
    assert pool.give_back() == grown - pool_bytes(pool)
    assert pool_bytes(pool) == 8 * pool.page_bytes
    mx.eval(mx.zeros(1 << 20))  # a buffer that MLX keeps
    assert pool.give_back() == mx.get_cache_memory() == 0
    assert stored(kept) == before
    fed(kept, [256] * 30)  # and grows again
    assert stored(kept) == stored(fed(fed(SequenceKV(pool), [600]), [256] * 30))


@pytest.mark.parametrize("given", [0, 1])
def test_a_pool_that_cannot_grow_goes_on_with_the_pages_that_it_has(
    given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`given`: arrays that grew before the device refused."""
    identity = identity_of([full(), full()])
    pool, made = KvPool(identity, 200 * KvPool(identity, 1).page_bytes), list[mx.array]()
    zeros, kept = mx.zeros, SequenceKV(pool)

    def refused(*arguments: object, **named: object) -> mx.array:
        if len(made) == given:
            raise RuntimeError("[malloc] Unable to allocate.")
        made.append(zeros(*arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    fed(kept, [300])
    before, used = stored(kept), pool.allocator.used
    with monkeypatch.context() as patch:
        patch.setattr(mx, "zeros", refused)
        with pytest.raises(ResourceExhausted, match="the device has no room") as error:
            pool.take(100)
        assert (error.value.reason, error.value.retry_after_s) == ("MEMORY_BUSY", 1.0)  # no prompt is too long for that
        assert pool.allocator.used == used
        assert max(pool.take(8 - used)) == 7
    assert stored(kept) == before
    assert max(pool.take(100)) == 107
    assert stored(kept) == before
