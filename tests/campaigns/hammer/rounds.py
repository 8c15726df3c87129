"""One round: a house with an engine under fire, many agents at once, and a reference that does the same turns alone."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.campaigns.hammer import canaries
from tests.campaigns.hammer.actors import Actor
from tests.campaigns.hammer.agents import Script
from tests.campaigns.hammer.arena import Arena, RoundPlan, RoundResult
from tests.campaigns.hammer.reference import Reference
from tests.running.system_fixtures import House
from tools.kvasir_tiny.words import Dice

_SHARED_PREFIXES = 3
_TURNS_PER_LIFE = (4, 14)


class Round:
    """Agents come, live and go, so many at once; meanwhile the engine is killed and stopped."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._plan = arena.plan
        self._dice = Dice(f"round {arena.plan.name}")
        self._prefixes = [
            f"You are an assistant. {canaries.filler_up_to(self._dice, '', self._dice.between(250, 540))}"
            for _ in range(_SHARED_PREFIXES)
        ]

    async def run(self) -> RoundResult:
        arena = self._arena
        began = time.monotonic()
        async with arena.client, arena.store:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.concurrency):
                    group.create_task(self._lives())
                group.create_task(self._restart_engine())
            await arena.settle()
        arena.result.seconds = time.monotonic() - began
        return arena.result

    async def _lives(self) -> None:
        while not self._arena.is_over:
            actor = self._arena.forked.pop() if self._arena.forked else Actor(self._arena, self._new_script())
            for _ in range(self._dice.between(*_TURNS_PER_LIFE)):
                if self._arena.is_over or not await actor.act():
                    break
            await actor.leave()

    def _new_script(self) -> Script:
        dice, name = self._dice, self._arena.new_name()
        system = dice.pick(self._prefixes) if dice.chance(0.2) else dice.pick(["", "You are a librarian."])
        own = Dice(f"{self._plan.name} {name}")
        return Script(name, own, self._arena.canaries, is_raw=dice.chance(0.35), system=system)

    async def _restart_engine(self) -> None:
        """Kill or stop the engine after equal parts of the requests, with turns in flight, and start it again."""
        arena, house = self._arena, self._arena.house
        endings = ["kill"] * self._plan.kills + ["stop"] * self._plan.stops
        for number, how in enumerate(endings, 1):
            await arena.until_asked(self._plan.requests * number // (len(endings) + 1))
            arena.engine_is_up.clear()
            await asyncio.to_thread(house.engine.kill if how == "kill" else house.engine.stop)
            house.engine.options += ["--memory-gib", str(self._plan.memory_gib[number % len(self._plan.memory_gib)])]
            await asyncio.to_thread(house.engine.start)
            arena.lives_of_engine += 1
            arena.counts[f"engine {how}"] += 1
            arena.engine_is_up.set()


@contextlib.asynccontextmanager
async def open_arena(plan: RoundPlan, directory: Path) -> AsyncIterator[Arena]:
    """A round whose house and reference are up, and gone afterwards whatever happens."""
    house = House(directory / "house", engine_options=("--memory-gib", str(plan.memory_gib[0])))
    reference = None
    try:
        starting = asyncio.create_task(asyncio.to_thread(house.start))
        reference = await Reference.start(directory / "reference.log")
        await starting
        yield Arena(plan, house, reference)
    finally:
        house.close()
        if reference is not None:
            await reference.close()


async def run_round(plan: RoundPlan, directory: Path) -> RoundResult:
    """One round in a directory of its own; what went wrong is saved beside it as JSON."""
    async with open_arena(plan, directory) as arena:
        result = await Round(arena).run()
    for number, problem in enumerate(result.problems):
        path = directory / f"problem-{number}-{problem.sort}.json"
        path.write_text(json.dumps({"plan": vars(plan), **vars(problem)}, indent=1))
    return result
