"""The grid that cuts prefill into cells. Their edges depend on the position alone; where cells are longer than blocks,
on a GPU, a cell may be cut beside others' streams, within the tolerance of 16-bit computing (DESIGN §3).
"""

from dataclasses import dataclass

from kvasir.formats.block_hash import BLOCK_TOKENS


def cell_end(position: int, prompt_tokens: int, cell_tokens: int) -> int:
    """The end of the cell that begins at `position`: the grid's next edge, or the prompt's end."""
    return min((position // cell_tokens + 1) * cell_tokens, prompt_tokens)


def cut_cell(position: int, cell_tokens: int, most_tokens: int, edge_tokens: int) -> int:
    """The tokens of a cell from `position` on that fit `most_tokens`: all, or to the last multiple of `edge_tokens`."""
    if cell_tokens <= most_tokens:
        return cell_tokens
    return (position + most_tokens) // edge_tokens * edge_tokens - position


@dataclass
class Cells:
    """How much of a turn is computed, the prompt in cells of the grid."""

    prompt_tokens: int
    cell_tokens: int
    rewind_point: int = 0  # prompt tokens after which the memory must have a rewind point; 0 for none
    cached: int = 0  # tokens that the turn began with
    computed: int = 0  # leading tokens whose KV exists: the next cell begins there
    on_grid: int = 0  # leading tokens whose KV was computed on the grid, without a gap

    def begin(self, cached: int, shareable: int) -> None:
        self.cached = self.computed = cached
        self.on_grid = _whole_blocks(min(shareable, cached))

    def prefilled(self, tokens: int) -> None:
        if self.on_grid == self.computed:  # wherever a cell was cut, the next one goes on with its block
            self.on_grid += tokens
        self.computed += tokens

    def resume(self, computed: int) -> None:
        """KV of the first `computed` tokens came back. The rest is computed again, in the same cells."""
        self.computed, self.on_grid = computed, min(self.on_grid, computed)

    @property
    def full_blocks(self) -> int:
        return self.computed // BLOCK_TOKENS

    @property
    def rest_tokens(self) -> int:
        """Prompt tokens left to compute."""
        return max(0, self.prompt_tokens - self.computed)

    @property
    def unbroken_tokens(self) -> int:
        """Prompt tokens up to the prompt's end, or to a rewind point, at which a cell must end."""
        # Where a rewind point is requested a cell ends: a function of the prompt alone, like the grid.
        return (self.rewind_point if self.computed < self.rewind_point else self.prompt_tokens) - self.computed

    @property
    def next_tokens(self) -> int:
        """Of the next cell: up to the grid's next edge, or less."""
        return cell_end(self.computed, self.computed + self.unbroken_tokens, self.cell_tokens) - self.computed

    @property
    def shareable(self) -> int:
        """Leading tokens, in whole blocks, whose KV other turns may share: what a cold run would have computed. Where
        cells are no longer than blocks, it has the bits of a cold run. Where they are longer, a prompt's last cell may
        have been cut elsewhere: then the bits are those of another shape of the same product, within the tolerance of
        16-bit computing (DESIGN §3).
        """
        return _whole_blocks(self.on_grid)

    @property
    def final_shareable(self) -> int:
        """The value of `shareable` once the prompt is computed: a turn that left the grid stays off it."""
        return _whole_blocks(self.prompt_tokens) if self.on_grid == self.computed else self.shareable


def _whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
