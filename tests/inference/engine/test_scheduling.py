"""Where prefill is cut, and how many rows buffers get: arithmetic without tensors."""

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.engine.grid import cell_end, shareable_after


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([256, 512, 1024]))
def test_cells_meet_at_edges_that_only_position_decides(start: int, more: int, cell: int) -> None:
    prompt, edges, position = start + more, [], start
    while position < prompt:
        position = cell_end(position, prompt, cell)
        edges.append(position)
    assert edges == [*range((start // cell + 1) * cell, prompt, cell), prompt]


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_only_whole_cells_from_the_beginning_are_shareable(cut: int, more: int) -> None:
    def prefill(shareable: int, start: int, stop: int) -> int:
        while start < stop:
            end = cell_end(start, stop, 256)
            shareable, start = shareable_after(shareable, start, end), end
        return shareable

    once = prefill(0, 0, cut + more)
    assert once == (cut + more) // 256 * 256
    first = prefill(0, 0, cut)
    resumed = prefill(first, cut, cut + more)
    assert resumed == (once if cut % 256 == 0 else first)
