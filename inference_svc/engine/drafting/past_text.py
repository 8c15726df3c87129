"""Where the newest tokens of a turn came before: what followed them there may follow again. Pure.

Earlier places of each three tokens are linked, as coders of LZ77 link them: to look one up costs a few steps, and a
token costs one entry. A suffix automaton finds the same places, and costs two states and their transitions a token.
Those of the text at the beginning are sorted: to enter 64K tokens in a dictionary takes the time of a few steps.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

GRAM = 3  # tokens that must be equal, at least
_BITS = 21  # of a token id: three fit a Python integer of one word
_MOST_TOKENS = 1 << 16  # of the text, the newest
_MOST_PLACES = 16  # that are compared
LONGEST = 32  # equal tokens behind which no longer match is sought


Found = tuple[tuple[int, ...], int]  # tokens that may follow, and how many tokens in front of them were equal


class PastText:
    """The tokens of one turn, its prompt's and its reply's, by what stands before them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.tokens = array("I", token_ids[-_MOST_TOKENS:])
        self._skipped = len(token_ids) - len(self.tokens)
        self._beginning = GramPlaces(self.tokens)
        # By place: the newest earlier place that ends with the same three; behind the beginning, of those behind it.
        self._earlier = self._beginning.earlier(len(self.tokens))
        self._begun = len(self.tokens)
        self._newest: dict[int, int] = {}  # by three tokens: the place of the last one, since the beginning

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text is `token_ids` now, which begin with what it was."""
        tokens, earlier, newest = self.tokens, self._earlier, self._newest
        first, second = (0, 0, *tokens[-2:])[-2:]
        for place, token in enumerate(token_ids[self._skipped + len(tokens) :], len(tokens)):
            tokens.append(token)
            gram = first | second << _BITS | token << 2 * _BITS if place >= GRAM - 1 else -1
            earlier.append(newest.get(gram, -1))
            newest[gram] = place if gram >= 0 else -1
            first, second = second, token

    def next(self, most: int) -> Found:
        """What may follow, at most so many tokens, and how many of the last tokens were equal there: the most of all
        places, of the newest among these; nothing, and 0, where the last three tokens are new.
        """
        last = len(self.tokens) - 1
        found, equal = -1, 0
        for place in islice(self._earlier_places(last), _MOST_PLACES):
            if equal >= LONGEST:
                break
            if (count := equal_tokens(self.tokens, place, self.tokens)) > equal:
                found, equal = place, count
        if found < 0:
            return (), 0
        period = last - found  # a text that repeats itself goes on doing so
        return tuple(self.tokens[found + 1 + step % period] for step in range(most)), equal

    def _earlier_places(self, last: int) -> Iterator[int]:
        """Those that end with the same three tokens as this one, the newest first."""
        if last < GRAM - 1:
            return
        place = self._earlier[last]
        while place >= 0:
            yield place
            place = self._earlier[place]
        if last >= self._begun:
            yield from self._beginning.newest_first(gram_at(self.tokens, last))


class GramPlaces:
    """Where each three tokens of a text end."""

    def __init__(self, tokens: "array[int]") -> None:
        ids = np.array(tokens, dtype=np.int64)
        grams = ids[:-2] | ids[1:-1] << _BITS | ids[2:] << 2 * _BITS
        places = np.argsort(grams, kind="stable")  # by gram, equal ones in the text's order
        self._grams = array("q", grams[places].tobytes())
        self._places = array("i", (places + GRAM - 1).astype(np.int32).tobytes())

    def newest_first(self, gram: int) -> Iterator[int]:
        found = bisect_right(self._grams, gram) - 1  # of an array: numpy's search takes longer for one number
        while found >= 0 and self._grams[found] == gram:
            yield self._places[found]
            found -= 1

    def earlier(self, count: int) -> "array[int]":
        """By place: the place before it that ends with the same three; -1 where none does."""
        grams, places = np.frombuffer(self._grams, np.int64), np.frombuffer(self._places, np.int32)
        is_again = grams[1:] == grams[:-1]
        earlier = np.full(count, -1, dtype=np.int32)
        earlier[places[1:][is_again]] = places[:-1][is_again]
        return array("i", earlier.tobytes())


def gram_at(tokens: "array[int]", place: int) -> int:
    first, second, third = tokens[place - 2 : place + 1]
    return first | second << _BITS | third << 2 * _BITS


def equal_tokens(text: "array[int]", place: int, newest: "array[int]") -> int:
    """How many tokens up to the place equal the last ones of `newest`, of which three do."""
    count, last = GRAM, len(newest) - 1
    while count < LONGEST and count <= min(place, last) and text[place - count] == newest[last - count]:
        count += 1
    return count
