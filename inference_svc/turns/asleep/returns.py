"""When agents come back, learned from when they came: at which times of day, and how long after the last turn. Pure."""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

from inference_svc.engine.api import AgentKey

# Lengths of time are in seconds.
SECONDS_OF_DAY = 86_400.0
LEAD = 300.0  # before an agent may come
_KEPT, _POOLED = 32, 256  # returns of an agent, and of all agents of its namespace
_FEWEST = 3  # of an agent of whom fewer are known, its namespace's are taken
_MOST_AGENTS = 2048  # of a namespace
_APART = 3 * 3600.0  # between two spans; returns that are closer are of one
_PART_APART = 0.5  # of a gap: two days and three are one group, a day and three are two
_MARGIN = 7200.0  # around a single return; around n of them an nth of it, and a quarter of their span
_MOST_WEIGHED = 30 * SECONDS_OF_DAY  # of a gap, when the two ways to expect an agent are compared
_LONGEST = 3 * SECONDS_OF_DAY  # twice as long as an agent ever was away, and so long: it is not expected any more

Span = tuple[float, float]


def spans_around(values: Iterable[float], part: float = 0.0) -> tuple[Span, ...]:
    """Where the next value may lie: around groups of the known ones, ascending and apart, also by a part of a value."""
    ordered = sorted(values)
    apart = [at for at, (one, other) in enumerate(pairwise(ordered), 1) if other - one > max(_APART, other * part)]
    edges = [0, *apart, len(ordered)]
    groups = [ordered[first:end] for first, end in pairwise(edges) if end > first]
    wide = [(group[0], group[-1], (group[-1] - group[0]) / 4 + _MARGIN / len(group)) for group in groups]
    return tuple(_joined((first - margin, last + margin) for first, last, margin in wide))


def spans_of_day(times: Sequence[float]) -> tuple[Span, ...]:
    """The same of times of day, in seconds. A span may begin before midnight, or end after the next."""
    ordered = sorted(time % SECONDS_OF_DAY for time in times)
    if not ordered:
        return ()
    gaps = [after - before for before, after in pairwise([*ordered, ordered[0] + SECONDS_OF_DAY])]
    cut = gaps.index(max(gaps)) + 1  # the day begins behind the longest gap, so that no group lies on its border
    spans = spans_around([*ordered[cut:], *(time + SECONDS_OF_DAY for time in ordered[:cut])])
    if spans[-1][1] - spans[0][0] > SECONDS_OF_DAY:
        return ((0.0, SECONDS_OF_DAY),)
    return spans


@dataclass(slots=True)
class Rhythm:
    """When an agent came back, and how long it had been away each time."""

    last_s: float
    request_id: str = ""  # of the last turn that left a memory
    # When, and after how many seconds: the newest last.
    returns: list[tuple[float, float]] = field(default_factory=list)
    _by_day: tuple[Span, ...] = ()
    _by_gap: tuple[Span, ...] = ()
    share: float = 1.0  # of the time that the agent is expected without coming: the less, the better it is known
    _is_by_day: bool = False
    _longest_s: float = 0.0

    def came(self, now_s: float, least_gap_s: float) -> bool:
        """Note a turn. Returns whether the agent was away before it."""
        gap_s, self.last_s = now_s - self.last_s, now_s
        if gap_s < least_gap_s:
            return False
        self.returns = [*self.returns, (now_s, gap_s)][-_KEPT:]
        self.learn()
        return True

    def learn(self) -> None:
        """Choose to expect the agent by the clock or by its time away, as it would have cost less of the past."""
        self._by_day = spans_of_day([at for at, _ in self.returns])
        self._by_gap = spans_around([gap for _, gap in self.returns], _PART_APART)
        self._longest_s = max((gap for _, gap in self.returns), default=0.0)
        recent = [(at, min(gap, _MOST_WEIGHED)) for at, gap in self.returns]
        by_day = sum(_held_of_days(self._by_day, at - gap, at) for at, gap in recent)
        by_gap = sum(_overlap(self._by_gap, 0.0, gap) for _, gap in recent)
        away_s = sum(gap for _, gap in recent)
        # A day that the agent left out changes its next gap, and not its hours.
        self._is_by_day = by_day < min(2 * by_gap, away_s / 2)
        self.share = (by_day if self._is_by_day else by_gap) / away_s if away_s else 1.0

    @property
    def is_known(self) -> bool:
        return len(self.returns) >= _FEWEST

    def is_gone(self, now_s: float) -> bool:
        return now_s - self.last_s > max(2 * self._longest_s, _LONGEST)

    def may_come(self, now_s: float) -> bool:
        """Whether the agent may come within the lead."""
        if self._is_by_day:
            return _is_in_day(self._by_day, now_s)
        return _is_in(self._by_gap, now_s - self.last_s)


@dataclass(slots=True)
class _Namespace:
    agents: dict[str, Rhythm] = field(default_factory=dict)  # the last turn first to go
    pooled: list[float] = field(default_factory=list)  # when any of them came back, the newest last
    spans: tuple[Span, ...] = ()

    def learn(self) -> None:
        self.spans = spans_of_day(self.pooled)

    @property
    def share(self) -> float:
        return min(1.0, sum(end - first for first, end in self.spans) / SECONDS_OF_DAY)


