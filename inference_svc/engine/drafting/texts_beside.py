"""The newest text of a namespace's other agents: agents of one task repeat one another. Pure.

Only texts whose KV is in memory now: with an agent's memory its text goes, too.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from weakref import WeakValueDictionary

from inference_svc.engine.drafting.past_text import GRAM, Found, GramPlaces, equal_tokens, gram_at
from inference_svc.text.token_ids import TokenIds

_MOST_TEXTS, _MOST_TOKENS = 16, 1024  # the newest, and of each its newest tokens
_MOST_PLACES = 4  # that are compared
_BETWEEN = (1 << 21) - 1  # texts; no token


class TextsBeside:
    """Texts of one namespace, the newest last, by three tokens."""

    def __init__(self, texts: Sequence[TokenIds]) -> None:
        self.texts = texts
        self._tokens = array("I", [_BETWEEN])
        for text in texts:
            self._tokens.frombytes(bytes(text[-_MOST_TOKENS:]))
            self._tokens.append(_BETWEEN)
        self._places = GramPlaces(self._tokens)

    def next(self, newest: "array[int]", most: int) -> Found:
        """The tokens that may follow the last of these, as `PastText.next`."""
        if not self.texts or len(newest) < GRAM:
            return (), 0
        found, equal = -1, 0
        for place in islice(self._places.newest_first(gram_at(newest, len(newest) - 1)), _MOST_PLACES):
            if (count := equal_tokens(self._tokens, place, newest)) > equal:
                found, equal = place, count
        if not equal:
            return (), 0
        following = self._tokens[found + 1 : found + 1 + most]
        end = following.index(_BETWEEN) if _BETWEEN in following else len(following)
        return tuple(following[:end]), equal


_NOTHING_BESIDE = TextsBeside(())


class TextsByNamespace:
    """Texts in memory, for turns of the same namespace; kept only as long as one of these turns is open."""

    def __init__(self, of_namespace: Callable[[str], Iterable[TokenIds]]) -> None:
        """`of_namespace`: texts that are in memory, the newest last."""
        self._of_namespace = of_namespace
        self._known: WeakValueDictionary[str, TextsBeside] = WeakValueDictionary()

    def beside(self, namespace: str | None) -> TextsBeside:
        """For a turn that begins. A turn without a namespace has nothing in common with others."""
        texts = [] if namespace is None else list(self._of_namespace(namespace))[-_MOST_TEXTS:]
        if namespace is None or not texts:
            return _NOTHING_BESIDE
        known = self._known.get(namespace)
        if known is None or list(map(id, known.texts)) != list(map(id, texts)):
            known = self._known[namespace] = TextsBeside(texts)
        return known
