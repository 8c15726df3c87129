"""A day of agents that sleep when nobody uses them: how many of their wakes an engine hides by waking them ahead.

The days before teach the engine's own policy, and the last one counts. The kinds of agents have the shares of triggers
that were published of functions in a cloud (Shahrad et al., "Serverless in the Wild", 2020); their rhythms are assumed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from inference_svc.engine.api import AgentKey
from inference_svc.turns.asleep.allowance import Allowance
from inference_svc.turns.asleep.returns import SECONDS_OF_DAY, Returns
from kvasir_bench.fleet.simulation import kv_bytes_of_token

_HOUR, _LOOK = 3600.0, 120.0  # seconds
_GIB = 1 << 30
_WORKDAYS = 5


@dataclass(frozen=True, slots=True)
class _Agent:
    key: AgentKey
    kind: str
    turns: Any  # their times, ascending
    memory_bytes: int
    wake_s: float


@dataclass(slots=True)
class _Found:
    """Wakes of the last day, by how they ended and by kind; and the cost of waking ahead."""

    wakes: Counter[tuple[str, str]] = field(default_factory=Counter)
    woken: int = 0
    unused: int = 0
    spent_s: float = 0.0
    held_byte_s: float = 0.0

    def came(self, kind: str) -> int:
        return self.wakes["hidden", kind] + self.wakes["waited", kind]


def simulate(given: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """The results by name: `day`, `kinds`, `assumptions`. Raises LookupError, TypeError or ValueError."""
    dice, days = np.random.default_rng(seed), int(given["days_of_learning"]) + 1
    agents = [_agent(given, dice, number, days) for number in range(int(given["agents"]))]
    found = _Engine(given, agents, days).lived()
    kinds = [{"kind": kind, "wakes": found.came(kind), "hidden": found.wakes["hidden", kind]} for kind in _RHYTHMS]
    wakes, hidden = sum(found.came(kind) for kind in _RHYTHMS), sum(found.wakes["hidden", kind] for kind in _RHYTHMS)
    day = {
        "agents": len(agents),
        "wakes": wakes,
        "hidden": hidden,
        "hidden_share": hidden / max(1, wakes),
        "woken_ahead": found.woken,
        "unused": found.unused,
        "share_of_time": found.spent_s / SECONDS_OF_DAY,
        "mean_held_bytes": found.held_byte_s / SECONDS_OF_DAY,
        "bytes_of_all": sum(agent.memory_bytes for agent in agents),
    }
    return {"assumptions": dict(given), "day": day, "kinds": kinds}


class _Engine:
    """One engine that serves the agents' turns, and wakes agents while none runs."""

    def __init__(self, given: Mapping[str, Any], agents: list[_Agent], days: int) -> None:
        self._agents = {agent.key: agent for agent in agents}
        self._after_s = given["asleep_after_hours"]["value"] * _HOUR
        self._turn_s = given["seconds_of_turn"]["value"]
        self._counts_from_s, self._end_s = (days - 1) * SECONDS_OF_DAY, days * SECONDS_OF_DAY
        self._returns = Returns(min(self._after_s, 6 * _HOUR))
        self._allowance = Allowance(given["share_of_time"]["value"], int(given["hot_gib"]["value"] * _GIB), 0.0)
        self._woken: dict[AgentKey, float] = {}
        self._found = _Found()
        self._turns = sorted(((float(at), agent.key) for agent in agents for at in agent.turns), key=itemgetter(0))

    def lived(self) -> _Found:
        turns, place, free_s = self._turns, 0, 0.0
        for now_s in map(float, np.arange(0.0, self._end_s, _LOOK)):
            while place < len(turns) and turns[place][0] < now_s:
                at_s, key = turns[place]
                self._serve(at_s, self._agents[key])
                free_s = max(free_s, at_s) + self._turn_s
                place += 1
            if now_s < self._counts_from_s - SECONDS_OF_DAY:
                continue  # days that only teach
            expected = self._returns.expected(now_s)
            self._let_go(now_s, set(expected))
            if free_s <= now_s:
                free_s = self._wake(now_s, expected, turns[place][0] if place < len(turns) else self._end_s)
            if now_s >= self._counts_from_s:
                held = sum(self._agents[key].memory_bytes for key in self._woken)
                self._found.held_byte_s += _LOOK * held
        return self._found

    def _is_asleep(self, key: AgentKey, now_s: float) -> bool:
        last_s = self._returns.last_s(key)
        return last_s is not None and now_s - last_s >= self._after_s

    def _serve(self, at_s: float, agent: _Agent) -> None:
        ready_s = self._woken.pop(agent.key, None)
        if self._is_asleep(agent.key, at_s) and at_s >= self._counts_from_s:
            how = "waited" if ready_s is None or ready_s > at_s else "hidden"
            self._found.wakes[how, agent.kind] += 1
        self._returns.came(agent.key, at_s)

    def _let_go(self, now_s: float, expected: set[AgentKey]) -> None:
        for key in [key for key in self._woken if key not in expected]:
            del self._woken[key]
            self._found.unused += now_s >= self._counts_from_s

    def _wake(self, now_s: float, expected: list[AgentKey], next_turn_s: float) -> float:
        """Wake agents until a turn comes, which ends the wake that is under way. When the engine is free again."""
        free_s = now_s
        for key in expected:
            agent, held = self._agents[key], sum(self._agents[key].memory_bytes for key in self._woken)
            if key in self._woken or not self._is_asleep(key, now_s):
                continue
            if free_s >= min(next_turn_s, now_s + _LOOK):
                break
            if not (self._allowance.has_time(now_s) and self._allowance.has_room(held, agent.memory_bytes)):
                continue
            end_s = min(free_s + agent.wake_s, next_turn_s)
            self._allowance.spend(end_s - free_s)
            self._found.spent_s += (end_s - free_s) * (now_s >= self._counts_from_s)
            free_s += agent.wake_s
            if free_s <= next_turn_s:
                self._woken[key] = free_s
                self._found.woken += now_s >= self._counts_from_s
        return min(free_s, next_turn_s)


