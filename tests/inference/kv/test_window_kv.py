"""A sliding-window layer: what attention is given, what is held, and how far back it can go."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from kvasir.cachestore.v1 import identity_pb2
from mlx_lm.models.cache import RotatingKVCache

from inference_svc.kv.page import PAGE_TOKENS
from inference_svc.kv.pages.block_table import window_start
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.mlx_lm_batch import JudgedBatch, JudgedLayer
from tests.inference.kv.sequences import DIM, HEADS, pool_of, stored, unrounded_pool, values, windowed
from tests.made_models.sampling import first_and_in_turn

CHUNKS = {
    "token by token": [1] * 40,
    "a prompt, then tokens": [30, *[1] * 30],
    "prompts and tokens": [5, 1, 1, 17, 2, 40, 1, 2, 64, 2, 3, *[1] * 20],
    "longer than any buffer": [700, *[1] * 5, 300, 1, 1],
}


def quantized(window: int) -> JudgedLayer:
    return JudgedLayer(SequenceKV(pool_of([windowed(window)])))


def rows(count: int, seed: int, sequences: int = 1) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of `count` tokens."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((3, sequences, HEADS, count, DIM)).astype(np.float32)
    queries, keys, values = (mx.array(part) for part in made)
    return queries, keys, values


def attend(cache: object, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """What a layer computes, in the order in which mlx-lm's models ask: mask first."""
    mask = cache.make_mask(queries.shape[2], window_size=cache_window(cache))  # type: ignore[attr-defined]
    keys, values = cache.update_and_fetch(keys, values)  # type: ignore[attr-defined]
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIM**-0.5, mask=mask)


def cache_window(cache: object) -> int:
    return cache.max_size if isinstance(cache, RotatingKVCache) else cache.window  # type: ignore[attr-defined]


