"""Breaks the parts of a fleet, several at once: each part by a seeded random order of its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.fleet.targets import Target
from tools.kvasir_tiny.words import Dice


class Nemesis:
    """A seed gives each target the same faults in the same order; which of two targets is first is not given."""

    def __init__(self, targets: Sequence[Target], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._targets, self._seed = targets, seed

    @property
    def faults(self) -> int:
        return self.counts.total()

    async def run(self, faults: int, until_s: float) -> None:
        """So many faults, or up to that time; then all is repaired. Raises FleetError."""

        def is_over() -> bool:
            return self.faults >= faults or time.monotonic() > until_s

        async def breaks(target: Target) -> None:
            dice = Dice(f"nemesis {self._seed} {target.name}")
            while True:
                await asyncio.sleep(2 * target.peace_s * dice.random())
                if is_over():
                    return
                if what := await target.strike(dice):
                    self.counts[what] += 1

        # A part that starts holds a thread, and all parts may start at once.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(self._targets) + 4))
        async with asyncio.TaskGroup() as breaking:
            for target in self._targets:
                breaking.create_task(breaks(target))
