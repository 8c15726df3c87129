"""Codes that open the page once: a program with a key hands one to a browser, so that no key stands in an address."""

from collections import OrderedDict
from collections.abc import Callable

from kvasir.errors import Unauthenticated
from kvasir.waits import WORK_S

_MOST = 1000
_MOST_OF_A_KEY = 8  # so that nobody ends the codes of others


class Codes:
    """Codes that nobody has used yet, each with its key; the oldest go first."""

    def __init__(self, now: Callable[[], float], new_secret: Callable[[], str]) -> None:
        """`now`: Unix seconds. `new_secret`: letters and digits that nobody guesses."""
        self._now = now
        self._new_secret = new_secret
        self._made: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def new(self, key: str) -> str:
        """A code for the holder of this key."""
        own = [code for code, (made_for, _) in self._made.items() if made_for == key]
        for code in own[: max(0, len(own) + 1 - _MOST_OF_A_KEY)]:
            del self._made[code]
        while len(self._made) >= _MOST:
            self._made.popitem(last=False)
        code = self._new_secret()
        self._made[code] = key, self._now() + WORK_S
        return code

    def take(self, code: str) -> str:
        """The code's key; the code is used up. Raises Unauthenticated."""
        key, until_s = self._made.pop(code, ("", 0.0))
        if self._now() >= until_s:
            raise Unauthenticated(f"the code was used, or is older than {WORK_S:.0f} s: run `kvasir open` again")
        return key
