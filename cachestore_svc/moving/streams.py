"""Streams whose other end may be slow: a slow end gives way to others, and a stalled stream is ended."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from kvasir.errors import DeadlineExceeded

from cachestore_svc.moving.outbound import BlobSource

_SLOW_S = 0.5  # A reader that takes no piece within this time lets go of the rest
T = TypeVar("T")


class Streams:
    """Sends and receives messages. A caller that makes no progress for `stall_timeout_s` is cut off."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s

    async def send(self, context: Any, response: Any, source: BlobSource | None = None) -> None:
        """Write a response. A slow reader's buffer makes room for others; a reader that stops is cut off."""
        try:
            if source is None:
                async with asyncio.timeout(self._stall_timeout_s):
                    await context.write(response)
            else:
                await self._send_piece(context, response, source)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the caller took nothing for {self._stall_timeout_s:g} s", reason="READER_STALLED"
            ) from None

    async def send_all(
        self, context: Any, steps: AsyncGenerator[T, None], written: Callable[[T], Any] = lambda step: step
    ) -> None:
        async with aclosing(steps) as coming:
            async for step in coming:
                await self.send(context, written(step))

    async def _send_piece(self, context: Any, response: Any, source: BlobSource) -> None:
        writing = asyncio.ensure_future(context.write(response))
        waits: set[asyncio.Future[Any]] = {writing}
        try:
            done, _ = await asyncio.wait(waits, timeout=min(_SLOW_S, self._stall_timeout_s))
            if not done:
                waits.add(asyncio.create_task(source.wanted()))
                done, _ = await asyncio.wait(waits, timeout=self._stall_timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if done and not writing.done():
                    await source.let_go()
                    await asyncio.wait((writing,), timeout=self._stall_timeout_s)
            if not writing.done():
                raise TimeoutError
            await writing
        finally:
            for wait in waits:
                wait.cancel()

    async def unstalled(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """The same requests. A sender that is silent for too long is cut off; its part is kept for resumption."""
        try:
            while True:
                async with asyncio.timeout(self._stall_timeout_s):
                    request = await anext(requests, None)
                if request is None:
                    return
                yield request
        except TimeoutError:
            raise DeadlineExceeded(
                f"the caller sent nothing for {self._stall_timeout_s:g} s", reason="SENDER_STALLED"
            ) from None
