"""The grid that cuts prefill into cells. Cell edges depend on the position alone, never on time or on the caller."""

from kvasir.formats.block_hash import BLOCK_TOKENS


def cell_end(position: int, prompt_tokens: int, cell_tokens: int) -> int:
    """The end of the cell that begins at `position`: the grid's next edge, or the prompt's end."""
    return min((position // cell_tokens + 1) * cell_tokens, prompt_tokens)


def shareable_after(shareable: int, start: int, stop: int, cell_tokens: int) -> int:
    """Leading tokens computed on the grid from position 0, after [start, stop) was prefilled.

    A cell counts if it is whole and continues the cells that count already: then a cold run computes the same.
    """
    is_whole_cell = start % cell_tokens == 0 and stop - start == cell_tokens
    return stop if is_whole_cell and start == shareable else min(shareable, start // BLOCK_TOKENS * BLOCK_TOKENS)
