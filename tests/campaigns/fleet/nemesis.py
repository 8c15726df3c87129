"""Breaks the parts of a fleet, several at once: each part by a seeded random order of its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.fleet.targets import Target
from tools.kvasir_tiny.words import Dice

# In a calm all that is owed is stored and new turns begin; without one, hardly anything is there to be lost.
_STORM_S, _CALM_S = 20.0, 10.0


class Nemesis:
    """A seed gives each target the same faults in the same order; which of two targets is first is not given."""

    def __init__(self, targets: Sequence[Target], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._targets, self._seed = targets, seed

    @property
    def faults(self) -> int:
        return self.counts.total()

    async def run(self, faults: int, until_s: float) -> None:
        """So many faults, in storms, or up to that time; then all is repaired. Raises FleetError."""
        began = time.monotonic()

        def is_over() -> bool:
            return self.faults >= faults or time.monotonic() > until_s

        async def breaks(target: Target) -> None:
            dice = Dice(f"nemesis {self._seed} {target.name}")
            while True:
                await asyncio.sleep(2 * target.peace_s * dice.random())
                await asyncio.sleep(_calm_left_s(time.monotonic() - began))
                if is_over():
                    return
                if what := await target.strike(dice):
                    self.counts[what] += 1

        # A part that starts holds a thread, and all parts may start at once.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(self._targets) + 4))
        async with asyncio.TaskGroup() as breaking:
            for target in self._targets:
                breaking.create_task(breaks(target))


def _calm_left_s(since_s: float) -> float:
    """Of the calm that is now; 0 in a storm."""
    within_s = since_s % (_STORM_S + _CALM_S)
    return 0.0 if within_s < _STORM_S else _STORM_S + _CALM_S - within_s
