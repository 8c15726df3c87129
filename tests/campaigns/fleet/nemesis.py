"""Breaks the parts of a fleet, several at once: each part by a seeded random order of its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.fleet.targets import Peace, Target
from tools.kvasir_tiny.words import Dice

# In a calm all that is owed is stored and new turns begin; without one, hardly anything is there to be lost.
_STORM_S, _CALM_S = 20.0, 10.0
FAULTS_OF_A_COMMIT = 3
_LOOK_S = 0.2
# All parts are repaired then: a fleet in which agents come to nothing for so long does not live.
_STUCK_S = 600.0


class Nemesis:
    """A seed gives each target the same faults in the same order; which of two targets is first is not given."""

    def __init__(
        self,
        targets: Sequence[Target],
        seed: int,
        commits: Callable[[], int],
        peace: Peace | None = None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`commits`: how many were acknowledged. A calm lasts until they are a third of the faults. `failed` is called
        where a target cannot be repaired.
        """
        self.counts: Counter[str] = Counter()
        self.problems = list[str]()
        self._targets, self._seed, self._failed = targets, seed, failed
        self._peace = peace or Peace()
        self._weather = Weather(lambda: commits() * FAULTS_OF_A_COMMIT >= self.faults, self._peace)

    @property
    def faults(self) -> int:
        return self.counts.total()

    async def run(self, faults: int, until_s: float, is_ended: Callable[[], bool] = lambda: False) -> None:
        """So many faults, in storms, up to that time or its end; then all is repaired. A target that cannot be ends it
        too, as a problem: what else was found is not lost.
        """

        def is_over() -> bool:
            return bool(self.problems) or self.faults >= faults or time.monotonic() > until_s or is_ended()

        async def in_peace(for_s: float) -> None:
            until = time.monotonic() + for_s
            while (left_s := until - time.monotonic()) > 0 and not is_over():  # noqa: ASYNC110
                await asyncio.sleep(min(left_s, _LOOK_S))

        async def breaks(target: Target) -> None:
            dice = Dice(f"nemesis {self._seed} {target.name}")
            while True:
                await in_peace(2 * target.peace_s * dice.random())
                while self._weather.is_calm(time.monotonic()) and not is_over():
                    self._weather.check(time.monotonic())
                    await target.keep_up()
                    await asyncio.sleep(_LOOK_S)
                if is_over():
                    self._peace.is_now(True)
                    return
                if what := await target.strike(dice):
                    self.counts[what] += 1

        async def tries(target: Target) -> None:
            try:
                await breaks(target)
            except Exception as error:  # noqa: BLE001  whatever it is, the round is kept
                unrepaired = f"{target.name} could not be repaired: {error or repr(error)}"
                self.problems.append(str(error) if isinstance(error, StuckError) else unrepaired)
                self._peace.is_now(True)
                await asyncio.to_thread(self._failed)

        # A part that starts holds a thread, and all parts may start at once.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(self._targets) + 4))
        async with asyncio.TaskGroup() as breaking:
            for target in self._targets:
                breaking.create_task(tries(target))


class StuckError(Exception):
    """A calm in which too little was committed."""


class Weather:
    """Storms of faults, and calms, each of which lasts until agents have come to enough and all parts have started.
    Begins with a storm.
    """

    def __init__(self, is_enough: Callable[[], bool], peace: Peace) -> None:
        self._is_enough, self._peace, self._is_calm, self._ends_s = is_enough, peace, True, 0.0

    def is_calm(self, now_s: float) -> bool:
        is_over, is_wanted = now_s >= self._ends_s, self._peace.is_wanted
        if is_over and not is_wanted and self._is_enough() if self._is_calm else is_over or is_wanted:
            self._is_calm = not self._is_calm
            self._ends_s = now_s + (_CALM_S if self._is_calm else _STORM_S)
        self._peace.is_now(self._is_calm)
        return self._is_calm

    def check(self, now_s: float) -> None:
        """Raises StuckError for a calm that does not end."""
        if self._is_calm and now_s - self._ends_s > _STUCK_S:
            raise StuckError(f"{_STUCK_S:g} s of calm brought no commit for every {FAULTS_OF_A_COMMIT} faults")
