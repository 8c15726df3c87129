"""How much a step may prefill: whole cells, within a time while others speak, and no more tokens than the table says.

The grid says where a cell ends; this says only how many cells a step takes.
"""

from dataclasses import dataclass

# (prompt positions below this, the most tokens that a step prefills there). Deep positions attend to more, so each of
# their tokens costs more; the last entry has no end.
_TABLE = ((2_048, 4_096), (8_192, 2_048), (20_480, 1_024))
_BEYOND = 512


def most_tokens(position: int) -> int:
    """Prompt tokens that one step may prefill at `position`."""
    return next((tokens for below, tokens in _TABLE if position < below), _BEYOND)


@dataclass
class StepPace:
    """What one step has prefilled so far, and whether it may go on. A step's first cell is always allowed: everybody
    goes on, however short the budget and however large the cell.
    """

    budget_s: float
    tokens: int = 0
    cells: int = 0
    _limit: int = most_tokens(0)  # the least that the table says of any cell taken

    def allows(self, position: int, cell_tokens: int, spent_s: float, *, somebody_speaks: bool) -> bool:
        """Whether the cell of `cell_tokens` at `position` still belongs to this step, `spent_s` after its first prefill
        began. Without anybody who waits for a next token the time does not bind.
        """
        if self.cells == 0:
            return True
        if somebody_speaks and spent_s >= self.budget_s:
            return False
        return self.tokens + cell_tokens <= min(self._limit, most_tokens(position))

    def take(self, position: int, cell_tokens: int) -> None:
        self.cells += 1
        self.tokens += cell_tokens
        self._limit = min(self._limit, most_tokens(position))
