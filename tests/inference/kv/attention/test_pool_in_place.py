"""A pool that kernels write in place, emulated, does what a pool does that MLX's own operations write."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import Cancelled, ResourceExhausted
from kvasir.formats.block_hash import chain_hashes, kv_identity_hash
from kvasir.formats.token_files import file_identities

from inference_svc.kv import prefill_layer
from inference_svc.kv.attention import paged
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks import attention_hook
from inference_svc.kv.pages import pool as pool_module
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.prefill_layer import InPlaceLayer, PrefillLayer, commit, prefill_layers
from inference_svc.kv.sequence_files import files_of, first_whole_block
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import check_files
from inference_svc.model.model_runner import ModelRunner
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.greedy import tokens_of
from tests.inference.kv.sequences import (
    ANY_BYTES,
    DIM,
    PoisonedPool,
    from_files,
    full,
    identity_of,
    page_bytes,
    stored,
    values,
    windowed,
)

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]

# The arrays of the pool are wider than the pages of some layers.
MIXED = [full(), windowed(100), full(heads=1), windowed(300), windowed(8)]
WINDOWS = (0, 8, 100, 300)
TOKENS = tokens_of(1600, 1)


def windowed_identity(window: int) -> identity_pb2.KvIdentity:
    return identity_of([windowed(window), full()], policy_of(Rung.Q4, "bfloat16"))


def pool(
    layers: Sequence[identity_pb2.LayerLayout], dialect: Dialect | None = Dialect.CUDA, pages: int | None = None
) -> PoisonedPool:
    identity = identity_of(layers)
    budget = ANY_BYTES if pages is None else pages * KvPool(identity, 1).page_bytes
    return PoisonedPool(identity, budget, dialect=dialect)


def computed(kv: SequenceKV, count: int, seed: int) -> list[mx.array]:
    """Attention of so many random tokens in each layer. As a model does, one layer of a kind is asked for its mask."""
    layers, found, masks = prefill_layers(kv), [], dict[int, Any]()
    for index, layer in enumerate(layers):
        assert isinstance(layer, PrefillLayer)
        heads = kv.pool.formats[index].key.kv_heads
        made = np.random.default_rng(100 * seed + index).standard_normal((4, 1, heads, count, DIM)).astype(np.float32)
        queries = mx.array(made[:2]).transpose(1, 2, 0, 3, 4).reshape(1, 2 * heads, count, DIM)
        if layer.window not in masks:
            masks[layer.window] = layer.make_mask(count, window_size=layer.window or None)
        keys, values = layer.update_and_fetch(mx.array(made[2]), mx.array(made[3]))
        scale, mask = DIM**-0.5, masks[layer.window]
        found.append(attention_hook.attention(queries, keys, values, layer, scale, mask))
    commit(kv, layers, count)
    return found


class Twins:
    """The same sequence twice: in a pool that MLX's operations write, and in one that is written in place."""

    def __init__(self, *both: SequenceKV) -> None:
        self.both = both or tuple(SequenceKV(pool(MIXED, dialect)) for dialect in (None, Dialect.CUDA))

    def compute(self, count: int, seed: int, *, bound: float = 0) -> None:
        """More tokens of both, whose attention differs by `bound` at most."""
        plain, in_place = (computed(kv, count, seed) for kv in self.both)
        for one, other in zip(plain, in_place, strict=True):
            assert mx.abs(one - other).max().item() <= bound
        assert_same(self)

    def fork(self, length: int | None = None) -> "Twins":
        return Twins(*(kv.fork(length) for kv in self.both))


def assert_same(twins: Twins) -> None:
    plain, in_place = twins.both
    assert stored(plain) == stored(in_place)
    assert [table.pages.keys() for table in plain.tables] == [table.pages.keys() for table in in_place.tables]
    assert plain.pool.allocator.used == in_place.pool.allocator.used
    assert plain.pool.allocator.shared == in_place.pool.allocator.shared


def files(kv: SequenceKV, window: int = 0) -> list[bytes]:
    """Of a window those of the blocks that it holds whole."""
    name, tokens = kv_identity_hash(kv.pool.identity), TOKENS[: kv.length]
    first = first_whole_block(kv, window) if window else 0
    return [*map(bytes, files_of(kv, file_identities(name, tokens, chain_hashes(name, tokens), first, window)))]


def restored(kv: SequenceKV, target: KvPool) -> SequenceKV:
    """From its files, into another pool."""
    identity, name, tokens = kv.pool.identity, kv_identity_hash(kv.pool.identity), TOKENS[: kv.length]
    windows = {
        window: check_files(identity, name, files(kv, window), tokens, window, first_whole_block(kv, window))
        for window in WINDOWS[1:]
    }
    return from_files(target, check_files(identity, name, files(kv), tokens), kv.length, windows=windows)


