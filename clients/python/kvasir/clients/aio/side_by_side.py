"""Several streams at once, as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_END: Any = object()


async def side_by_side(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """What all of these give, as it comes. Raises the first failure, and ends the others."""
    if len(sources) == 1:  # also where nothing may wait (`kvasir.clients.blocking`)
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    coming = {asyncio.create_task(_next(source)): source for source in sources}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                item, source = task.result(), coming.pop(task)
                if item is not _END:
                    coming[asyncio.create_task(_next(source))] = source
                    yield item
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[_Item, None]) -> _Item:
    return await anext(source, _END)
