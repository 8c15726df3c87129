"""Common to both services of the store: the caller's namespace, and calls of the store on a thread."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvasir.server.interceptors import current_principal

from cachestore_svc.index.catalog import SLICE
from cachestore_svc.moving.lease_waiting import once_free
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class StoreCalls:
    """Calls of one store, each in the namespace of the RPC's caller."""

    def __init__(self, store: Store, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads

    async def _run(
        self, method: Callable[Concatenate[str, Arguments], Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """Call a method of the store in the caller's namespace, on a thread."""
        namespace = caller_namespace()
        return await self._threads.run(namespace, method, namespace, *args, **kwargs)

    async def _looked_up(self, names: int, work: Callable[[], Answer]) -> Answer:
        """Read what a request names, and answer it, on a thread."""
        run = self._threads.run_long if names > SLICE else self._threads.run
        return await run(caller_namespace(), work)

    async def _run_once_free(
        self,
        context: Any,
        method: Callable[Concatenate[str, Arguments], Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """The same for what takes back a memory: it waits for the line's lease."""
        return await once_free(lambda: self._run(method, *args, **kwargs), context.time_remaining())


def caller_namespace() -> str:
    return current_principal().namespace
