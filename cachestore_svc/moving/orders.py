"""Orders of this store's owner to give an agent to a peer. The peer may report to any store over the same catalog, so
each of these hears of an order, and of its end at the latest SILENCE_S after its store died.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from kvasir.errors import KvasirError
from kvasir.waits import PATIENCE_S

from cachestore_svc.store.aio_store import AioStore

_NUMBER_BYTES = 8


class Orders:
    """On one event loop."""

    def __init__(self, store: AioStore) -> None:
        self._store = store
        self._here: Counter[tuple[str, str, str]] = Counter()

    @contextlib.asynccontextmanager
    async def holding(
        self, namespace: str, agent_id: str, peer: str, token_hex: Callable[[int], str]
    ) -> AsyncGenerator[None, None]:
        """Meanwhile the peer may take this agent. Raises Unavailable."""
        agent = namespace, agent_id, peer
        self._here[agent] += 1
        try:
            if self._store.is_shared:
                async with self._shared(namespace, agent_id, peer, token_hex(_NUMBER_BYTES)):
                    yield
            else:
                yield
        finally:
            self._here[agent] -= 1
            self._here += Counter()  # without those that are 0

    async def has(self, namespace: str, agent_id: str, peer: str) -> bool:
        if (namespace, agent_id, peer) in self._here or not self._store.is_shared:
            return (namespace, agent_id, peer) in self._here
        return await self._store.run(namespace, self._store.moves.is_ordered, agent_id, peer)

    @contextlib.asynccontextmanager
    async def _shared(self, namespace: str, *order: str) -> AsyncGenerator[None, None]:
        moves = self._store.moves

        async def renew() -> None:
            while True:
                await asyncio.sleep(PATIENCE_S)
                with contextlib.suppress(KvasirError):  # the next time, or the order ends
                    await self._store.run(namespace, moves.order, *order)

        renewing: asyncio.Task[None] | None = None
        try:
            await self._store.run(namespace, moves.order, *order)
            renewing = asyncio.create_task(renew())
            yield
        finally:
            if renewing is not None:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
            with contextlib.suppress(KvasirError):
                await self._store.run(namespace, moves.end_order, *order)