def _agent(given: Mapping[str, Any], dice: Any, number: int, days: int) -> _Agent:
    kinds, tokens = given["kinds"]["shares"], given["tokens_of_memory"]
    kind = str(dice.choice(list(kinds), p=[share / sum(kinds.values()) for share in kinds.values()]))
    spread = tokens["spread"]
    count = float(dice.lognormal(np.log(tokens["value"]) - spread * spread / 2, spread))
    decoded = count * given["generated_share"]["value"]
    wake_s = decoded / given["decoded_per_s"]["value"] + (count - decoded) / given["prefilled_per_s"]["value"]
    turns = np.sort(np.concatenate([*_RHYTHMS[kind](given, dice, days), np.zeros(0)]))
    memory_bytes = int(count * kv_bytes_of_token(given["kv"]))
    return _Agent(AgentKey("default", f"{kind}-{number}"), kind, turns, memory_bytes, wake_s)


def _people(given: Mapping[str, Any], dice: Any, days: int) -> Iterator[Any]:
    """On most workdays: a first session in the morning, and others in the hours after it."""
    people = given["people"]
    usual_s = dice.normal(people["first_hour"], people["first_hour_spread"]) * _HOUR
    for day in range(days):
        if day % 7 < _WORKDAYS and dice.random() < people["comes_on_workday"]:
            first_s = day * SECONDS_OF_DAY + dice.normal(usual_s, people["day_spread_hours"] * _HOUR)
            others = dice.uniform(0, people["hours"] * _HOUR, dice.poisson(people["more_sessions"]))
            yield first_s + np.concatenate([[0.0], others])


def _timers(given: Mapping[str, Any], dice: Any, days: int) -> Iterator[Any]:
    periods = given["timers"]["period_hours"]
    period_s = float(dice.choice([float(hours) for hours in periods], p=list(periods.values()))) * _HOUR
    begin_s = dice.uniform(0, period_s)
    times = np.arange(begin_s, days * SECONDS_OF_DAY, period_s)
    yield times + dice.normal(0, given["timers"]["jitter_s"], len(times))


def _chance(given: Mapping[str, Any], dice: Any, days: int) -> Iterator[Any]:
    """Events and queues: at any time, each agent at its own rate."""
    mean_s = float(dice.lognormal(np.log(given["chance"]["mean_gap_hours"]), given["chance"]["spread"])) * _HOUR
    yield np.cumsum(dice.exponential(mean_s, int(3 * days * SECONDS_OF_DAY / mean_s) + 10))


_RHYTHMS: dict[str, Callable[[Mapping[str, Any], Any, int], Iterator[Any]]] = {
    "people": _people,
    "timers": _timers,
    "chance": _chance,
}
