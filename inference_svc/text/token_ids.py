"""Token ids in one buffer: cut, joined and compared at the speed of a copy, where a tuple looks at every number."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray


class TokenIds(Sequence[int]):
    """Immutable. Equal to other token ids only, not to lists or tuples of the same numbers."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Raises OverflowError for a number that does not fit 32 bits without a sign."""
        self._ids: NDArray[np.uintc] = np.frombuffer(array("I", ids), np.uintc)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "TokenIds": ...
    def __getitem__(self, place: int | slice) -> "int | TokenIds":
        return _of(self._ids[place]) if isinstance(place, slice) else int(self._ids[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __add__(self, behind: "TokenIds") -> "TokenIds":
        return _of(np.concatenate((self._ids, behind._ids)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and np.array_equal(self._ids, other._ids)

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __bytes__(self) -> bytes:
        return self._ids.tobytes()

    def __repr__(self) -> str:
        return f"TokenIds({self._ids.tolist()})"

    @property
    def largest(self) -> int:
        return int(self._ids.max(initial=0))

    def growing(self) -> "array[int]":
        return array("I", bytes(self))


def _of(ids: NDArray[np.uintc]) -> TokenIds:
    found = TokenIds.__new__(TokenIds)
    found._ids = ids
    return found


NO_TOKENS = TokenIds()


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The tokens of a sequence; token i completes `token_chars[i]` code points of the whole text."""

    token_ids: TokenIds
    token_chars: tuple[int, ...]
    shareable_tokens: int  # leading tokens computed on the grid from position 0, a multiple of 256
    rewind_points: tuple[int, ...] = ()  # token counts, ascending, that a model with states can go back to
    # The first token behind those of the reply that were computed one by one: how it was made, not what it is.
    decoded_to: int = field(default=0, compare=False)
