"""Work of the background: of the stores that share a catalog one does each. If it ends, another one goes on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from kvasir.errors import KvasirError
from kvasir.waits import PATIENCE_S

from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.store.threads import StoreThreads

_LOG = structlog.get_logger("cachestore")


async def while_ours(
    has_job: Callable[[str], bool], threads: StoreThreads, name: str, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Do a work that never ends by itself, for as long as it is this store's. It is cancelled when it is not."""
    task: asyncio.Task[None] | None = None
    try:
        while True:
            try:
                is_ours = await threads.run(HOUSE, has_job, name)
            except KvasirError as error:  # another store may have it by the time that this one knows
                _LOG.warning("job.left", job=name, reason=error.reason)
                is_ours = False
            if task is not None and (not is_ours or task.done()):
                await _end(task)
                task = None
            if is_ours and task is None:
                task = asyncio.create_task(work())
            await asyncio.sleep(PATIENCE_S)
    finally:
        if task is not None:
            await _end(task)


async def _end(task: "asyncio.Task[None]") -> None:
    """Cancel it and wait. Raises its error."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
