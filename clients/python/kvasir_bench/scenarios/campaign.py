"""Plays variants of scenarios under each way to remember, in services of the campaign's own."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvasir.clients import AioInferenceClient
from kvasir.waits import PAUSE_S
from kvasir_orchestrator.engine_memory import EngineMemory
from kvasir_orchestrator.events import OutcomeChecked, TurnDone
from kvasir_orchestrator.memory import Answer, Memory, ReplyRequest
from kvasir_orchestrator.running import Retries, forget, run
from kvasir_orchestrator.scenario import Scenario

from kvasir_bench.scenarios.accounting import Batch, Checked, Playthrough, age_of, leaks
from kvasir_bench.scenarios.claims import DEPTHS, KILLED, KV, MOVED
from kvasir_bench.scenarios.gate import PhaseGate
from kvasir_bench.scenarios.retrieval import NoMemory

_PATIENCE = Retries(times=20, wait_s=0.1, longest_s=2.0)
_REMEMBERING = (KV, KILLED, MOVED)


@dataclass(frozen=True, slots=True)
class Places:
    """Two engines, each with a store of its own, that the campaign may do with as it likes."""

    here: str  # an engine's address
    there: str
    restart: Callable[[], None]  # kills the engine and the store here with -9, and starts both again


@dataclass
class _Home:
    memory: Memory
    agents: set[str] = field(default_factory=set)
    brought: dict[str, int] = field(default_factory=dict)  # versions of agents that moved and had no turn since


class _Gated:
    """A conversation's memory behind the barrier of its batch."""

    def __init__(self, home: _Home, gate: PhaseGate, number: int, phases: Mapping[str, int]) -> None:
        self._home, self._gate, self._number, self._phases = home, gate, number, phases

    async def ask(self, asked: ReplyRequest) -> AsyncGenerator[str | Answer, None]:
        async with self._gate.turn(self._number, self._phases[asked.turn.phase]):
            self._home.agents.add(asked.agent_id)
            version = self._home.brought.get(asked.agent_id, asked.version)
            async with aclosing(self._home.memory.ask(replace(asked, version=version))) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        self._home.brought.pop(asked.agent_id, None)
                    yield piece

    async def forget(self, agent_id: str, namespace: str) -> None:
        self._home.agents.discard(agent_id)
        await self._home.memory.forget(agent_id, namespace)


@dataclass(frozen=True, slots=True)
class PlayScope:
    scenarios: Sequence[str]
    ways: Sequence[str]
    variants: int
    together: int  # conversations beside each other
    kills_once: bool  # in the middle, and not before each phase
    time_limit_s: float | None = None  # begin no more variants after so long
    first: int = 1  # variant
    model: str = ""  # of both engines; empty: the shipped one
    warms_up: bool = False  # a short conversation first, which does not count: engines compile kernels in their first


async def measure(
    scope: PlayScope,
    places: Places,
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    keep: Callable[[Batch, Sequence[Playthrough]], None] = lambda *_: None,
) -> tuple[list[Playthrough], list[Batch]]:
    """Play all variants, or those of the first `together` and more until the time limit. Raises what breaks a turn."""
    played: list[Playthrough] = []
    took: list[Batch] = []
    began = clock()
    async with AioInferenceClient.connect(places.here) as here, AioInferenceClient.connect(places.there) as there:
        computes = f"{(await here.get_capabilities()).device}, {(await here.get_model()).compute_type}"
        if scope.warms_up:
            shortest = min(map(Scenario.shipped, scope.scenarios), key=lambda scenario: len(scenario.plan.turns))
            for engine in (here, there):
                say(f"warming up: {shortest.name}")
                await _Batch(KV, [shortest], engine, engine, places, scope).play(clock)
        end = scope.first + scope.variants
        for first in range(scope.first, end, scope.together):
            if played and scope.time_limit_s is not None and clock() - began >= scope.time_limit_s:
                break
            numbers = range(first, min(first + scope.together, end))
            for name in scope.scenarios:
                scenarios = [Scenario.shipped(name, number) for number in numbers]
                # Those without a memory first: they would find blocks of the same text that kv has left in the store.
                for way in sorted(scope.ways, key=lambda way: way in _REMEMBERING):
                    say(f"{name}, variants {numbers[0]} to {numbers[-1]}, to {end - 1} in all: {way}")
                    of_batch, batch = await _Batch(way, scenarios, here, there, places, scope).play(clock)
                    batch = replace(batch, engine=computes)
                    played += of_batch
                    took.append(batch)
                    keep(batch, of_batch)
    return played, took


