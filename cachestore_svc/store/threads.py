"""The threads on which the event loop runs the store, whose methods block: namespaces share them, and take turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from kvasir.server.shared_room import ModestRoom, SharedRoom
from kvasir.waits import SOON_S

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 32
# Calls that keep the interpreter busy for a tenth of a second: more at once would keep everybody else from it.
LONG_CALLS = 2


class StoreThreads:
    """A pool of threads. Wide, because most of them wait for the disk or for a commit that they share. One namespace
    has three quarters of them at most, so another one finds a free thread, and does not wait behind all that the first
    has requested. While another was here it has `beside` for quick calls: where these read and hash a disk's blobs,
    more of them than there are processors only make that one wait.
    """

    def __init__(self, count: int = THREADS, beside: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="store")
        self.room = ModestRoom(count, beside)
        self.long_calls = SharedRoom(LONG_CALLS)

    def start(self, namespace: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Begin a call for a namespace in its turn; it runs to its end whether or not anybody awaits it."""
        call = partial(function, *args, **kwargs)
        if not self.room.take_if_fits(namespace, 1):
            return asyncio.ensure_future(self._in_turn(namespace, call))
        return self._begun(namespace, call)

    async def run(self, namespace: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and wait. A cancel passes on only when the call has ended: what it holds is never closed under it."""
        return await to_its_end(self.start(namespace, function, *args, **kwargs))

    async def run_if_awaited(self, namespace: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, but a cancel while the call waits for its turn takes it away: a store that works for callers who
        have left has no time for those who are there.
        """
        await self.room.wait_for(namespace, 1)
        return await to_its_end(self._begun(namespace, partial(function, *args, **kwargs)))

    async def run_long(self, namespace: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for what names thousands of things: one such call of a namespace after the other."""
        async with self.long_calls.held_for(namespace, 1):
            return await self.run(namespace, function, *args, **kwargs)

    def _begun(self, namespace: str, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Run on a thread that the namespace has taken, and give it back behind that."""
        loop, give_back = asyncio.get_running_loop(), self.room.give_back

        def lasts() -> None:
            nonlocal give_back
            give_back = self.room.give_back_excused
            self.room.excuse(namespace, 1)

        def ended(_: object) -> None:
            timer.cancel()
            give_back(namespace, 1)

        try:
            future = loop.run_in_executor(self._pool, call)
        except RuntimeError:  # the pool is closed
            give_back(namespace, 1)
            raise
        # A longer call waits for a disk, or is a collection: other calls of its namespace do not wait for that.
        timer = loop.call_later(SOON_S, lasts)
        future.add_done_callback(ended)
        return future

    async def _in_turn(self, namespace: str, call: Callable[[], T]) -> T:
        await self.room.wait_for(namespace, 1)
        return await self._begun(namespace, call)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


async def to_its_end(future: "asyncio.Future[T]") -> T:
    """Its answer. A cancel passes on only when it is done."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await ended(future)
        raise


async def ended(future: "asyncio.Future[T]") -> None:
    """Wait until it is done, though the waiting task is cancelled. Then a cancel passes on, and a failure is heard."""
    try:
        await asyncio.wait((future,))
    except asyncio.CancelledError:
        await ended(future)
        raise
    finally:
        if future.done() and not future.cancelled():
            future.exception()
