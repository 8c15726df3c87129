"""Numbers of tokens in one buffer: cut, joined and compared at the speed of a copy, where a tuple looks at each."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray


class _Numbers(Sequence[int]):
    """Immutable. Equal to others of its kind only, not to lists or tuples of the same numbers."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        """Raises OverflowError for a number that does not fit 32 bits without a sign."""
        self._numbers: NDArray[np.uintc] = np.frombuffer(array("I", numbers), np.uintc)

    @classmethod
    def _of(cls, numbers: NDArray[np.uintc]) -> Self:
        found = cls.__new__(cls)
        found._numbers = numbers
        return found

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> int | Self:
        return self._of(self._numbers[place]) if isinstance(place, slice) else int(self._numbers[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist())

    def __add__(self, behind: Self) -> Self:
        return self._of(np.concatenate((self._numbers, behind._numbers)))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and np.array_equal(self._numbers, other._numbers)

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __bytes__(self) -> bytes:
        return self._numbers.tobytes()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._numbers.tolist()})"

    @property
    def largest(self) -> int:
        return int(self._numbers.max(initial=0))


class TokenIds(_Numbers):
    __slots__ = ()

    def growing(self) -> "array[int]":
        return array("I", bytes(self))


class TokenChars(_Numbers):
    """How many code points of a text each token completes."""

    __slots__ = ()

    @property
    def total(self) -> int:
        return int(self._numbers.sum())

    def packed(self) -> "bytes | TokenChars":
        """As bytes, where each number fits seven bits: a manifest has them so."""
        return self._numbers.astype(np.uint8).tobytes() if self.largest < 1 << 7 else self


NO_TOKENS, NO_CHARS = TokenIds(), TokenChars()


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The tokens of a sequence; token i completes `token_chars[i]` code points of the whole text."""

    token_ids: TokenIds
    token_chars: TokenChars
    shareable_tokens: int  # leading tokens computed on the grid from position 0, a multiple of 256
    rewind_points: tuple[int, ...] = ()  # token counts, ascending, that a model with states can go back to
    # The first token behind those of the reply that were computed one by one: how it was made, not what it is.
    decoded_to: int = field(default=0, compare=False)
    pending: int = 0  # the last tokens that have no KV yet: 1 where a reply ends them

    @property
    def computed(self) -> Self:
        """Of the tokens that have KV."""
        count = len(self.token_ids) - self.pending
        return replace(self, token_ids=self.token_ids[:count], token_chars=self.token_chars[:count], pending=0)
