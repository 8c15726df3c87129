"""An agent's own turn, and a peer's turn that comes with a move of the agent while the own one begins."""

import asyncio
from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

from inference_svc.memory.recall import Recollection
from inference_svc.memory.store.answers import LastMove
from tests.inference.turns.test_replanning import OURS, THEIRS, Surroundings, remembered, request, service


class Moving(Surroundings):
    """An agent whose move from a peer completes just before its newest version is read."""

    copies: Any = SimpleNamespace(pin=lambda *_asked: None)
    is_reachable = True

    def __init__(self) -> None:
        super().__init__([remembered(OURS, "moved"), remembered(THEIRS, "given")], losses=0)
        self.connection = self.agents = self
        self.last = LastMove("before")
        self.is_read = asyncio.Event()

    async def newest(self, key: object, budget: object) -> Recollection:
        self.last = LastMove("m")
        self.is_read.set()
        return await super().newest(key, budget)

    async def last_move(self, agent_id: str, within_s: float) -> LastMove:
        return self.last


class Given:
    """A peer's turn that waits for its agent."""

    request = request(None)
    taken = SimpleNamespace(begun=SimpleNamespace(move_id="m"))


async def test_an_agents_own_turn_follows_a_peers_whose_move_completes_while_it_begins() -> None:
    """Else it would extend the version that the peer's turn extends, and that one would be lost."""
    async with asyncio.timeout(20):
        around = Moving()
        turns = service(around, {"default": around})
        given: Any = Given()
        key = given.request.key
        async with AsyncExitStack() as place:
            with turns._flow.taken.before_arrival(given, key, place, nullcontext):
                events = turns.begin(request(None)).events()
                await around.is_read.wait()
                await asyncio.sleep(0.01)
                assert around.planned == []
            async for _ in events:
                pass
        assert around.finished == [(6, "given new")]
