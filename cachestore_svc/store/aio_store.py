"""A store for the event loop: each call of it runs on a thread, in the turn of its namespace."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from kvasir.errors import FailedPrecondition, NotFound, Unavailable
from kvasir.waits import LOOK_S, PAUSE_S

from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import AgentRecord
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
# The part of a caller's time that is kept for the last answer, and the least of it: a busy machine answers late.
_ANSWER_PART, _ANSWER_S = 0.2, 0.1


class AioStore:
    """The parts of an open store, whose methods block, and the threads for them."""

    def __init__(self, store: Store, threads: StoreThreads) -> None:
        self.threads = threads
        self.grace_period_s, self.is_sealed = store.grace_period_s, store.is_sealed
        self.is_shared = store.is_shared
        self.blobs, self.prefixes, self.snapshots = store.blobs, store.prefixes, store.snapshots
        self.agents, self.leases, self.owners = store.agents, store.leases, store.owners
        self.moves, self.events = store.moves, store.events
        self.care, self.statistics = store.care, store.statistics

    async def run(
        self,
        namespace: str,
        method: Callable[Concatenate[str, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        return await self.threads.run(namespace, method, namespace, *args, **kwargs)

    async def run_if_awaited(
        self,
        namespace: str,
        method: Callable[Concatenate[str, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """The same, but a caller who leaves while the call waits for its turn takes it away."""
        return await self.threads.run_if_awaited(namespace, method, namespace, *args, **kwargs)

    async def run_once_free(
        self,
        namespace: str,
        agent_id: str,
        left_s: float | None,
        method: Callable[Concatenate[str, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """The same of one that takes back the agent's memory: as `once_free`."""
        call = partial(self.run_if_awaited, namespace, method, *args, **kwargs)
        return await self.once_free(namespace, agent_id, left_s, call)

    async def once_free(
        self, namespace: str, agent_id: str, left_s: float | None, call: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """The answer of `call`, which takes the agent's memory back, once no lease is in its way: a call that finds a
        live lease requests its release, and is repeated once that came, or at intervals: nobody reports a lease that
        ends, or one that goes back to another store over the same catalog. `left_s`: the caller's time; None: as long
        as a lease holds. Raises what `call` raises, and Unavailable (LEASE_HELD) when the lease outlasts that time.
        """
        loop, released, pause_s = asyncio.get_running_loop(), asyncio.Event(), LOOK_S
        give_up = None if left_s is None else loop.time() + left_s - max(_ANSWER_S, _ANSWER_PART * left_s)
        with self.leases.watching_releases(namespace, agent_id, partial(loop.call_soon_threadsafe, released.set)):
            while True:
                released.clear()  # before the look: a release behind it is not missed
                try:
                    return await call()
                except FailedPrecondition as error:
                    if error.reason != "LEASE_HELD":
                        raise
                    error.__traceback__ = None  # its frames have the operation, in a ring
                    held_s = int(error.metadata["left_ms"]) / 1000
                    wait_s = min(pause_s, held_s)  # of a lease that is renewed in its last millisecond none at all
                    if give_up is not None and loop.time() + wait_s > give_up:
                        raise Unavailable(
                            "an inference service holds the agent's lease and has not let go yet",
                            reason="LEASE_HELD",
                            retry_after_s=min(held_s, 1.0),
                            metadata=error.metadata,
                        ) from None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(released.wait(), wait_s)
                pause_s = min(2 * pause_s, PAUSE_S)

    async def agent(self, namespace: str, agent_id: str) -> AgentRecord | None:
        try:
            return await self.run(namespace, self.agents.get, agent_id)
        except NotFound:
            return None

    async def labels(self, namespace: str, agent_id: str) -> Mapping[str, str]:
        agent = await self.agent(namespace, agent_id)
        return agent.labels if agent is not None else {}

    async def owner(self, namespace: str, agent_id: str) -> Ownership:
        return await self.run(namespace, self.owners.of, agent_id)
