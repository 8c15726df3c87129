"""Arithmetic of an open-loop load: when turns arrive, which of them count, and percentiles of what they saw. Pure.

Turns arrive when they are due, whether or not earlier ones have ended, and times count from then: a slow engine cannot
slow its own measurement down. The steady state is between the ramp's end and the last arrival; what comes later is the
tail, in which the load already falls.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from kvasir_bench.arithmetic import percentile


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came of a turn at one moment: tokens, or the number of all of them."""

    tokens: int = 0
    total_tokens: int | None = None


class TurnFailed(Exception):
    """A turn that the server refused or did not end. Its text is what failures are counted by."""


@dataclass(slots=True)
class LoadTurn:
    """One turn, all times in seconds from the start of the run."""

    due_s: float
    deltas: list[tuple[float, int]] = field(default_factory=list)  # when tokens arrived, and how many
    total_tokens: int | None = None  # as the server says at the end, where deltas may hold several tokens
    ended_s: float | None = None
    failure: str = ""  # the reason; empty unless it failed

    def add(self, arrived: Arrived, now_s: float) -> None:
        if arrived.tokens:
            self.deltas.append((now_s, arrived.tokens))
        if arrived.total_tokens is not None:
            self.total_tokens = arrived.total_tokens

    def tokens_in(self, window: "Window") -> float:
        """Tokens that arrived in the window. Where a total is known, each delta has its share of it."""
        counted = sum(count for _, count in self.deltas)
        found = sum(count for at, count in self.deltas if at in window)
        return found if self.total_tokens is None else self.total_tokens * found / max(1, counted)

    @property
    def first_token_s(self) -> float | None:
        """From its due time; None without a token."""
        return self.deltas[0][0] - self.due_s if self.deltas else None

    @property
    def gaps(self) -> Iterator[tuple[float, float]]:
        """When each gap between two deltas ended, and how long it was."""
        for (earlier, _), (later, _) in pairwise(self.deltas):
            yield later, later - earlier


@dataclass(frozen=True, slots=True)
class Window:
    """The steady state: from the ramp's end until the last arrival."""

    start_s: float
    stop_s: float

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.stop_s

    @property
    def length_s(self) -> float:
        return self.stop_s - self.start_s


def arrivals(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Poisson arrivals within [0, `seconds`): independent gaps with a mean of 1 / `rate_per_s`."""
    random = Random(seed)  # noqa: S311 - a load that can be repeated
    times: list[float] = []
    time_s = random.expovariate(rate_per_s)
    while time_s < seconds:
        times.append(time_s)
        time_s += random.expovariate(rate_per_s)
    return times


def distribution(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, mean, p50, p95, p99 and the largest; None where there are no values."""
    if not values:
        return {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None, "largest": None}
    ranks = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    return {"count": len(values), "mean": sum(values) / len(values), **ranks, "largest": max(values)}


def in_flight(turns: Sequence[LoadTurn], time_s: float) -> int:
    """Turns that have arrived and not ended."""
    return sum(turn.due_s <= time_s and (turn.ended_s is None or turn.ended_s > time_s) for turn in turns)


def findings(turns: Sequence[LoadTurn], window: Window) -> dict[str, Any]:
    """What the turns saw. Times to the first token and to the end are those of turns that arrived in the steady state;
    gaps and tokens are those that came in it, whoever's they are.
    """
    steady = [turn for turn in turns if turn.due_s in window]
    firsts = [turn.first_token_s for turn in steady if turn.first_token_s is not None]
    ends = [turn.ended_s - turn.due_s for turn in steady if turn.ended_s is not None and not turn.failure]
    gaps = [gap for turn in turns for at, gap in turn.gaps if at in window]
    tokens = sum(turn.tokens_in(window) for turn in turns)
    return {
        "phases": {
            "ramp": sum(turn.due_s < window.start_s for turn in turns),
            "steady": len(steady),
            "tail_s": max((turn.ended_s or 0.0 for turn in turns), default=window.stop_s) - window.stop_s,
        },
        "first_token_s": distribution(firsts),
        "gap_s": distribution(gaps),
        "end_to_end_s": distribution(ends),
        "tokens_per_s": tokens / window.length_s,
        "in_flight_at_start": in_flight(turns, window.start_s),
        "in_flight_at_end": in_flight(turns, window.stop_s),
        "failures": dict(sorted(Counter(turn.failure for turn in turns if turn.failure).items())),
    }
