"""Where lives of `lives.py` run: a real store, two real engines, and links between them that fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from kvasir.clients import AioInferenceClient, AioStoreClient

from tests.campaigns.faults.faulty_link import FaultyLink
from tests.campaigns.history.lives import Lives
from tests.running.system_fixtures import ENGINE_SERVICE, House, Service

_OPTIONS = ("--store-budget-ms", "250", "--commit-wait-s", "0.4", "--memory-gib", "0.01")


class World:
    """A store, two engines, and a link between each engine and the store."""

    def __init__(self, root: Path) -> None:
        self.house = House(root, engine_options=_OPTIONS)
        socket = Path(self.house.store.address.removeprefix("unix:"))
        self.links = [FaultyLink(socket.with_name(f"l{number}"), socket) for number in range(2)]
        second = Service("second", "inference_svc", ENGINE_SERVICE, socket.with_name("e2"), root / "second.log")
        second.options = [*self.house.engine.options, "--state-dir", str(root / "state2")]
        self.engines = [self.house.engine, second]
        for engine, link in zip(self.engines, self.links, strict=True):
            engine.options += ["--store", link.address]

    def start(self) -> None:
        self.house.store.start()
        for engine in self.engines:
            engine.start()

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.engines[1].kill()
        self.house.close()


@contextlib.asynccontextmanager
async def open_lives(root: Path, seed: int) -> AsyncIterator[Lives]:
    world = World(root)
    try:
        await asyncio.to_thread(world.start)
        clients = [AioInferenceClient.connect(engine.address) for engine in world.engines]
        lives = Lives(clients, [AioStoreClient.connect(world.house.store.address)], seed, world.links)
        try:
            yield lives
        finally:
            await lives.close()
    finally:
        await asyncio.to_thread(world.close)
