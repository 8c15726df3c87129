"""Common to both services of the store: the caller's namespace, and calls of the store on a thread."""

from collections.abc import Callable
from typing import Any, Concatenate

from kvasir.server.interceptors import current_principal

from cachestore_svc.index.catalog import SLICE
from cachestore_svc.store.aio_store import AioStore, Answer, Arguments


class StoreCalls:
    """Calls of one store, each in the namespace of the RPC's caller."""

    def __init__(self, store: AioStore) -> None:
        self._store = store

    async def _run(
        self, method: Callable[Concatenate[str, Arguments], Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """A caller who leaves while the call waits for its turn takes it away."""
        return await self._store.run_if_awaited(caller_namespace(), method, *args, **kwargs)

    async def _looked_up(self, names: int, work: Callable[[], Answer]) -> Answer:
        run = self._store.threads.run_long if names > SLICE else self._store.threads.run_if_awaited
        return await run(caller_namespace(), work)

    async def _run_once_free(
        self,
        context: Any,
        agent_id: str,
        method: Callable[Concatenate[str, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """The same for calls that take back the agent's memory: they wait for its leases."""
        left_s = context.time_remaining()
        return await self._store.run_once_free(caller_namespace(), agent_id, left_s, method, *args, **kwargs)


def caller_namespace() -> str:
    return current_principal().namespace
