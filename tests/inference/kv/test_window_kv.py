"""A sliding-window layer: what attention is given, what is held, and how far back it can go."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from kvasir.cachestore.v1 import identity_pb2
from mlx_lm.models.cache import RotatingKVCache

from inference_svc.kv.batch.batch_window import BatchWindowKV
from inference_svc.kv.capacity import live_state_bytes
from inference_svc.kv.codec import EncodedRows, layer_codecs
from inference_svc.kv.window_kv import WindowKV
from tests.inference.kv.mlx_lm_batch import JudgedBatchWindowKV
from tests.inference.kv.sequences import four_bits

HEADS, DIM = 2, 64
CHUNKS = {
    "token by token": [1] * 40,
    "a prompt, then tokens": [30, *[1] * 30],
    "prompts and tokens": [5, 1, 1, 17, 2, 40, 1, 2, 64, 2, 3, *[1] * 20],
    "longer than any buffer": [700, *[1] * 5, 300, 1, 1],
}


class Unrounded:
    """A codec that loses nothing: what differs then is not rounding."""

    bits, part_count = 32, 1

    def problem(self, dim: int) -> str:
        return f"{dim}" if dim < 1 else ""

    def encode(self, rows: mx.array) -> EncodedRows:
        return (rows,)

    def decode(self, parts: EncodedRows, dtype: mx.Dtype) -> mx.array:
        return parts[0].astype(dtype)


def unrounded(window: int) -> WindowKV:
    return WindowKV(Unrounded(), Unrounded(), window)


def quantized(window: int) -> WindowKV:
    return WindowKV(*layer_codecs(four_bits(), 0), window)


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
    return (
        cache.max_size
        if isinstance(cache, RotatingKVCache)
        else (
            cache.window if isinstance(cache, WindowKV) else cache.rows[0].window  # type: ignore[attr-defined]
        )
    )


def in_chunks(count: Sequence[int], parts: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    edges = [0, *np.cumsum(count).tolist()]
    for start, stop in pairwise(edges):
        yield [part[:, :, start:stop] for part in parts]


@pytest.mark.parametrize("window", [2, 8, 33, 96])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_attention_over_a_window_is_what_it_is_over_mlx_lms_own(window: int, chunks: list[int]) -> None:
    ours, theirs = unrounded(window), RotatingKVCache(max_size=window)
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
    codec = layer.keys.codec
    seen_keys, seen_values = (np.array(codec.decode(codec.encode(part), mx.float32))[0] for part in (keys, values))
    for position in range(total):
        span = slice(max(0, position - window + 1), position + 1)
        scores = np.einsum("hd,htd->ht", np.array(queries)[0, :, position], seen_keys[:, span]) * DIM**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), seen_values[:, span])
        np.testing.assert_allclose(np.array(found)[0, :, position], expected, rtol=1e-4, atol=1e-4)


def test_what_is_held_is_bounded_by_the_window_and_not_by_the_sequence() -> None:
    layer, largest = quantized(100), 0
    for chunk in in_chunks([256] * 8 + [1] * 600, rows(256 * 8 + 600, seed=1)):
        layer.update_and_fetch(*chunk[1:])
        mx.eval(layer.state)
        largest = max(largest, layer.nbytes)
        assert layer.held_rows >= layer.kept_rows == min(99, layer.offset)
    row_bytes = HEADS * 2 * (DIM // 2 + 4)
    entry = identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_WINDOW, window=100, kv_heads=HEADS, key_dim=DIM, value_dim=DIM
    )
    identity = identity_pb2.KvIdentity(layers=[entry], policy=four_bits())
    assert largest == 512 * row_bytes, "a cell, the window and some spare rows, in whole steps"
    assert largest <= live_state_bytes(identity, 256), "what admission counts on"
    kept = layer.compacted()
    mx.eval(kept.state)
    assert kept.nbytes == 99 * row_bytes


@pytest.mark.parametrize("length", [20, 63, 64, 65, 300, 1000])
def test_a_window_is_trimmed_only_where_all_that_is_seen_there_is_left(length: int) -> None:
    """Elsewhere it refuses, for the rows are gone (LESSONS 5)."""
    window = 64
    queries, keys, values = rows(length, seed=2)
    for back in (1, 5, 63, 64, 65, 200):
        layer = quantized(window)
        for chunk in in_chunks([length - length // 2, *[1] * (length // 2)], (queries, keys, values)):
            layer.update_and_fetch(*chunk[1:])
        target = max(0, length - back)
        if not layer.can_trim_to(target):
            assert not layer.is_trimmable()
            with pytest.raises(ValueError, match="cannot go back"):
                layer.trim(back)
            assert layer.offset == length
            continue
        assert layer.trim(back) == length - target
        straight = quantized(window)
        if target:
            straight.update_and_fetch(keys[:, :, :target], values[:, :, :target])
        new = rows(3, seed=9)
        assert mx.array_equal(attend(layer, *new), attend(straight, *new)).item()
    assert quantized(window).can_trim_to(0)


def test_a_fork_of_a_window_sees_nothing_of_what_either_side_goes_on_with() -> None:
    layer = quantized(16)
    layer.update_and_fetch(*rows(40, seed=1)[1:])
    fork, copied = layer.fork(), layer.compacted()
    untouched = [np.array(part) for part in copied.decoded(15, mx.float32, mx.float32)]
    for seed in range(30):
        layer.update_and_fetch(*rows(1, seed=seed)[1:])
        fork.update_and_fetch(*rows(1, seed=100 + seed)[1:])
    assert not mx.array_equal(*(side.decoded(15, mx.float32, mx.float32)[0] for side in (layer, fork))).item()
    for before, after in zip(untouched, copied.decoded(15, mx.float32, mx.float32), strict=True):
        assert np.array_equal(before, np.array(after))


@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 200])
def test_what_a_file_holds_of_a_window_is_all_that_it_needs(length: int) -> None:
    layer = quantized(64)
    layer.update_and_fetch(*rows(length, seed=3)[1:])
    mx.eval(layer.state)
    kept = min(63, length)
    assert [len(data) for data in layer.to_bytes()] == [HEADS * kept * size for size in (DIM // 2, 2, 2)] * 2
    read = [part for buffer in layer.compacted().buffers for part in buffer.parts]
    restored = quantized(64)
    restored.put_parts(length, read)
    assert (restored.offset, restored.held_rows) == (length, kept)
    for seed in range(3):
        new = rows(20, seed)
        assert mx.array_equal(attend(restored, *new), attend(layer, *new)).item()
        single = rows(1, seed)
        assert mx.array_equal(attend(restored, *single), attend(layer, *single)).item()


# --- several sequences ---

LENGTHS = (1, 15, 16, 17, 31, 40, 100)


def prefilled(length: int, window: int = 16) -> WindowKV:
    layer = quantized(window)
    for chunk in in_chunks([length - length // 3, *[1] * (length // 3)], rows(length, seed=length)):
        layer.update_and_fetch(*chunk[1:])
    return layer


@pytest.mark.parametrize("keeps_decoded", [True, False], ids=["copies", "decoding on read"])
def test_a_batch_of_windows_attends_as_each_does_alone(keeps_decoded: bool) -> None:
    """Over 40 tokens, with rings that turn at different moments (LESSONS 2)."""
    batch = BatchWindowKV([prefilled(length) for length in LENGTHS], keeps_decoded=keeps_decoded)
    alone = [prefilled(length) for length in LENGTHS]
    for step in range(40):
        assert batch.offset.tolist() == [layer.offset for layer in alone]
        new = rows(1, seed=step, sequences=len(LENGTHS))
        found = attend(batch, *new)
        for slot, layer in enumerate(alone):
            expected = attend(layer, *(part[slot : slot + 1] for part in new))
            assert mx.allclose(found[slot : slot + 1], expected, rtol=1e-5, atol=1e-5).item(), (step, slot)


def test_a_ring_gives_the_same_bits_however_it_came_to_be() -> None:
    """Kept from before, filled anew from what a file holds, or made at each read: a restored sequence sums alike."""
    stayed = BatchWindowKV([prefilled(40), prefilled(100)])
    for step in range(21):
        attend(stayed, *rows(1, seed=step, sequences=2))
    left = stayed.flush(0).fork()
    again = BatchWindowKV([left.compacted(), stayed.flush(1).fork()])
    without = BatchWindowKV([left, stayed.flush(1).fork()], keeps_decoded=False)
    for step in range(40):
        new = rows(1, seed=100 + step, sequences=2)
        expected = attend(stayed, *new)
        assert mx.array_equal(attend(again, *new), expected).item(), step
        assert mx.array_equal(attend(without, *new), expected).item(), step


def test_windows_join_and_leave_a_batch_without_a_trace() -> None:
    """The last slot takes the place of who leaves: no row becomes another's (LESSONS 15)."""
    batch, alone = BatchWindowKV(), {}
    order: list[int] = []
    for step in range(70):
        if step % 7 == 0 and step // 7 < len(LENGTHS):
            name = step // 7
            batch.join(prefilled(LENGTHS[name]))
            alone[name] = prefilled(LENGTHS[name])
            order.append(name)
        if step in (20, 33, 47, 55, 56, 57):
            slot = step % len(order)
            left, expected = batch.leave(slot), alone.pop(order[slot])
            order[slot] = order[-1]
            order.pop()
            assert left.offset == expected.offset
            kept = (left.kept_rows, mx.float32, mx.float32)
            assert mx.array_equal(left.decoded(*kept)[0], expected.decoded(*kept)[0]).item()
        if step == 22:
            batch.keep_decoded(False)
        if step == 26:
            batch.keep_decoded(True)
        new = rows(1, seed=step, sequences=len(order))
        found = attend(batch, *new)
        for slot, name in enumerate(order):
            expected_row = attend(alone[name], *(part[slot : slot + 1] for part in new))
            assert mx.allclose(found[slot : slot + 1], expected_row, rtol=1e-5, atol=1e-5).item(), (step, name)


