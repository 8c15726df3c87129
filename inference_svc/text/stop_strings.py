"""Stop strings in a text that arrives in pieces: which text is certain, which is held back, and when to end."""

from collections.abc import Sequence


class StopScanner:
    """Finds the first stop string in a growing text, and holds back only what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is now certain not to belong to a stop string; sets `matched` when one is complete."""
        self._held += text
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            index, self.matched = min(found)
            before, self._held = self._held[:index], ""
            return before
        certain = len(self._held) - self._possible_beginning()
        released, self._held = self._held[:certain], self._held[certain:]
        return released

    def rest(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
