"""What the parts of a step cost, learned from steps that were made: it says how much fits into a gap of streams.

Pure: callers pass in the time. A token of a prompt costs more the deeper it lies, because it attends to more; so passes
are remembered by how often their position doubles. A pass costs something whatever its tokens are: on a GPU 128 of them
take half as long as 1,024. If tokens alone counted, a few short passes would make the next ones short for ever. So they
would if a depth knew short ones alone: lengths that it has not seen are taken from the nearest depth that has, with
so many seconds more for each token, or of a greater depth less, as those of its own passes show.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median, median_low

_PLAIN_STEPS = 9  # that are remembered: a few slow ones among them change nothing
_PASSES = 7  # of a depth that are remembered: two for which kernels were compiled change nothing
_APART = 128  # tokens, at least, between two passes whose difference gives the seconds of a token


@dataclass(frozen=True, slots=True)
class _PassLine:
    """Seconds of passes besides their tokens, and of each token."""

    fixed_s: float
    each_s: float
    longest: int  # tokens of the longest pass that is remembered
    is_guess: bool = False  # all passes are of one length, of which nothing shows what is fixed

    @classmethod
    def through(cls, passes: Collection[tuple[int, float]]) -> "_PassLine":
        """By medians over all pairs (Theil and Sen). From passes of one length nothing is fixed."""
        average_s, longest = _each_s(passes, 0.0), max(passes)[0]
        slopes = [
            (many_s - few_s) / (many - few) for few, few_s in passes for many, many_s in passes if many - few >= _APART
        ]
        each_s = median(slopes) if slopes else 0.0
        fixed_s = median_low(took_s - each_s * tokens for tokens, took_s in passes)
        has_told = each_s > 0 and fixed_s > 0
        return cls(fixed_s, each_s, longest) if has_told else cls(0.0, average_s, longest, not slopes)

    def tokens_within(self, seconds: float) -> int:
        """Beyond the longest pass a token costs the mean of the line's seconds and of those of that pass's tokens, the
        fixed ones included: passes of nearly one length make a line too flat as often as too steep.
        """
        longest_s = self.fixed_s + self.each_s * self.longest
        if seconds > longest_s:
            return self.longest + _within(seconds - longest_s, (self.each_s + longest_s / self.longest) / 2)
        return _within(seconds - self.fixed_s, self.each_s)


class BesideCosts:
    """Seconds of a step that only decodes people's rows, and of background rows beside these."""

    def __init__(self) -> None:
        self._own: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._each: deque[float] = deque(maxlen=_PLAIN_STEPS)  # of a token behind a background row

    @property
    def own_s(self) -> float | None:
        """Of people's rows; None as long as there was no such step."""
        return median(self._own) if self._own else None

    def stepped(self, took_s: float, tokens: int) -> None:
        """A step had background rows of so many tokens, as the step before it; 0: none."""
        if not tokens:
            self._own.append(took_s)
        elif self._own:
            self._each.append(max(0.0, took_s - median(self._own)) / tokens)

    def row_s(self, tokens: int) -> float | None:
        """How much longer a step takes with a background row of so many tokens; None if that is not known."""
        return tokens * median(self._each) if self._each else None


class StepCosts:
    """Seconds of a step that only decodes, of a prompt's token, and of files that become KV."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Kernels were compiled and graphs made in the passes so far: later ones cost less."""
        self.beside = BesideCosts()
        self._steps: deque[tuple[int, float]] = deque(maxlen=_PLAIN_STEPS)  # rows and seconds
        self._passes: dict[int, deque[tuple[int, float]]] = {}  # tokens and seconds, by the bits of their position
        self._lines: dict[int, _PassLine] = {}  # by the bits of a position; those that know the newest pass
        self._longest = 0  # tokens of the longest pass that ever was
        self._load: tuple[int, float] | None = None  # files of the newest load, and its seconds

    @property
    def step_s(self) -> float | None:
        """A step that only decodes; None as long as there was none."""
        return median(took_s for _, took_s in self._steps) if self._steps else None

    @property
    def knows_tokens(self) -> bool:
        return bool(self._passes)

    def stepped(self, took_s: float, rows: int) -> None:
        """A step did nothing but decode so many rows."""
        self._steps.append((rows, took_s))

    def rows_within(self, seconds: float) -> int:
        """How many rows a step surely decodes in so many seconds; 0 if that is not known. More rows take more time, and
        each of them no more than each of fewer.
        """
        rows = [_within(seconds, took_s / rows) if took_s <= seconds else 0 for rows, took_s in self._steps]
        return median_low(rows) if rows else 0

    def learn(self, position: int | None, size: int, took_s: float) -> None:
        """A pass over so many tokens was computed, from `position` of a prompt on; or so many files became KV."""
        if position is None:
            self._load = size, took_s
        else:
            depth, self._longest = position.bit_length(), max(self._longest, size)
            self._passes.setdefault(depth, deque(maxlen=_PASSES)).append((size, took_s))
            self._lines.clear()

    def tokens_within(self, seconds: float, position: int) -> int | None:
        """How many tokens a pass computes in so many seconds, the deepest from `position` on; None if that is not
        known. Where all passes ever had one length, and it fits, twice as many are tried, once: else short ones, most
        of which is fixed, would stay short.
        """
        if not self._passes:
            return None
        line = self._line(position.bit_length())
        fits = line.tokens_within(seconds)
        is_tried = not line.is_guess or line.longest < self._longest
        return fits if is_tried or fits < line.longest else max(fits, 2 * line.longest)

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

    def _line(self, depth: int) -> _PassLine:
        if depth not in self._lines:
            nearest, *_ = depths = sorted(self._passes, key=lambda known: abs(known - depth))
            passes, lengths = list[tuple[int, float]](), set[int]()  # the bits of their tokens
            for known in depths:
                new = [each for each in self._passes[known] if each[0].bit_length() not in lengths]
                if new:
                    more_s = _more_s(self._passes[nearest], self._passes[known])
                    more_s = max(0.0, more_s) if known < nearest else min(0.0, more_s)  # deeper tokens cost no less
                    passes += [(tokens, took_s + more_s * tokens) for tokens, took_s in new]
                lengths |= {tokens.bit_length() for tokens, _ in new}
            self._lines[depth] = _PassLine.through(passes)
        return self._lines[depth]


def _more_s(passes: Collection[tuple[int, float]], others: Collection[tuple[int, float]]) -> float:
    """Seconds that a token of these passes takes more than one of another depth's. The fixed seconds are alike: the
    others' where they are known, else a quarter of the shortest pass, or a few short ones would seem to have dear
    tokens. Where a token takes less, a tenth of the cheapest is left: no pass costs nothing.
    """
    least_s = min(took_s for _, took_s in passes)
    fixed_s = min(_PassLine.through(others).fixed_s or least_s / 4, 0.9 * least_s)
    more_s = _each_s(passes, fixed_s) - _each_s(others, fixed_s)
    return max(more_s, -0.9 * min(took_s / tokens for tokens, took_s in others))


def _each_s(passes: Collection[tuple[int, float]], fixed_s: float) -> float:
    return median_low((took_s - fixed_s) / tokens for tokens, took_s in passes)


def _within(seconds: float, each_s: float) -> int:
    return int(min(max(0.0, seconds) / max(each_s, 1e-9), math.ldexp(1, 30)))
