"""What the parts of a step cost, learned from steps that were made: it says how much fits into a gap of streams.

Pure: callers pass in the time. A token of a prompt costs more the deeper it lies, because it attends to more; so cells
are remembered by how often their position doubles. A pass that cells share costs less for each token, because a device
keeps its graph: so these are remembered apart.
"""

import math
from collections import deque
from statistics import median, median_low

_PLAIN_STEPS = 9  # that are remembered: a few slow ones among them change nothing
_CELLS = 5  # of a depth that are remembered: one for which kernels were compiled changes nothing


class StepCosts:
    """Seconds of a step that only decodes, of a prompt's token, and of files that become KV."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PLAIN_STEPS)  # rows and seconds
        # By whether the cell shared a pass, and the bits of its position.
        self._token_s: dict[tuple[bool, int], deque[float]] = {}
        self._load: tuple[int, float] | None = None  # files of the newest load, and its seconds

    @property
    def step_s(self) -> float | None:
        """A step that only decodes; None as long as there was none."""
        return median(took_s for _, took_s in self._steps) if self._steps else None

    @property
    def knows_tokens(self) -> bool:
        return bool(self._token_s)

    def stepped(self, took_s: float, rows: int) -> None:
        """A step did nothing but decode so many rows."""
        self._steps.append((rows, took_s))

    def rows_within(self, seconds: float) -> int:
        """How many rows a step surely decodes in so many seconds; 0 if that is not known. More rows take more time, and
        each of them no more than each of fewer.
        """
        rows = [_within(seconds, took_s / rows) if took_s <= seconds else 0 for rows, took_s in self._steps]
        return median_low(rows) if rows else 0

    def learn(self, position: int | None, size: int, took_s: float, *, is_shared: bool = False) -> None:
        """So many tokens of a prompt were computed, from `position` on; or so many files became KV. `is_shared`: in a
        pass with other cells.
        """
        if position is None:
            self._load = size, took_s
        else:
            cells = self._token_s.setdefault((is_shared, position.bit_length()), deque(maxlen=_CELLS))
            cells.append(took_s / size)

    def tokens_within(self, seconds: float, position: int, *, is_shared: bool = False) -> int | None:
        """How many tokens from `position` on are computed in so many seconds; None if that is not known."""
        each_s = self._each_s(position, is_shared=is_shared)
        return None if each_s is None else _within(seconds, each_s)

    def seconds_of(self, tokens: int, position: int) -> float:
        """How long so many tokens from `position` on take in a shared pass; 0 if that is not known."""
        return tokens * (self._each_s(position, is_shared=True) or 0.0)

    def files_within(self, seconds: float) -> int | None:
        """How many files become KV in so many seconds; None if that is not known. One more than the last time if that
        took less, and twice as many if it took less than half: on a GPU most of a load's time is the same for one file
        as for ten.
        """
        if self._load is None:
            return None
        files, took_s = self._load
        if took_s >= seconds:
            return _within(seconds, took_s / files)
        return 2 * files if 2 * took_s < seconds else files + 1

    def _each_s(self, position: int, *, is_shared: bool) -> float | None:
        if not self._token_s:
            return None
        depth = position.bit_length()
        nearest = min(self._token_s, key=lambda known: (known[0] != is_shared, abs(known[1] - depth)))
        return median_low(self._token_s[nearest])


def _within(seconds: float, each_s: float) -> int:
    return int(min(max(0.0, seconds) / max(each_s, 1e-9), math.ldexp(1, 30)))
