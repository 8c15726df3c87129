"""The threads on which the event loop runs the store, whose methods block."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StoreThreads:
    """A pool of threads. Wide, because most of them wait for the disk or for a commit that they share."""

    def __init__(self, count: int = 32) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="store")

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Begin a call; it runs to its end whether or not anybody awaits it."""
        return asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and wait. A cancel passes on only when the call has ended: what it holds is never closed under it."""
        future = self.start(function, *args, **kwargs)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait((future,))
            if not future.cancelled():
                future.exception()  # looked at, so that the loop does not report it
            raise

    def close(self) -> None:
        """Wait for what runs."""
        self._pool.shutdown(wait=True)