def in_chunks(count: Sequence[int], parts: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    edges = [0, *np.cumsum(count).tolist()]
    for start, stop in pairwise(edges):
        yield [part[:, :, start:stop] for part in parts]


@pytest.mark.parametrize("window", first_and_in_turn([8, 33, 2, 96], seconds=1, first=2))
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_attention_over_a_window_is_what_it_is_over_mlx_lms_own(window: int, chunks: list[int]) -> None:
    ours, theirs = JudgedLayer(SequenceKV(unrounded_pool([windowed(window)]))), RotatingKVCache(max_size=window)
    for chunk in in_chunks(chunks, rows(sum(chunks), seed=window)):
        expected = attend(theirs, *chunk)
        assert mx.allclose(attend(ours, *chunk), expected, rtol=1e-5, atol=1e-5).item(), f"at {ours.offset}"
    assert ours.offset == sum(chunks)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_a_token_sees_the_stored_rows_of_its_window_and_of_nothing_else(chunks: list[int]) -> None:
    """Reference attention over de-quantized rows, position by position."""
    window, total = 12, sum(chunks)
    queries, keys, values = rows(total, seed=5)
    layer = quantized(window)
    found = mx.concatenate([attend(layer, *chunk) for chunk in in_chunks(chunks, (queries, keys, values))], axis=2)
    codec = layer.kv.pool.codecs[0][0]
    seen_keys, seen_values = (np.array(codec.decode(codec.encode(part), mx.float32))[0] for part in (keys, values))
    for position in range(total):
        span = slice(max(0, position - window + 1), position + 1)
        scores = np.einsum("hd,htd->ht", np.array(queries)[0, :, position], seen_keys[:, span]) * DIM**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), seen_values[:, span])
        np.testing.assert_allclose(np.array(found)[0, :, position], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long(2)
@pytest.mark.parametrize("marks", [False, True], ids=["no rewind points", "two rewind points"])
def test_what_is_held_is_bounded_by_the_window_and_not_by_the_sequence(marks: bool) -> None:
    layer, most = quantized(100), 6 if marks else 2
    chunks = [256] * 8 + [1] * 600
    for number, chunk in enumerate(in_chunks(chunks, rows(sum(chunks), seed=1))):
        layer.update_and_fetch(*chunk[1:])
        kv = layer.kv
        if marks and number % 90 == 7:
            kv.mark()
            kv.keep_rewind_points(kv.rewind_points[-2:])
        assert len(list(kv.pages)) == kv.pool.allocator.used <= min(most, kv.pool.pages_for(kv.length))
        assert layer.nbytes == kv.pool.allocator.used * kv.pool.page_bytes
    assert kv.pool.pages_for(kv.length) == 6, "what admission counts on"
    assert kv.pool.allocator.touched <= 8, "and no more were ever used"
    kv.keep_rewind_points([])
    assert kv.pool.allocator.used <= 2


@pytest.mark.parametrize("length", first_and_in_turn([64, 300, 20, 63, 65, 1000], seconds=1, first=2))
def test_a_window_goes_back_wherever_all_that_is_seen_there_is_left(length: int) -> None:
    """Elsewhere it refuses, for the rows are gone (LESSONS 5). Where it goes, it is what it was there, to the bit."""
    window = 64
    queries, keys, values = rows(length, seed=2)
    gone = window_start(window, length) // PAGE_TOKENS * PAGE_TOKENS  # rows before it
    layer = quantized(window)
    for chunk in in_chunks([length - length // 2, *[1] * (length // 2)], (queries, keys, values)):
        layer.update_and_fetch(*chunk[1:])
    for back in (1, 5, 63, 64, 65, 200):
        target = max(0, length - back)
        before = stored(layer.kv)
        assert layer.kv.can_go_on_from(target) == (window_start(window, target) >= gone or not target)
        if not layer.kv.can_go_on_from(target):
            with pytest.raises(ValueError, match=f"cannot go on from {target}"):
                layer.kv.fork(target)
            assert stored(layer.kv) == before
            continue
        at_target = JudgedLayer(layer.kv.fork(target))
        straight = quantized(window)
        if target:
            straight.update_and_fetch(keys[:, :, :target], values[:, :, :target])
        new = rows(3, seed=9)
        assert mx.array_equal(attend(at_target, *new), attend(straight, *new)).item()
        assert stored(layer.kv) == before
    assert quantized(window).kv.can_go_on_from(0)


@pytest.mark.parametrize("window", [64, 100, 300])
def test_a_window_goes_back_to_a_rewind_point_however_far_it_has_gone(window: int) -> None:
    """And only to lengths whose rows it has: a long chunk stores what its last token sees, and nothing before."""
    _, keys, values = rows(1400, seed=2)
    layer = quantized(window)
    for start, stop in ((0, 256), (256, 310)):
        layer.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
    layer.kv.mark()
    layer.update_and_fetch(keys[:, :, 310:1400], values[:, :, 310:1400])
    can = [length for length in range(1401) if layer.kv.can_go_on_from(length)]
    assert {0, 310, 1400} <= set(can)
    for length in (*can[:: len(can) // 12], 310, 311, 400, 512, 1399):
        if length in can:
            back, straight = layer.kv.fork(length), quantized(window)
            if length:
                straight.update_and_fetch(keys[:, :, :length], values[:, :, :length])
            assert stored(back) == stored(straight.kv), length


def test_a_fork_of_a_window_sees_nothing_of_what_either_side_goes_on_with() -> None:
    layer = quantized(16)
    layer.update_and_fetch(*rows(40, seed=1)[1:])
    fork, copied = JudgedLayer(layer.kv.fork()), layer.kv.fork()
    untouched = values(copied)
    for seed in range(30):
        layer.update_and_fetch(*rows(1, seed=seed)[1:])
        fork.update_and_fetch(*rows(1, seed=100 + seed)[1:])
    assert not np.array_equal(values(layer.kv)[0], values(fork.kv)[0])
    for before, after in zip(untouched, values(copied), strict=True):
        assert np.array_equal(before, after)


# --- several sequences ---

LENGTHS = (1, 15, 16, 17, 31, 40, 100)


POOL_WINDOW = 16


@pytest.fixture
def pool() -> KvPool:
    return pool_of([windowed(POOL_WINDOW)])


def prefilled(pool: KvPool, length: int) -> JudgedLayer:
    layer = JudgedLayer(SequenceKV(pool))
    for chunk in in_chunks([length - length // 3, *[1] * (length // 3)], rows(length, seed=length)):
        layer.update_and_fetch(*chunk[1:])
    return layer


@pytest.mark.long(2)
@pytest.mark.parametrize("keeps_decoded", [True, False], ids=["copies", "decoding on read"])
def test_a_batch_of_windows_attends_as_each_does_alone(keeps_decoded: bool, pool: KvPool) -> None:
    """Over 40 tokens, with rings that turn at different moments (LESSONS 2)."""
    batch = JudgedBatch(pool, [prefilled(pool, length).kv for length in LENGTHS], keeps_decoded=keeps_decoded)
    alone = [prefilled(pool, length) for length in LENGTHS]
    for step in range(40):
        assert batch.offset.tolist() == [layer.offset for layer in alone]
        new = rows(1, seed=step, sequences=len(LENGTHS))
        found = attend(batch, *new)
        for slot, layer in enumerate(alone):
            expected = attend(layer, *(part[slot : slot + 1] for part in new))
            assert mx.allclose(found[slot : slot + 1], expected, rtol=1e-5, atol=1e-5).item(), (step, slot)


def test_a_ring_gives_the_same_bits_however_it_came_to_be(pool: KvPool) -> None:
    """Kept from before, filled anew from what a file holds, or made at each read: a restored sequence sums alike."""
    stayed = JudgedBatch(pool, [prefilled(pool, 40).kv, prefilled(pool, 100).kv])
    for step in range(21):
        attend(stayed, *rows(1, seed=step, sequences=2))
    again = JudgedBatch(pool, [kv.fork() for kv in stayed.rows])
    without = JudgedBatch(pool, [kv.fork() for kv in stayed.rows], keeps_decoded=False)
    for step in range(40):
        new = rows(1, seed=100 + step, sequences=2)
        expected = attend(stayed, *new)
        assert mx.array_equal(attend(again, *new), expected).item(), step
        assert mx.array_equal(attend(without, *new), expected).item(), step


def test_windows_join_and_leave_a_batch_without_a_trace(pool: KvPool) -> None:
    """The last slot takes the place of who leaves: no row becomes another's (LESSONS 15)."""
    batch, alone = JudgedBatch(pool, []), {}
    order: list[int] = []
    for step in range(70):
        if step % 7 == 0 and step // 7 < len(LENGTHS):
            name = step // 7
            batch.extend(JudgedBatch(pool, [prefilled(pool, LENGTHS[name]).kv]))
            alone[name] = prefilled(pool, LENGTHS[name])
            order.append(name)
        if step in (20, 33, 47, 55, 56, 57):
            slot = step % len(order)
            left, expected = batch.leave(slot), alone.pop(order[slot])
            order[slot] = order[-1]
            order.pop()
            assert left.length == expected.offset
            assert stored(left) == stored(expected.kv)
        batch.keeps_decoded = not 22 <= step < 26
        new = rows(1, seed=step, sequences=len(order))
        found = attend(batch, *new)
        for slot, name in enumerate(order):
            expected_row = attend(alone[name], *(part[slot : slot + 1] for part in new))
            assert mx.allclose(found[slot : slot + 1], expected_row, rtol=1e-5, atol=1e-5).item(), (step, name)


def test_a_right_padded_prompt_in_a_batch_of_windows_stores_only_what_is_each_rows_own(pool: KvPool) -> None:
    """Extracted before the padding is over, a sequence has its own tokens and no others (LESSONS 3)."""
    batch = JudgedBatch(pool, [prefilled(pool, length).kv for length in (5, 30, 70)])
    alone = [prefilled(pool, length) for length in (5, 30, 70)]
    counts = (20, 7, 3)
    batch.prepare(lengths=list(counts), right_padding=[0, 13, 17])
    new = rows(20, seed=4, sequences=3)
    found = [attend(batch, *(part[:, :, edge : edge + 10] for part in new)) for edge in (0, 10)]
    attended = mx.concatenate(found, axis=2)
    for slot, (count, layer) in enumerate(zip(counts, alone, strict=True)):
        own = [part[slot : slot + 1, :, :count] for part in new]
        expected = mx.concatenate(
            [attend(layer, *(part[:, :, edge : edge + 10] for part in own)) for edge in range(0, count, 10)], axis=2
        )
        assert mx.allclose(attended[slot : slot + 1, :, :count], expected, rtol=1e-5, atol=1e-5).item()
        assert batch.extract(slot).offset == layer.offset
    batch.finalize()
    one = rows(1, seed=8, sequences=3)
    found_next = attend(batch, *one)
    for slot, layer in enumerate(alone):
        expected = attend(layer, *(part[slot : slot + 1] for part in one))
        assert mx.allclose(found_next[slot : slot + 1], expected, rtol=1e-5, atol=1e-5).item()


def test_a_batch_of_windows_is_trimmed_where_every_row_can_be_or_not_at_all(pool: KvPool) -> None:
    batch = JudgedBatch(pool, [prefilled(pool, length).kv for length in (40, 530)])
    before = batch.offset.tolist()
    with pytest.raises(ValueError, match="not every window"):
        batch.trim(20)
    assert batch.offset.tolist() == before
    batch = JudgedBatch(pool, [prefilled(pool, length).kv for length in (40, 100)])
    attend(batch, *rows(1, seed=7, sequences=2))
    assert batch.trim(1) == 1
    straight, new = [prefilled(pool, 40), prefilled(pool, 100)], rows(1, seed=1, sequences=2)
    found = attend(batch, *new)
    for slot, layer in enumerate(straight):
        expected = attend(layer, *(part[slot : slot + 1] for part in new))
        assert mx.allclose(found[slot : slot + 1], expected, rtol=1e-5, atol=1e-5).item()


def test_sixteen_exact_bits_are_a_policy_for_windows_too() -> None:
    policy = identity_pb2.KvPolicy(key_bits=16, value_bits=16, scale_type=identity_pb2.SCALE_TYPE_FLOAT16)
    policy.key_rotation = identity_pb2.KEY_ROTATION_NONE
    layer = JudgedLayer(SequenceKV(pool_of([windowed(8)], policy)))
    layer.update_and_fetch(*rows(30, seed=1)[1:])
    assert [len(data) for data in stored(layer.kv)] == [HEADS * 7 * DIM * 2] * 2