class _Batch:
    """Some variants of a scenario under one way, beside each other."""

    def __init__(
        self,
        way: str,
        scenarios: Sequence[Scenario],
        here: AioInferenceClient,
        there: AioInferenceClient,
        places: Places,
        scope: PlayScope,
    ) -> None:
        self._way, self._scenarios, self._places = way, scenarios, places
        self._here, self._there, self._client = here, there, here
        memory = EngineMemory(here) if way in _REMEMBERING else NoMemory(here, DEPTHS.get(way))
        self._home = _Home(memory)
        count = len(scenarios[0].phases)
        stops = {KILLED: [count // 2] if scope.kills_once else range(1, count), MOVED: [count // 2]}.get(way, ())
        self._gate = PhaseGate(
            len(scenarios), stops, partial(asyncio.to_thread, places.restart) if way == KILLED else self._move
        )
        self._hot_bytes = 0

    async def play(self, clock: Callable[[], float]) -> tuple[list[Playthrough], Batch]:
        began = clock()
        async with self._sampling():
            played = await asyncio.gather(*(self._one(number) for number in range(len(self._scenarios))))
        wall_s = clock() - began
        usage = await self._client.get_usage()
        stored = usage.blob_bytes - usage.unreferenced_bytes
        for number, scenario in enumerate(self._scenarios):
            await forget(scenario, self._memory(number), "", permanent=True)
        name = self._scenarios[0].name
        return played, Batch(name, self._way, len(played), wall_s, self._hot_bytes, stored)

    def _memory(self, number: int) -> _Gated:
        phases = {name: place for place, name in enumerate(self._scenarios[number].phases)}
        return _Gated(self._home, self._gate, number, phases)

    async def _one(self, number: int) -> Playthrough:
        scenario = self._scenarios[number]
        played = Playthrough(scenario.name, scenario.variant, self._way)
        async with aclosing(run(scenario, self._memory(number), retries=_PATIENCE, parallel=100)) as events:
            async for event in events:
                if isinstance(event, TurnDone):
                    _count(played, event)
                elif isinstance(event, OutcomeChecked):
                    played.checked.append(Checked(age_of(scenario, event.outcome, event.turn), event.is_met))
        self._gate.end(number)
        played.leaks += leaks(scenario, {index: text for index, (text, _) in played.said.items()})
        return played

    async def _move(self) -> None:
        """Every agent of the batch as an archive to the other store; turns go to the engine there from now on."""
        for agent in sorted(self._home.agents):
            pieces = [piece async for piece in self._here.export_agent(agent)]
            snapshot = await self._there.import_agent(agent, pieces)
            self._home.brought[agent] = snapshot.version
            await self._here.delete_agent(agent)
        self._home.memory, self._client = EngineMemory(self._there), self._there

    @asynccontextmanager
    async def _sampling(self) -> Any:
        """Note the most KV that the engine keeps hot for this batch."""

        async def sample() -> None:
            while True:
                with suppress(Exception):  # an engine that is being killed answers nothing
                    spaces = (await self._client.get_stats()).namespaces
                    self._hot_bytes = max(self._hot_bytes, *(each.kv_memory_used_bytes for each in spaces), 0)
                await asyncio.sleep(PAUSE_S)

        sampler = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampler.cancel()


def _count(played: Playthrough, event: TurnDone) -> None:
    answer = event.answer
    played.said[event.turn.index] = (answer.text, answer.completion_tokens)
    played.prompt_tokens += answer.prompt_tokens
    played.prefilled_tokens += answer.new_tokens
    played.first_token_s.append(answer.first_token_s)
