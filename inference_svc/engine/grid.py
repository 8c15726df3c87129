"""The grid: where prefill is cut. Cell edges are a function of position alone, never of time or of who asks."""

from kvasir.formats.block_hash import BLOCK_TOKENS


def cell_end(position: int, prompt_tokens: int, cell_tokens: int) -> int:
    """Where the cell ends that begins at `position`: at the grid's next edge, or with the prompt."""
    return min((position // cell_tokens + 1) * cell_tokens, prompt_tokens)


def shareable_after(shareable: int, start: int, stop: int, cell_tokens: int) -> int:
    """Leading tokens computed on the grid from position 0, after [start, stop) was prefilled.

    A cell counts when it is whole and continues what counts already: then a cold run computes the same.
    """
    is_whole_cell = start % cell_tokens == 0 and stop - start == cell_tokens
    return stop if is_whole_cell and start == shareable else min(shareable, start // BLOCK_TOKENS * BLOCK_TOKENS)