@pytest.mark.long(6)
def test_chunks_forks_and_cuts_are_those_of_a_pool_that_mlx_writes() -> None:
    """To the bit: on a CPU both quantize and de-quantize alike. A tail that others hold is copied, not written."""
    twins = Twins()
    for seed, count in enumerate((3, 247, 5, 1, 444)):
        twins.compute(count, seed)
    memory = twins.fork()
    held = [page_bytes(kv.pool, kv.pages) for kv in memory.both]
    twins.compute(40, 10)
    memory.fork().compute(300, 11)
    memory.fork(690).compute(1, 12)
    assert [page_bytes(kv.pool, kv.pages) for kv in memory.both] == held
    for kv in twins.both:
        kv.mark()
    twins.compute(700, 13)
    for kv in twins.both:
        kv.trim_to(740)
    twins.compute(5, 14)
    for one, other in zip(twins.both, memory.both, strict=True):
        one.release()
        other.release()
        assert one.pool.allocator.used == 0


@pytest.mark.long(2)
def test_files_go_from_one_kind_of_pool_to_the_other() -> None:
    twins = Twins()
    for seed, count in enumerate((300, 233, 1)):
        twins.compute(count, seed)
    plain, in_place = twins.both
    for window in WINDOWS:
        assert files(plain, window) == files(in_place, window)
    crossed = Twins(restored(in_place, pool(MIXED, None)), restored(plain, pool(MIXED)))
    assert_same(crossed)
    for window in WINDOWS:
        assert files(crossed.both[0], window) == files(crossed.both[1], window) == files(plain, window)
    crossed.compute(30, 9)
    twins.compute(30, 9)
    assert stored(crossed.both[1]) == stored(plain)


@pytest.mark.long(12)
def test_a_few_rows_behind_many_are_attended_to_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the borders of blocks and of windows, with windows shorter than the chunk, and with a shared tail."""
    monkeypatch.setattr(prefill_layer, "LONG_TOKENS", 200)
    attended: list[int] = []
    attend = InPlaceLayer.attend

    def counted(self: InPlaceLayer, *given: Any) -> mx.array:
        attended.append(self.window)
        return attend(self, *given)

    monkeypatch.setattr(InPlaceLayer, "attend", counted)
    twins = Twins()
    twins.compute(199, 0)
    twins.compute(51, 1)
    assert not attended
    memory = twins.fork()
    for seed, count in enumerate((20, 3, 7, 40, 64, 65, 1, 61, 8), 2):
        before, at = len(attended), twins.both[0].length
        twins.compute(count, seed, bound=2e-5)
        here = [0, 100, 0, 300, 8] if count < 8 else [0, 100, 0, 300]
        assert sorted(attended[before:]) == sorted(here if count <= 64 else []), at
        memory.fork().compute(count, seed, bound=2e-5)


def test_only_cuda_leaves_lengths_that_recur_to_mlx() -> None:
    """There MLX keeps a plan for each pair of lengths; so on Metal each cell goes over pages."""
    for dialect, attends in ((Dialect.CUDA, False), (Dialect.METAL, True)):
        kv = SequenceKV(KvPool(windowed_identity(512), 1 << 20, dialect=dialect))
        layer = next(
            each for each in prefill_layers(kv, "bfloat16") if isinstance(each, InPlaceLayer) and not each.window
        )
        assert layer._attends(4096, 1024) is attends
        assert layer._attends(4096, 1000)
        assert not layer._attends(1 << 17, 1024), "so many pairs take the kernels longer than MLX"


@pytest.mark.long(21)
def test_many_rows_are_attended_to_where_they_lie_unless_their_lengths_recur(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a window only if no row of the pass leaves it; and not if so many queries see so much that MLX is faster."""
    for module in (prefill_layer, paged):
        monkeypatch.setattr(module, "most_queries", lambda *_, **__: 320)
    monkeypatch.setattr(prefill_layer, "_RECURRING_TOKENS", 64)
    monkeypatch.setattr(prefill_layer, "_MOST_PAIRS", 200_000)
    attended: list[int] = []
    attend = InPlaceLayer.attend

    def counted(self: InPlaceLayer, *given: Any) -> mx.array:
        attended.append(self.window)
        return attend(self, *given)

    monkeypatch.setattr(InPlaceLayer, "attend", counted)
    twins = Twins()
    windows = {128: [], 7: [0, 0, 8, 100, 300], 99: [0, 0, 100, 300], 290: [0, 0, 300], 48: [0, 0, 100, 300], 330: []}
    for seed, (count, served) in enumerate(windows.items()):
        attended.clear()
        twins.fork().compute(count, seed, bound=2e-5)
        assert sorted(attended) == served, count
        twins.compute(count, seed, bound=2e-5)
    attended.clear()
    twins.compute(300, 9, bound=2e-5)
    assert not attended, "300 queries over 1,202 tokens"


def after(layers: int) -> Any:
    """Cancels when it was asked so often."""
    asked = iter([False] * layers + [True])
    return lambda: next(asked)


