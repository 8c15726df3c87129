"""How the resident memory of both services changes with the number of requests: a straight line through what is left
after the warm-up, with the confidence that the points allow.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from kvasir.clients import AioInferenceClient

from tests.campaigns.hammer import canaries
from tests.running.system_fixtures import House
from tools.kvasir_tiny.words import Dice

# Few memories stay hot, so that old agents' are dropped from the first hundred requests on.
_OPTIONS = ("--memory-gib", "0.006")
_EVERY = 10
_CONCURRENCY = 8
_AGENTS = 24
_Z_95 = 1.96


@dataclass(frozen=True)
class Line:
    """Slope of a straight line, and the half-width of its 95 % confidence interval, in bytes per request."""

    slope: float
    half_width: float

    @property
    def upper(self) -> float:
        return self.slope + self.half_width

    def __str__(self) -> str:
        return f"{self.slope:+,.0f} ± {self.half_width:,.0f} bytes per request"


@dataclass
class Readings:
    """One service, read after every few requests."""

    requests: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    def read(self, requests: int, process: psutil.Process) -> None:
        self.requests.append(requests)
        self.resident_bytes.append(process.memory_info().rss)
        self.threads.append(process.num_threads())
        self.open_files.append(process.num_fds())

    def line_after(self, warm_up: int) -> Line:
        """Least squares through the readings after so many requests. Raises ValueError for fewer than four."""
        points = [(x, y) for x, y in zip(self.requests, self.resident_bytes, strict=True) if x >= warm_up]
        if len(points) < 4:
            raise ValueError(f"expected at least four readings after {warm_up} requests, got {len(points)}")
        x, y = np.array(points, dtype=float).T
        slope, start = np.polyfit(x, y, 1)
        rest = y - (slope * x + start)
        # Neighbouring readings resemble each other: there are fewer independent ones than readings.
        about = float((rest**2).sum())
        alike = min(max(float((rest[:-1] * rest[1:]).sum()) / about, 0.0), 0.95) if about else 0.0
        independent = max(len(x) * (1 - alike) / (1 + alike), 3.0)
        spread = float(np.sqrt(about / max(independent - 2, 1) * independent / len(x)))
        error = spread / float(x.std() * np.sqrt(independent)) if spread else 0.0
        return Line(float(slope), _Z_95 * error)

    def grown(self, values: list[int], warm_up: int) -> int:
        """By how much the later half of the readings after the warm-up exceeds the earlier half, at their highest."""
        later = [value for x, value in zip(self.requests, values, strict=True) if x >= warm_up]
        half = len(later) // 2
        return max(later[half:]) - max(later[:half])


class Soak:
    """Short requests of all sorts against one house."""

    def __init__(self, house: House, seed: int) -> None:
        self._house = house
        self._dice = Dice(f"soak {seed}")
        self._asked = 0
        self.engine, self.store = Readings(), Readings()

    async def run(self, requests: int) -> None:
        async with AioInferenceClient.connect(self._house.engine.address) as client:
            waiting = asyncio.Semaphore(_CONCURRENCY)
            async with asyncio.TaskGroup() as group:
                for number in range(requests):
                    await waiting.acquire()
                    group.create_task(self._ask(client, number, waiting))

    async def _ask(self, client: AioInferenceClient, number: int, waiting: asyncio.Semaphore) -> None:
        dice = self._dice
        said = f"{canaries.question(number % canaries.FACTS_PER_AGENT)} {canaries.filler(dice, 1)}"
        agent = dice.pick([f"one of few {dice.below(_AGENTS)}", f"new {number}", ""])
        events = client.generate(
            agent_id=agent, messages=[{"role": "user", "content": said}], sampling={"max_tokens": dice.between(1, 4)}
        )
        is_cut = dice.chance(0.15)
        try:
            async with contextlib.aclosing(events):
                async for _ in events:
                    if is_cut:
                        break
        finally:
            waiting.release()
            self._asked += 1
            if self._asked % _EVERY == 0:
                self.engine.read(self._asked, psutil.Process(self._house.engine.pid))
                self.store.read(self._asked, psutil.Process(self._house.store.pid))


@contextlib.asynccontextmanager
async def open_soak(directory: Path, seed: int) -> AsyncIterator[Soak]:
    house = House(directory / "house", engine_options=_OPTIONS)
    try:
        await asyncio.to_thread(house.start)
        yield Soak(house, seed)
    finally:
        house.close()
