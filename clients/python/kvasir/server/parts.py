"""What a service is made of: its parts, each opened when its turn comes and closed at the end."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from kvasir.server.operating.log_errors import places

_log = logging.getLogger(__name__)


class _Closed(Protocol):
    @property
    def close(self) -> Callable[[], Any]: ...


_Part = TypeVar("_Part", bound=_Closed)


class Parts(contextlib.AsyncExitStack):
    """The parts of a service that is open. At the end they are closed, the last one first."""

    def closing(self, part: _Part) -> _Part:
        """Close it at the end, on a thread if its `close` blocks."""
        if inspect.iscoroutinefunction(part.close):
            self.push_async_callback(part.close)
        else:
            self.push_async_callback(asyncio.to_thread, part.close)
        return part

    def running(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run until the end. If it fails, that is logged, and the service goes on without it."""
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.push_async_callback(end)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        part = getattr(task.get_coro(), "__qualname__", "")
        _log.error("part.failed part=%s error=%s at=%s", part, type(error).__name__, places(error))
