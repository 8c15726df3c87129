"""Gives KV's memory back to the machine: when no turn has run for a while, and when the machine is short of it."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

import structlog
from kvasir.waits import ANSWER_S

from inference_svc.engine.api import AgentKey
from inference_svc.kv.pages.pool import IDLE_BYTES

_LOG = structlog.get_logger(__name__)


class Giver(Protocol):
    @property
    def memory_used_bytes(self) -> int: ...

    @property
    def computed_tokens(self) -> int: ...

    def give_back(self, most_bytes: int, spared: Collection[AgentKey]) -> "Future[int]": ...


class GivingBack:
    """Looks every few seconds. Memories that the store has leave RAM: their agents go on from the store."""

    def __init__(
        self,
        engine: Callable[[], tuple[Giver, bool, Collection[AgentKey]] | None],
        keep_hot_s: float,
        is_short: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """`engine`: the one that is loaded, whether it is idle, and agents that were woken because they may come."""
        self._engine = engine
        self._keep_hot_s = keep_hot_s
        self._is_short = is_short
        self._clock = clock
        self._idle_since_s: float | None = None
        self._computed = -1

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(ANSWER_S, self._keep_hot_s))
            await self.look()

    async def look(self) -> None:
        """Give back half of the used bytes while memory is short; once after an idle time all but a few."""
        is_short = await asyncio.to_thread(self._is_short)
        if (begun := self._begun(is_short=is_short)) is not None:
            await _given(*begun)

    def _begun(self, *, is_short: bool) -> "tuple[Future[int], str] | None":
        """What is given back, and why. Nothing here waits with the engine, which may be unloaded meanwhile."""
        found, now_s = self._engine(), self._clock()
        if found is None:
            return None
        engine, is_idle, expected = found
        if not is_idle or engine.computed_tokens != self._computed:
            self._idle_since_s, self._computed = now_s, engine.computed_tokens
        if is_short:
            return engine.give_back(engine.memory_used_bytes // 2, ()), "the machine is short of memory"
        if self._idle_since_s is not None and now_s - self._idle_since_s >= self._keep_hot_s:
            self._idle_since_s = None  # until the next turn
            return engine.give_back(IDLE_BYTES, expected), "no turn came"
        return None


async def _given(asked: "Future[int]", why: str) -> None:
    giving = asyncio.wrap_future(asked)
    await asyncio.wait({giving})
    if giving.cancelled():
        return  # the engine has ended
    if (error := giving.exception()) is not None:  # pages in use are copied, and the device may have no room for that
        _LOG.error("kv.not_given_back", exc_info=error, why=why)
    elif freed := giving.result():
        _LOG.info("kv.given_back", bytes=freed, why=why)
