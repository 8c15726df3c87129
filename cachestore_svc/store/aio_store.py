"""A store for the event loop: each call of it runs on a thread, in the turn of its namespace."""

from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

from kvasir.errors import NotFound

from cachestore_svc.facts.ownership import Ownership
from cachestore_svc.facts.records import AgentRecord
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class AioStore:
    """The parts of an open store, whose methods block, and the threads for them."""

    def __init__(self, store: Store, threads: StoreThreads) -> None:
        self.threads = threads
        self.grace_period_s, self.is_sealed = store.grace_period_s, store.is_sealed
        self.blobs, self.prefixes, self.leases, self.snapshots = (
            store.blobs,
            store.prefixes,
            store.leases,
            store.snapshots,
        )
        self.agents, self.owners, self.moves, self.events = store.agents, store.owners, store.moves, store.events
        self.care, self.statistics = store.care, store.statistics

    async def run(
        self,
        namespace: str,
        method: Callable[Concatenate[str, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """The answer of one of these methods in a namespace."""
        return await self.threads.run(namespace, method, namespace, *args, **kwargs)

    async def agent(self, namespace: str, agent_id: str) -> AgentRecord | None:
        """The agent, if there is one."""
        try:
            return await self.run(namespace, self.agents.get, agent_id)
        except NotFound:
            return None

    async def labels(self, namespace: str, agent_id: str) -> Mapping[str, str]:
        """Its labels; none where there is no agent."""
        agent = await self.agent(namespace, agent_id)
        return agent.labels if agent is not None else {}

    async def owner(self, namespace: str, agent_id: str) -> Ownership:
        """What is known of its owner."""
        return await self.run(namespace, self.owners.of, agent_id)
