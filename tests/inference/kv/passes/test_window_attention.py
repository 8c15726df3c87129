"""A window's rows attend to the positions that they see, and have the same bits beside any others."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kv.batch.window_attention import attend_window, hidden_of, seen_rows, sums_windows_alike


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 600), st.integers(1, 40), st.sampled_from([(4, 2), (8, 2), (6, 1)]), st.integers(0, 99))
def test_rows_see_the_positions_up_to_their_own(before: int, rows: int, heads: tuple[int, int], seed: int) -> None:
    keys = mx.random.split(mx.random.key(seed), 3)
    queries = mx.random.normal((rows, heads[0], 1, 64), key=keys[0])
    stored = [mx.random.normal((heads[1], 768, 64), key=key) for key in keys[1:]]
    seen = range(before, before + rows)
    hidden = hidden_of(seen)
    found = attend_window(queries, seen_rows(stored[0], hidden), seen_rows(stored[1], hidden), 0.125, hidden)
    mask = mx.arange(768)[None, None, None] <= mx.array(list(seen))[:, None, None, None]
    copies = (mx.broadcast_to(each, (rows, *each.shape)) for each in stored)
    expected = mx.fast.scaled_dot_product_attention(queries, *copies, scale=0.125, mask=mask)
    assert mx.allclose(found, expected, atol=1e-5).item()


@pytest.mark.cpu_only("a GPU's kernels serve there, and its products depend on the number of rows")
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_this_cpu_sums_a_row_alike_beside_any_others(shared: int) -> None:
    assert sums_windows_alike(shared)
