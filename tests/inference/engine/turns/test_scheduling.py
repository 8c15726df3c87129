"""Where prefill is cut, and how many rows buffers get: arithmetic without tensors."""

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.engine.grid import cell_end


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([256, 512, 1024]))
def test_cells_meet_at_edges_that_only_position_decides(start: int, more: int, cell: int) -> None:
    prompt, edges, position = start + more, [], start
    while position < prompt:
        position = cell_end(position, prompt, cell)
        edges.append(position)
    assert edges == [*range((start // cell + 1) * cell, prompt, cell), prompt]
