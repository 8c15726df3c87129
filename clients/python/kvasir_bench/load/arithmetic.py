"""Arithmetic of a load, whose times count from when a turn is due: a slow engine cannot slow its measurement."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from kvasir.errors import InvalidArgument

from kvasir_bench.arithmetic import percentile

_LENGTHS = re.compile(r"([0-9]{1,9})(?:([-~])([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens: one, or LOW-HIGH (each equally likely), or LOW~HIGH (many short, few long)."""

    low: int
    high: int
    is_skewed: bool = False

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """Raises InvalidArgument."""
        found = _LENGTHS.fullmatch(text.strip())
        low, kind, high = found.groups() if found else ("0", None, None)
        lengths = cls(int(low), int(high or low), kind == "~")
        if not 0 < lengths.low <= lengths.high:
            wanted = "tokens as 512, as 200-4000 (each length equally likely), or as 200~4000 (many short, few long)"
            raise InvalidArgument.of(option, f"expected {wanted}, got {text!r}")
        return lengths

    def draw(self, random: Random) -> int:
        """Of LOW~HIGH each doubling is equally likely."""
        if self.is_skewed:
            return round(self.low * math.pow(self.high / self.low, random.random()))
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}{'~' if self.is_skewed else '-'}{self.high}" if self.low < self.high else str(self.low)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of a turn: tokens and their text, or the number of all tokens."""

    tokens: int = 0
    total_tokens: int | None = None
    text: str = ""


class TurnFailed(Exception):
    """A turn that the server refused or did not end. Its text is what failures are counted by."""


@dataclass(slots=True)
class LoadTurn:
    """One turn, all times in seconds from the start of the run."""

    due_s: float
    deltas: list[tuple[float, int]] = field(default_factory=list)  # when tokens arrived, and how many
    total_tokens: int | None = None  # by the server's count at the end, where deltas may hold several tokens
    ended_s: float | None = None
    failure: str = ""  # the reason; empty unless it failed
    most_tokens: int = 0  # of the reply, as requested

    def add(self, arrived: Arrived, now_s: float) -> None:
        if arrived.tokens:
            self.deltas.append((now_s, arrived.tokens))
        if arrived.total_tokens is not None:
            self.total_tokens = arrived.total_tokens

    def tokens_in(self, window: "Window") -> float:
        """Tokens that arrived in the window. Where a total is known, each delta has its share of it."""
        counted = sum(count for _, count in self.deltas)
        return self.tokens * sum(count for at, count in self.deltas if at in window) / max(1, counted)

    @property
    def tokens(self) -> int:
        return self.total_tokens if self.total_tokens is not None else sum(count for _, count in self.deltas)

    @property
    def is_whole(self) -> bool:
        return self.ended_s is not None and not self.failure

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
class Limits:
    """How long a good turn's first token and each of its gaps take at most; None: as long as they like."""

    first_token_s: float | None = None
    gap_s: float | None = None

    def hold(self, turn: LoadTurn) -> bool:
        """Whether the turn ended well and within them. One without a token had no first one in time."""
        first, longest = turn.first_token_s, max((gap for _, gap in turn.gaps), default=0.0)
        is_prompt = self.first_token_s is None or (first is not None and first <= self.first_token_s)
        return turn.is_whole and is_prompt and (self.gap_s is None or longest <= self.gap_s)


@dataclass(frozen=True, slots=True)
class Window:
    """The steady state: from the ramp's end until the last arrival, or the last end."""

    start_s: float
    stop_s: float

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.stop_s

    @property
    def length_s(self) -> float:
        return self.stop_s - self.start_s


def arrivals(rate_per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """Poisson arrivals within [0, `seconds`): independent gaps with a mean of 1 / `rate_per_s`."""
    random = Random(seed)  # noqa: S311 - a load that can be repeated
    time_s = random.expovariate(rate_per_s)
    while time_s < seconds:
        yield time_s
        time_s += random.expovariate(rate_per_s)


def distribution(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, mean, p50, p95, p99 and the largest; None where there are no values."""
    if not values:
        return {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None, "largest": None}
    ranks = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    return {"count": len(values), "mean": sum(values) / len(values), **ranks, "largest": max(values)}


def in_flight(turns: Sequence[LoadTurn], time_s: float) -> int:
    return sum(turn.due_s <= time_s and (turn.ended_s is None or turn.ended_s > time_s) for turn in turns)


def findings(turns: Sequence[LoadTurn], window: Window, limits: Limits | None = None) -> dict[str, Any]:
    """Times are those of turns that arrived in the steady state; gaps, tokens and ends those that came in it."""
    steady = [turn for turn in turns if turn.due_s in window]
    firsts = [turn.first_token_s for turn in steady if turn.first_token_s is not None]
    ends = [turn.ended_s - turn.due_s for turn in steady if turn.ended_s is not None and turn.is_whole]
    gaps = [gap for turn in turns for at, gap in turn.gaps if at in window]
    ended = [turn for turn in turns if turn.ended_s is not None and turn.ended_s in window]
    wall_s = max((turn.ended_s or 0.0 for turn in turns), default=window.stop_s)
    good = None if limits is None else sum(map(limits.hold, ended))
    return {
        "phases": {
            "ramp": sum(turn.due_s < window.start_s for turn in turns),
            "steady": len(steady),
            "tail_s": wall_s - window.stop_s,
        },
        "first_token_s": distribution(firsts),
        "gap_s": distribution(gaps),
        "end_to_end_s": distribution(ends),
        "wall_s": wall_s,
        "requests_per_s": sum(turn.is_whole for turn in ended) / window.length_s,
        "good_requests_per_s": None if good is None else good / window.length_s,
        "good_share": None if good is None or not ended else good / len(ended),
        "tokens_per_s": sum(turn.tokens_in(window) for turn in turns) / window.length_s,
        "reply_tokens": sum(turn.tokens for turn in turns),
        "in_flight_at_start": in_flight(turns, window.start_s),
        "in_flight_at_end": in_flight(turns, window.stop_s),
        "failures": dict(sorted(Counter(turn.failure for turn in turns if turn.failure).items())),
    }
