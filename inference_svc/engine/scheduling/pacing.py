"""How much a step may prefill and load: a limited time while others decode, and a limited number of tokens.

The grid says where a cell ends; this says how many cells a step takes, and where cells may be cut, how long they are.

Between namespaces time is shared: a namespace's prompts may take from decoding others as much time as each of those
has of the decoding. Otherwise a crowd's prompts would take the budget and a cell more out of every step of theirs.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from inference_svc.engine.scheduling.company import Place

# (prompt positions below this, the most tokens that a step prefills there). Deep positions attend to more, so each of
# their tokens costs more; the last entry has no end.
_TABLE = ((2_048, 4_096), (8_192, 2_048), (20_480, 1_024))
_BEYOND = 512


def most_tokens(position: int) -> int:
    """Prompt tokens that a step may prefill which begins at `position` of a prompt."""
    return next((tokens for below, tokens in _TABLE if position < below), _BEYOND)


@dataclass
class StepPace:
    """What one step has prefilled so far, and whether it may go on. A step's first piece of work is always allowed:
    every turn goes on, however short the time and however large the cell. Of several prompts the deepest one's limit
    holds.
    """

    tokens: int = 0
    _starts: dict[Hashable, int] = field(default_factory=dict)  # by turn: the position of its first cell in this step

    @property
    def has_begun(self) -> bool:
        return bool(self._starts)

    def allows(self, turn: Hashable, position: int, cell_tokens: int) -> bool:
        """Whether the turn's cell of `cell_tokens` at `position` still belongs to this step, if there is time."""
        if not self.has_begun:
            return True
        deepest = max(self._starts.get(turn, position), *self._starts.values())
        return self.tokens + cell_tokens <= most_tokens(deepest)

    def take(self, turn: Hashable, position: int, cell_tokens: int) -> None:
        self.tokens += cell_tokens
        self._starts.setdefault(turn, position)


class SharedTime:
    """The time of namespaces' cells and files (`Place.taken_s`), and what they owe for prefill beside others' decoding
    (`Place.owed_s`). Unused time is not saved.
    """

    def __init__(self) -> None:
        self._step_s = self.cells_s = 0.0  # when the step began, and the seconds of its cells and files
        self._decoding = 0
        self._next: list[tuple[Place, int]] = []  # whose cells are computed next, and their tokens
        self._taken_s = 0.0  # by the namespace that was served last, before that

    def joins(self, place: Place) -> None:
        """A turn begins: its namespace comes before the one that was served last, no more."""
        place.taken_s = max(place.taken_s, self._taken_s)

    def begin_step(self, now: float, decoding: int, places: Iterable[Place]) -> None:
        """`decoding`: namespaces that decode in this step. The time of the last one makes up for what is owed."""
        decode_s = max(0.0, now - self._step_s - self.cells_s)
        paid_s = decode_s / self._decoding if self._decoding else 0.0
        for place in places:
            place.owed_s = max(0.0, place.owed_s - paid_s) if place.turns or self._decoding else 0.0
        self._step_s, self.cells_s, self._decoding = now, 0.0, decoding
        self._next.clear()

    def spent(self, cell_s: float) -> None:
        """The last pass took `cell_s`, each of its namespaces its cells' part, which it owes."""
        tokens = sum(count for _, count in self._next)
        if self._next:
            self._taken_s = max(self._taken_s, self._next[0][0].taken_s)
        for place, count in self._next:
            self.joins(place)  # a namespace may have stood back for others' more urgent turns
            place.taken_s += cell_s * count / tokens
            place.owed_s += cell_s * count / tokens
        self.cells_s += cell_s
        self._next.clear()

    def shares_next(self, place: Place, tokens: int, *, owes: bool) -> None:
        """A cell of so many tokens is in the next pass. `owes`: others decode beside it; else it comes to owe no more
        than this pass, to those who wait for it.
        """
        place.owed_s = place.owed_s if owes else 0.0
        self._next.append((place, tokens))