class Returns:
    """The returns of all agents. Times are seconds of Unix time."""

    def __init__(self, least_gap_s: float = 3600.0) -> None:
        """`least_gap_s`: a turn that comes after less is no return."""
        self._least_gap_s = least_gap_s
        self._namespaces: dict[str, _Namespace] = {}

    def came(self, key: AgentKey, now_s: float) -> None:
        """Note a turn of the agent."""
        known = self._namespaces.setdefault(key.namespace, _Namespace())
        rhythm = known.agents.pop(key.agent_id, None)
        if rhythm is None:
            rhythm = Rhythm(now_s)
        elif rhythm.came(now_s, self._least_gap_s):
            known.pooled = [*known.pooled, now_s][-_POOLED:]
            known.learn()
        known.agents[key.agent_id] = rhythm
        if len(known.agents) > _MOST_AGENTS:
            del known.agents[next(iter(known.agents))]

    def served(self, key: AgentKey, request_id: str) -> None:
        """Note which turn of the agent left a memory here."""
        if (rhythm := self._rhythm(key)) is not None:
            rhythm.request_id = request_id

    def forget(self, key: AgentKey) -> None:
        if (known := self._namespaces.get(key.namespace)) is not None:
            known.agents.pop(key.agent_id, None)

    def last_s(self, key: AgentKey) -> float | None:
        rhythm = self._rhythm(key)
        return None if rhythm is None else rhythm.last_s

    def is_last(self, key: AgentKey, request_id: str) -> bool:
        """Whether the agent's turn of this request was served here, and is the last one that was."""
        rhythm = self._rhythm(key)
        return rhythm is not None and rhythm.request_id == request_id != ""

    def _rhythm(self, key: AgentKey) -> Rhythm | None:
        known = self._namespaces.get(key.namespace)
        return known.agents.get(key.agent_id) if known is not None else None

    def expected(self, now_s: float) -> list[AgentKey]:
        """Agents that are away and may come within the lead: namespaces in turn, of each the best known first."""
        ranked = [each for name, known in self._namespaces.items() for each in self._of(name, known, now_s)]
        return [key for _, _, key in sorted(ranked, key=lambda each: each[:2])]

    def _of(self, name: str, known: _Namespace, now_s: float) -> Iterator[tuple[int, float, AgentKey]]:
        pooled = known.share if _is_in_day(known.spans, now_s) else None
        found = list[tuple[float, str]]()
        for agent_id, rhythm in known.agents.items():
            if now_s - rhythm.last_s < self._least_gap_s - LEAD or rhythm.is_gone(now_s):
                continue
            if rhythm.is_known and rhythm.may_come(now_s):
                found.append((rhythm.share, agent_id))
            elif not rhythm.is_known and pooled is not None:
                found.append((1.0 + pooled, agent_id))
        for place, (share, agent_id) in enumerate(sorted(found)):
            yield place, share, AgentKey(name, agent_id)

    def to_json(self, now_s: float, names: Iterable[str]) -> str:
        """The returns of these namespaces' agents, but for those that are not expected any more."""
        kept = {name: known.agents.items() for name in names if (known := self._namespaces.get(name)) is not None}
        return json.dumps(
            {
                name: {
                    agent: [each.last_s, each.request_id, *each.returns]
                    for agent, each in agents
                    if not each.is_gone(now_s)
                }
                for name, agents in kept.items()
            }
        )

    def read_json(self, text: str) -> None:
        """Take a text of `to_json`. Raises ValueError for any other, and changes nothing then."""
        try:
            read = {name: _namespace_of(agents) for name, agents in json.loads(text).items()}
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"returns of agents: {type(error).__name__}") from error
        self._namespaces = read


def _namespace_of(agents: dict[str, list[Any]]) -> _Namespace:
    known = _Namespace()
    for agent_id, (last_s, request_id, *returns) in [*agents.items()][-_MOST_AGENTS:]:
        pairs = [[_number(value) for value in each] for each in returns[-_KEPT:]]
        rhythm = Rhythm(_number(last_s), _text(request_id), [(at, gap) for at, gap in pairs])
        rhythm.learn()
        known.agents[agent_id] = rhythm
    known.pooled = sorted(at for rhythm in known.agents.values() for at, _ in rhythm.returns)[-_POOLED:]
    known.learn()
    return known


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError("expected seconds")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a request's id")
    return value


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans that touch become one."""
    open_: Span | None = None
    for first, end in spans:
        if open_ is not None and first <= open_[1]:
            open_ = (open_[0], max(open_[1], end))
        else:
            if open_ is not None:
                yield open_
            open_ = (first, end)
    if open_ is not None:
        yield open_


def _is_in(spans: Sequence[Span], at: float) -> bool:
    place = bisect_right(spans, at + LEAD, key=itemgetter(0))
    return place > 0 and at <= spans[place - 1][1]


def _is_in_day(spans: Sequence[Span], at_s: float) -> bool:
    time = at_s % SECONDS_OF_DAY
    return any(_is_in(spans, time + shift) for shift in (-SECONDS_OF_DAY, 0.0, SECONDS_OF_DAY))


def _overlap(spans: Sequence[Span], begin: float, end: float) -> float:
    return sum(max(0.0, min(end, last) - max(begin, first - LEAD)) for first, last in spans)


def _held_of_days(spans: Sequence[Span], begin_s: float, end_s: float) -> float:
    """Seconds between two times that lie in the spans of their days."""
    days = range(int(begin_s // SECONDS_OF_DAY) - 1, int(end_s // SECONDS_OF_DAY) + 2)
    return sum(_overlap(spans, begin_s - day * SECONDS_OF_DAY, end_s - day * SECONDS_OF_DAY) for day in days)
