"""Arithmetic on measured numbers: medians, percentiles, spreads, rates, gaps, and whether a target is met."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Target:
    """A measured number and its target: at least that, or with `is_most` at most that. None, nothing found, misses."""

    what: str
    found: float | None
    limit: float
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.found is not None and (self.found <= self.limit if self.is_most else self.found >= self.limit)

    def row(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "found": None if self.found is None else rounded(self.found),
            "wanted": f"{'<=' if self.is_most else '>='} {rounded(self.limit)}",
            "is_met": self.is_met,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeats of one measurement. `spread` is (largest − smallest) / median, or 0 if the median is 0."""

    median: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        """Raises ValueError for no repeats."""
        if not values:
            raise ValueError("repeats: expected at least one")
        middle = statistics.median(values)
        return cls(middle, (max(values) - min(values)) / middle if middle else 0.0)

    def named(self, name: str) -> dict[str, float]:
        return {name: self.median, f"{name}_spread": self.spread}


def median(values: Iterable[float]) -> float | None:
    """None of none."""
    found = list(values)
    return statistics.median(found) if found else None


def medians(rows: Iterable[Mapping[str, float]], *with_spread: str) -> dict[str, float]:
    """By name, of one or more repeats that have the same names; a spread behind each of these names."""
    repeats, found = list(rows), dict[str, float]()
    for name in repeats[0]:
        summary = Summary.of([row[name] for row in repeats])
        found |= summary.named(name) if name in with_spread else {name: summary.median}
    return found


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds, as `work` measures them itself or around it."""
    began = clock()
    measured = work()
    return measured if isinstance(measured, float) else clock() - began


def median_time(
    work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter, warm_ups: int = 1
) -> float:
    """Seconds of `work`, after rounds that warm up."""
    return statistics.median([timed(work, clock) for _ in range(warm_ups + repeats)][warm_ups:])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed (nearest rank). Raises ValueError for none."""
    if not values:
        raise ValueError("values: expected at least one")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score). (0, 1) where nothing was tried."""
    if not trials:
        return 0.0, 1.0
    share, spread = successes / trials, _Z95**2 / trials
    middle = (share + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    # At both ends the bound is the end itself; rounding must not leave it out.
    return 0.0 if not successes else middle - half, 1.0 if successes == trials else middle + half


def rounded(value: float) -> float:
    """Four significant digits: more would suggest a precision that does not exist."""
    return float(f"{value:.4g}")


def rounded_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a case as JSON, with rounded numbers and unchanged counts."""
    return {key: rounded(value) if isinstance(value, float) else value for key, value in row.items()}


def rate_of_all(rows: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all rows decode, by the times of their tokens. Raises ValueError if they never do."""
    began = max(times[0] for times in rows)
    ended = min(times[-1] for times in rows)
    if ended <= began:
        raise ValueError("the rows did not decode together: more tokens are needed")
    return sum(began < time <= ended for times in rows for time in times) / (ended - began)


def gaps(times: Sequence[float], start: float, stop: float) -> list[float]:
    """Seconds between consecutive times, of those pairs that touch [start, stop]."""
    return [later - earlier for earlier, later in pairwise(times) if later >= start and earlier <= stop]
