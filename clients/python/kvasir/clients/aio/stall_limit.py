"""The time that a stream may go without progress."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any, Self, TypeVar

from kvasir.errors import DeadlineExceeded

_Item = TypeVar("_Item")


def no_progress(seconds: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the transfer made no progress for {seconds:g} s")


class AioStallLimit:
    """Ends its block with DeadlineExceeded when nothing has made progress in it for `seconds`; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._is_running = False

    def progress(self) -> None:
        """Something has moved: the time begins again."""
        if self._is_running and self._seconds is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)

    async def counting(self, items: Iterable[_Item] | AsyncIterable[_Item]) -> AsyncGenerator[_Item, None]:
        """The same items; each that is taken is progress."""
        if isinstance(items, AsyncIterable):
            async for item in items:
                self.progress()
                yield item
        else:
            for item in items:
                self.progress()
                yield item

    def watched(self, method: Any) -> Any:
        """The method as it is: cancelling the task ends its call."""
        return method

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._is_running = True
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self._is_running = False
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            raise no_progress(self._seconds) from None
