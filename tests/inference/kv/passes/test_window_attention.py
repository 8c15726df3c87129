"""A window's rows attend to the positions that they see, and have the same bits beside any others."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kv.batch import window_attention
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
@pytest.mark.parametrize(("shared", "dim"), [(1, 64), (2, 64), (4, 64)])
def test_a_cpu_that_sums_alike_does_so_for_all_numbers_of_rows(shared: int, dim: int) -> None:
    """Of one whose BLAS sums otherwise, rows are summed as single ones."""
    if not sums_windows_alike(shared, dim, dim):
        return
    keys = mx.random.split(mx.random.key(7), 3)
    queries = mx.random.normal((64, 2 * shared, 1, dim), key=keys[0])
    stored = [mx.random.normal((2, 512, dim), key=key) for key in keys[1:]]

    def attended(first: int, last: int) -> mx.array:
        hidden = hidden_of(range(230 + first, 230 + last))
        return attend_window(
            queries[first:last], seen_rows(stored[0], hidden), seen_rows(stored[1], hidden), 0.1, hidden
        )

    whole = attended(0, 64)
    for rows in range(1, 64, 9):
        assert mx.array_equal(attended(64 - rows, 64), whole[-rows:]).item()
        assert mx.array_equal(attended(0, rows), whole[:rows]).item()


@pytest.mark.cpu_only("it tries a CPU's sums")
def test_a_cpu_is_tried_with_the_models_dimensions_and_all_rows_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLAS that cuts large products otherwise is found out, and not by a model of smaller heads."""
    summed = window_attention.attend_window

    def cut(queries: mx.array, keys: mx.array, values: mx.array, scale: float, hidden: mx.array) -> mx.array:
        found = summed(queries, keys, values, scale, hidden)
        return found * (1 + 1e-6) if queries.size >= 64 * 2 * 128 else found

    monkeypatch.setattr(window_attention, "attend_window", cut)
    tried = window_attention.sums_windows_alike.__wrapped__
    assert not tried(1, 128, 128)
    assert tried(1, 64, 64) == sums_windows_alike(1, 64, 64)
