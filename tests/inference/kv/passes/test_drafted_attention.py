"""Rows of one sequence read one K and V, and each is summed as if it read a copy of its own."""

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kv.batch.drafted_attention import attend_by_slot

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
WIDTH = 96


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.sampled_from([(4, 2), (4, 4), (6, 1)]), st.integers(0, 99))
def test_rows_of_a_slot_are_summed_as_over_a_copy_of_their_own(
    counts: list[int], heads: tuple[int, int], seed: int
) -> None:
    rows, (query_heads, kv_heads) = sum(counts), heads
    keys = mx.random.split(mx.random.key(seed), 4)
    queries = mx.random.normal((rows, query_heads, 1, 64), key=keys[0])
    stored = [mx.random.normal((len(counts), kv_heads, WIDTH, 64), key=key) for key in keys[1:3]]
    lengths = mx.random.randint(1, WIDTH + 1, (rows,), key=keys[3])
    mask = mx.arange(WIDTH)[None, None, None] < lengths[:, None, None, None]
    found = attend_by_slot(queries, *stored, counts, 0.125, mask)
    slots = mx.array([slot for slot, count in enumerate(counts) for _ in range(count)])
    copies = (each[slots] for each in stored)
    expected = mx.fast.scaled_dot_product_attention(queries, *copies, scale=0.125, mask=mask)
    # Bits are a CPU's promise: a GPU's product of other shapes may sum in another order.
    is_on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert (mx.array_equal(found, expected) if is_on_cpu else mx.allclose(found, expected, atol=1e-5)).item()
