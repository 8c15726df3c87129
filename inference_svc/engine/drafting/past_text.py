"""Where the newest tokens of a turn came before: what followed them there may follow again. Pure.

Earlier places of each three tokens are linked, as coders of LZ77 link them: to look one up costs a few steps, and a
token costs one entry. A suffix automaton finds the same places, and costs two states and their transitions a token.
"""

from collections.abc import Sequence

import numpy as np

_GRAM = 3  # tokens that must be equal, at least
_BITS = 21  # of a token id: three fit a Python integer of one word
_MOST_TOKENS = 1 << 16  # of the text, the newest
_MOST_PLACES = 16  # that are compared
_LONGEST = 32  # equal tokens behind which no longer match is sought


class PastText:
    """The tokens of one turn, its prompt's and its reply's, by what stands before them."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens: list[int] = list(token_ids[-_MOST_TOKENS:])
        self._skipped = len(token_ids) - len(self._tokens)
        self._earlier = [-1] * len(self._tokens)  # by place: the newest earlier place that ends with the same three
        self._newest: dict[int, int] = {}  # by three tokens: the place of the last one
        if len(self._tokens) >= _GRAM:
            self._link_all()

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text is `token_ids` now, which begin with what it was."""
        for token in token_ids[self._skipped + len(self._tokens) :]:
            self._tokens.append(token)
            self._earlier.append(-1)
            if len(self._tokens) >= _GRAM:
                place = len(self._tokens) - 1
                gram = self._gram(place)
                self._earlier[place] = self._newest.get(gram, -1)
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

    def _link_all(self) -> None:
        ids = np.array(self._tokens, dtype=np.int64)
        grams = ids[:-2] | ids[1:-1] << _BITS | ids[2:] << 2 * _BITS
        order = np.argsort(grams, kind="stable")
        is_again = grams[order[1:]] == grams[order[:-1]]
        earlier = np.full(len(ids), -1)
        earlier[order[1:][is_again] + 2] = order[:-1][is_again] + 2
        self._earlier = earlier.tolist()
        self._newest = dict(zip(grams.tolist(), range(2, len(ids)), strict=True))