def test_a_right_padded_prompt_in_a_batch_of_windows_stores_only_what_is_each_rows_own() -> None:
    """Extracted before the padding is over, a sequence has its own tokens and no others (LESSONS 3)."""
    batch = JudgedBatchWindowKV([prefilled(length) for length in (5, 30, 70)])
    alone = [prefilled(length) for length in (5, 30, 70)]
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


def test_a_batch_of_windows_is_trimmed_where_every_row_can_be_or_not_at_all() -> None:
    batch = JudgedBatchWindowKV([prefilled(40), prefilled(100).compacted()])
    before = batch.offset.tolist()
    with pytest.raises(ValueError, match="not every window"):
        batch.trim(1)
    assert batch.offset.tolist() == before
    batch = JudgedBatchWindowKV([prefilled(40), prefilled(100)])
    attend(batch, *rows(1, seed=7, sequences=2))
    assert batch.trim(1) == 1
    straight, new = [prefilled(40), prefilled(100)], rows(1, seed=1, sequences=2)
    found = attend(batch, *new)
    for slot, layer in enumerate(straight):
        expected = attend(layer, *(part[slot : slot + 1] for part in new))
        assert mx.allclose(found[slot : slot + 1], expected, rtol=1e-5, atol=1e-5).item()


def test_sixteen_exact_bits_are_a_policy_for_windows_too() -> None:
    policy = identity_pb2.KvPolicy(key_bits=16, value_bits=16, scale_type=identity_pb2.SCALE_TYPE_FLOAT16)
    policy.key_rotation = identity_pb2.KEY_ROTATION_NONE
    layer = WindowKV(*layer_codecs(policy, 0), 8)
    layer.update_and_fetch(*rows(30, seed=1)[1:])
    mx.eval(layer.state)
    assert [len(data) for data in layer.to_bytes()] == [HEADS * 7 * DIM * 2] * 2