def pools(runner: ModelRunner, pages: int | None = None) -> list[PoisonedPool]:
    """Written by MLX's operations, and in place."""
    identity = identity_of(runner.layers, policy_of(Rung.Q4, "float32"))
    budget = ANY_BYTES if pages is None else pages * KvPool(identity, 1).page_bytes
    return [PoisonedPool(identity, budget, dialect=dialect) for dialect in (None, Dialect.CUDA)]


@pytest.mark.long(3)
def test_a_pass_that_raises_half_way_has_changed_nothing(runner: ModelRunner) -> None:
    """No page of it is held either, also while the error is: neither new ones nor a copy of a shared tail."""
    plain, in_place = pools(runner)
    kv = SequenceKV(in_place)
    runner.prefill(kv, TOKENS[:300])
    for others in ([], [kv.fork()]):
        before = (stored(kv), list(kv.pages), in_place.allocator.used, in_place.allocator.shared)
        shared = page_bytes(in_place, [page for other in others for page in other.pages])
        for layers in range(3):
            with pytest.raises(Cancelled) as error:
                runner.prefill(kv, TOKENS[300:600], after(layers))
            found = (stored(kv), list(kv.pages), in_place.allocator.used, in_place.allocator.shared)
            assert found == before, error
            assert page_bytes(in_place, shared) == shared
    straight = SequenceKV(plain)
    runner.prefill(straight, TOKENS[:300])
    for each in (kv, straight):
        runner.prefill(each, TOKENS[300:600])
    assert stored(kv) == stored(straight)


def test_a_pass_without_room_has_changed_nothing(runner: ModelRunner) -> None:
    kv = SequenceKV(pools(runner, pages=6)[1])
    runner.prefill(kv, TOKENS[:300])
    memory, held = kv.fork(), page_bytes(kv.pool, kv.pages)
    before = (stored(kv), kv.pool.allocator.used)
    with pytest.raises(ResourceExhausted):
        runner.prefill(kv, TOKENS[:800])
    assert (stored(kv), kv.pool.allocator.used) == before
    assert page_bytes(kv.pool, memory.pages) == held


# --- pages that may be written ---


def test_a_copy_that_fails_writes_nothing_later_and_keeps_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that would have been written may be another agent's by then."""
    here = pool([full(), full()], pages=8)  # two arrays
    [page] = here.take(1)
    here.allocator.share([page])
    used, made, stores = here.allocator.used, [], pool_module.store_pages

    def failing(*given: Any) -> mx.array:
        made.append(given)
        if len(made) == 2:
            raise RuntimeError("no memory")
        return stores(*given)

    with monkeypatch.context() as broken:
        broken.setattr(pool_module, "store_pages", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            here.private_pages([page])
    assert here.allocator.used == used
    assert not here._written


def test_of_two_that_share_a_page_the_second_keeps_it() -> None:
    here = pool(MIXED, pages=8)
    [page] = here.take(1)
    here.allocator.share([page])
    others = here.take(here.allocator.free - 1)
    one, two = here.private_pages([page, page])
    assert two == page
    assert one not in (page, *others)


# --- decoding ---


def decoded(runner: ModelRunner, pool: KvPool) -> tuple[list[list[int]], list[SequenceKV]]:
    """Three sequences, of which two share a tail and one joins later: their tokens, and what is left of each."""
    one, other = SequenceKV(pool), SequenceKV(pool)
    runner.prefill(one, TOKENS[:254])
    runner.prefill(other, TOKENS[300:310])
    sequences = [one, one.fork(), other]
    tokens = [[7], [8], [9]]
    batch = runner.new_batch(pool, ANY_BYTES)
    for kv in sequences[:2]:
        batch.join(kv)
    for step in range(5):
        if step == 2:
            batch.join(other)
        names = [next(name for name, kv in enumerate(sequences) if kv is each) for each in batch.sequences]
        logits = np.array(batch.step([tokens[name][-1] for name in names]))
        for name, row in zip(names, logits, strict=True):
            tokens[name].append(int(row.argmax()))
        if step == 3:
            batch.leave(one)
    for kv in sequences:
        batch.leave(kv)
    return tokens, sequences


@pytest.mark.long(2)
def test_sequences_decode_as_in_a_pool_that_mlx_writes(runner: ModelRunner) -> None:
    """The prompt's rows to the bit; sums over pages round otherwise than MLX's own, so new rows are near."""
    (tokens, plain), (found, in_place) = (decoded(runner, pool) for pool in pools(runner))
    assert found == tokens
    assert [kv.length for kv in in_place] == [258, 259, 13]
    for one, other in zip(plain, in_place, strict=True):
        assert other.pool.allocator.used == one.pool.allocator.used
        for expected, own in zip(values(one), values(other), strict=True):
            np.testing.assert_allclose(own, expected, atol=0.4)
            assert np.mean(own != expected) < 0.02
