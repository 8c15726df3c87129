"""Which tokens of a window of masks are kept, and which of them are committed. Pure.

A place is a token's distance from the committed tokens: place 0 is the next one. Kept tokens stay what they are. Those
that stand without a gap behind the committed ones are committed, and the window slides over them. Behind a kept token
that ends the reply nothing is kept or computed.
"""

from collections.abc import Callable, Mapping
from itertools import count, takewhile
from math import inf
from typing import Generic, TypeVar

from inference_svc.model.wedlm import LARGEST_WINDOW, MaskWindow

DrawnT = TypeVar("DrawnT")


def sure_places(entropies: Mapping[int, float], window: MaskWindow) -> list[int]:
    """The places whose entropy (nats) and penalty (nats for each place in front) are below the threshold; the surest
    one if there is none, the first of equal ones. From left to right: those before the first unsure place, and place 0.
    `entropies`: by place, at least one.
    """
    threshold = window.entropy_threshold
    penalized = {place: entropy + window.position_penalty * place for place, entropy in sorted(entropies.items())}
    if window.left_to_right:
        return [0, *takewhile(lambda place: penalized.get(place, inf) < threshold, count(1))]
    sure = [place for place, value in penalized.items() if value < threshold]
    return sure or [min(penalized, key=penalized.__getitem__)]


class ReplyWindow(Generic[DrawnT]):
    """The tokens that one turn has drawn and not committed. `ends`: whether a token ends the reply."""

    def __init__(self, ends: Callable[[DrawnT], bool]) -> None:
        self.committed: int | None = None  # tokens of the last pass
        self._kept: dict[int, DrawnT] = {}
        self._ends = ends

    @property
    def kept(self) -> list[tuple[int, DrawnT]]:
        """Ascending by place: in this order they stand before the masks."""
        return sorted(self._kept.items())

    def masks(self, size: int) -> list[int]:
        """The places of a window of so many that have no token, up to the reply's end where it is kept; ascending."""
        return [place for place in range(min(size, self._end)) if place not in self._kept]

    def keep(self, drawn: Mapping[int, DrawnT]) -> None:
        """Tokens by place, each of which was drawn."""
        self._kept |= drawn
        end = self._end
        self._kept = {place: token for place, token in self._kept.items() if place <= end}

    def commit(self) -> list[DrawnT]:
        """Take the tokens from place 0 on, up to the first mask; the others are so much nearer now."""
        run: list[DrawnT] = []
        while len(run) in self._kept:
            run.append(self._kept.pop(len(run)))
        self._kept = {place - len(run): drawn for place, drawn in self._kept.items()}
        self.committed = len(run)
        return run

    @property
    def _end(self) -> int:
        return min((place for place, drawn in self._kept.items() if self._ends(drawn)), default=LARGEST_WINDOW)
