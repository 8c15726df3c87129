"""How many positions a decoding step attends to on a CPU: no more than the bits of its rows need."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.model_hooks import row_exact
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_kv import SequenceKV
from tests.inference.kv.greedy import IS_MKL, Greedy, alone, prefilled, tokens_of
from tests.inference.kv.sequences import DIM, HEADS, fed, full, identity_of, pool_of

LENGTHS = (20, 230, 500, 900)  # within the first block of a long sum, and beyond it
STEPS = 2
# Rows of which lengths have other bits beside longer ones.
COMPARED = """
import inference_svc
import mlx.core as mx
from inference_svc.kv.model_hooks.row_exact import attention_width

queries, keys, values = (mx.random.normal((1, heads, 1600, 64), key=mx.random.key(heads)) for heads in (4, 2, 1))
queries, values = queries[:, :, :1], mx.concatenate([values, -values], axis=1)

def attended(length, width):
    rows = keys[:, :, :width], values[:, :, :width]
    return mx.fast.scaled_dot_product_attention(queries, *rows, scale=0.125, mask=mx.arange(width) < length)

def changes(length):
    widths = sorted({attention_width(longest) for longest in range(length, 1500, 31)})
    return not all(mx.array_equal(attended(length, widths[0]), attended(length, width)) for width in widths[1:])

print([length for length in range(2, 1200, 19) if changes(length)])
"""


@pytest.mark.cpu_only("a GPU attends over pages, and sums no position behind a row's end")
def test_a_row_keeps_its_bits_beside_rows_with_which_attention_is_wider(
    model: Any, new_kv: Callable[[], SequenceKV]
) -> None:
    single = {length: prefilled(model, new_kv(), tokens_of(length, length)) for length in LENGTHS}
    together = Greedy(model, single[LENGTHS[0]].pool)
    for length, kv in single.items():
        together.join(length, kv.fork(), 9)
    for _ in range(STEPS):
        together.step()
    for length, kv in single.items():
        assert np.array_equal(together.logits[length], alone(model, kv, 9, STEPS)), length


@pytest.mark.long(2)
@pytest.mark.cpu_only("a GPU attends over pages")
@pytest.mark.parametrize("instructions", ["", "AVX2"], ids=["own", "avx2"])
def test_a_length_has_the_same_bits_beside_any_longer_one_by_the_instructions_of_any_machine(instructions: str) -> None:
    """Where sums have parts depends on the instructions of which MKL makes them."""
    environment = {**os.environ, **({"MKL_ENABLE_INSTRUCTIONS": instructions} if instructions else {})}
    compared = subprocess.run([sys.executable, "-c", COMPARED], env=environment, check=True, capture_output=True)
    assert compared.stdout.decode().strip() == "[]" or not IS_MKL


@pytest.mark.cpu_only("a GPU attends over pages")
def test_short_rows_attend_to_their_positions_and_not_to_a_whole_block() -> None:
    """Of 128 tokens in and a short reply a block of 384 is twice as much."""
    step = row_exact._attention_step()
    if step == 1:  # this machine's sums do not depend on the width
        assert [row_exact.attention_width(rows) for rows in (1, 100, 1000)] == [1, 100, 1000]
        return
    assert row_exact._is_fine_within(step) or not IS_MKL
    if IS_MKL:
        widths = [row_exact.attention_width(rows) for rows in (1, 100, 180, step - 1, step + 1)]
        assert widths == [32, 128, 192, step, 2 * step]


def test_attention_has_whole_blocks_where_a_narrower_width_would_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_exact, "_attention_step", lambda: 384)
    monkeypatch.setattr(row_exact, "_is_fine_within", lambda _step: False)
    assert [row_exact.attention_width(rows) for rows in (1, 383, 384, 385)] == [384, 384, 384, 768]


def attended_rows(tokens: mx.array, caches: list[Any]) -> mx.array:
    [cache] = caches
    rows = mx.broadcast_to(tokens[:, None, None].astype(mx.float32), (tokens.shape[0], HEADS, 1, DIM))
    found: mx.array = mx.fast.scaled_dot_product_attention(
        rows, *cache.update_and_fetch(rows, rows), scale=1.0, mask=cache.make_mask(1)
    )
    return found.reshape(found.shape[0], 1, -1)


@pytest.mark.cpu_only("a GPU attends over pages")
def test_drafts_of_one_turn_read_its_rows_where_they_lie() -> None:
    """17 rows of a long text took 17 copies of it in each layer."""
    length, drafts = 4096, 16
    kv = fed(SequenceKV(pool_of([full()])), [length])
    batch = DecodeBatch(kv.pool, attended_rows, 1 << 30)
    batch.join(kv)
    mx.eval(batch.step([1]))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(batch.step(range(1 + drafts), [1 + drafts]))
    assert mx.get_peak_memory() - before < 4 * length * HEADS * 2 * DIM * mx.float32.size


@pytest.mark.parametrize(("dialect", "rows"), [(None, [64, 16, 4, 0]), (Dialect.CUDA, [64] * 4)], ids=["cpu", "pages"])
def test_drafts_are_as_many_as_may_read_their_text_each(
    dialect: Dialect | None, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 of them ended a CPU's process behind 32K tokens: MLX counts the numbers of a product in 32 bits."""
    monkeypatch.setattr(row_exact, "_attention_step", lambda: 1)  # else by this machine's sums: of 1,152 for 1,024
    pool = KvPool(identity_of([full(8, 128)]), 1 << 20, dialect=dialect)
    batch = DecodeBatch(pool, attended_rows, 0)
    assert [batch.most_drafted_rows(length - 1) for length in (256, 1024, 4096, 32768)] == rows


def test_a_pass_over_pages_has_room_for_the_rows_that_fill_slots_up_too() -> None:
    """One window of 64 rows made a hundred turns of one row each 8,192 rows, where a pass may have 256."""
    batch = DecodeBatch(KvPool(identity_of([full(8, 128)]), 1 << 20, dialect=Dialect.CUDA), attended_rows, 0)
    few, longest = 100, 5000
    assert [batch.has_room(counts, longest) for counts in ([64], [64] * 4, [24] * 8, [1] * 32)] == [True] * 4
    assert [batch.has_room(counts, longest) for counts in ([64, *[1] * few], [24] * 9, [64] * 5)] == [False] * 3


@pytest.mark.cpu_only("a GPU attends over pages")
def test_a_pass_over_copies_has_room_for_as_many_rows_as_there_are() -> None:
    batch = DecodeBatch(KvPool(identity_of([full(8, 128)]), 1 << 20), attended_rows, 0)
    assert batch.has_room([64, *[1] * 100], 200)
    assert not batch.has_room([64] * 5, 200)
    assert not batch.has_room([64], 5000)
