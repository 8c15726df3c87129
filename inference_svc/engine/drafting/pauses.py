"""When a turn looks for drafts: at each token, and less often while looks find nothing that is worth trying. Pure.

A look takes the processor's time, and the step behind drafts that are then not tried is not enqueued ahead.
"""

_FEW_MISSES = 4  # after each so many the turn waits twice as long
LONGEST_WAIT = 8  # tokens: a text that begins to repeat itself waits no longer


class Pauses:
    def __init__(self) -> None:
        self._misses = 0  # since drafts were right

    def missed(self, clock: int) -> int:
        """A look gave nothing that was tried. Returns after how many more tokens the next one is worth it. Turns that
        are given the same clock, which counts their steps, look in the same steps: a second look costs less.
        """
        wait = min(1 << self._misses // _FEW_MISSES, LONGEST_WAIT)
        self._misses += 1
        return wait - clock % wait

    def found(self) -> None:
        """A look gave drafts that were right."""
        self._misses = 0
