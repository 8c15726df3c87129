"""The time of a start: phases by name, from the process's begin until it is ready."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from kvasir.credentials import replace_private_text

_FILE = "start.json"


class StartPhases:
    """Phases follow each other. Those of a model that is loaded later are not counted."""

    def __init__(self, first: str, began_s: float, clock: Callable[[], float]) -> None:
        """`began_s`: when the first phase began, on the clock."""
        self._clock = clock
        self._begins: list[tuple[str, float]] = [(first, began_s)]
        self._ended_s: float | None = None

    def begin(self, name: str) -> None:
        if self._ended_s is None:
            self._begins.append((name, self._clock()))

    def end(self) -> None:
        self._ended_s = self._clock()

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, in their order. One that came twice has both times."""
        last_s = self._clock() if self._ended_s is None else self._ended_s
        ends = [*(begin for _, begin in self._begins[1:]), last_s]
        found: dict[str, float] = {}
        for (name, begin), end in zip(self._begins, ends, strict=True):
            found[name] = found.get(name, 0.0) + end - begin
        return found

    @property
    def in_words(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

    def write(self, directory: Path) -> None:
        """For `kvasir up`. A disk that takes no file costs nothing but the report."""
        text = json.dumps({name: round(seconds, 3) for name, seconds in self.seconds.items()})
        with contextlib.suppress(OSError):
            replace_private_text(directory / _FILE, text)
