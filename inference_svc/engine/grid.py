"""The grid that cuts prefill into cells. Their edges depend on the position alone; where cells are longer than blocks,
on a GPU, a cell may be cut beside others' streams, within the tolerance of 16-bit computing (DESIGN §3).
"""


def cell_end(position: int, prompt_tokens: int, cell_tokens: int) -> int:
    """The end of the cell that begins at `position`: the grid's next edge, or the prompt's end."""
    return min((position // cell_tokens + 1) * cell_tokens, prompt_tokens)


def cut_cell(position: int, cell_tokens: int, most_tokens: int, edge_tokens: int) -> int:
    """The tokens of a cell from `position` on that fit `most_tokens`: all, or to the last multiple of `edge_tokens`."""
    if cell_tokens <= most_tokens:
        return cell_tokens
    return (position + most_tokens) // edge_tokens * edge_tokens - position
