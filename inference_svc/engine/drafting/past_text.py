"""Where the newest tokens of a turn came before: what followed them there may follow again. Pure.

Earlier places of each three tokens are linked, as coders of LZ77 link them: to look one up costs a few steps, and a
token costs one entry. A suffix automaton finds the same places, and costs two states and their transitions a token.
Those of the text at the beginning are sorted: to enter 64K tokens in a dictionary takes the time of a few steps.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GRAM = 3  # tokens that must be equal, at least
_BITS = 21  # of a token id: three fit a Python integer of one word
_MOST_TOKENS = 1 << 16  # of the text, the newest
_MOST_PLACES = 16  # that are compared
_LONGEST = 32  # equal tokens behind which no longer match is sought


class PastText:
    """The tokens of one turn, its prompt's and its reply's, by what stands before them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = array("I", token_ids[-_MOST_TOKENS:])
        self._skipped = len(token_ids) - len(self._tokens)
        grams = _grams(self._tokens)
        self._places = np.argsort(grams, kind="stable").astype(np.int32)  # by gram, equal ones in the text's order
        self._grams = grams[self._places]
        # By place: the newest earlier place that ends with the same three.
        self._earlier = array("i", _earlier(self._grams, self._places, len(self._tokens)).tobytes())
        self._newest: dict[int, int] = {}  # by three tokens: the place of the last one, since the beginning

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text is `token_ids` now, which begin with what it was."""
        for token in token_ids[self._skipped + len(self._tokens) :]:
            self._tokens.append(token)
            self._earlier.append(-1)
            if len(self._tokens) >= _GRAM:
                place = len(self._tokens) - 1
                gram = self._gram(place)
                self._earlier[place] = self._newest.get(gram) or self._place_at_beginning(gram)
                self._newest[gram] = place

    def next(self, most: int) -> tuple[tuple[int, ...], int]:
        """What may follow, at most so many tokens, and how many of the last tokens were equal there: the most of all
        places, of the newest among these; nothing, and 0, where the last three tokens are new.
        """
        last = len(self._tokens) - 1
        place, found, equal = self._earlier[last] if last >= 0 else -1, -1, 0
        for _ in range(_MOST_PLACES):
            if place < 0 or equal >= _LONGEST:
                break
            if (count := self._equal(place, last)) > equal:
                found, equal = place, count
            place = self._earlier[place]
        if found < 0:
            return (), 0
        period = last - found  # a text that repeats itself goes on doing so
        return tuple(self._tokens[found + 1 + step % period] for step in range(most)), equal

    def _equal(self, place: int, last: int) -> int:
        count = _GRAM
        while count < _LONGEST and count <= place and self._tokens[place - count] == self._tokens[last - count]:
            count += 1
        return count

    def _gram(self, place: int) -> int:
        first, second, third = self._tokens[place - 2 : place + 1]
        return first | second << _BITS | third << 2 * _BITS

    def _place_at_beginning(self, gram: int) -> int:
        found = int(np.searchsorted(self._grams, gram, side="right")) - 1
        return int(self._places[found]) + _GRAM - 1 if found >= 0 and self._grams[found] == gram else -1


def _grams(tokens: "array[int]") -> NDArray[np.int64]:
    """Each three tokens as one number."""
    ids = np.array(tokens, dtype=np.int64)
    return ids[:-2] | ids[1:-1] << _BITS | ids[2:] << 2 * _BITS


def _earlier(grams: NDArray[np.int64], places: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    is_again = grams[1:] == grams[:-1]
    earlier = np.full(count, -1, dtype=np.int32)
    earlier[places[1:][is_again] + _GRAM - 1] = places[:-1][is_again] + _GRAM - 1
    return earlier
