"""Progress for a program that started this one: an object on a line of stderr, `done` of `total` bytes."""

import json
import time
from typing import Annotated

from kvasir.cli.caller import Caller
from kvasir.cli.showing.arguments import option
from kvasir.waits import PAUSE_S

ProgressOption = Annotated[
    bool, option("Print progress on standard error as JSON: done and total, in bytes.", "--progress")
]


class Progress:
    """Bytes that are done, of all. `total` may be a guess."""

    def __init__(self, caller: Caller | None) -> None:
        """None: nobody gets it."""
        self._caller = caller
        self._reported_s = 0.0
        self.total = self.done = 0

    def add(self, count: int) -> None:
        self.done += count
        if self._caller is not None and time.monotonic() - self._reported_s >= PAUSE_S:
            self._reported_s = time.monotonic()
            self._caller.note(json.dumps({"done": self.done, "total": max(self.total, self.done)}))


def is_progress(line: str) -> bool:
    """Whether a line of a program's stderr reports its progress."""
    return line.startswith('{"done": ')
