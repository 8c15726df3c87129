"""The calls that run, each with its caller: they end when the caller's right does."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvasir.credentials import Principal
from kvasir.errors import Unauthenticated


class RunningCalls:
    """Every call under way enters `running`; `end` ends those of some callers, also in the middle of a stream."""

    def __init__(self) -> None:
        self._callers: dict[asyncio.Task[Any], Principal] = {}
        self._over: set[asyncio.Task[Any]] = set()

    @contextmanager
    def running(self, caller: Principal) -> Iterator[None]:
        """Around a call, in its task. Raises Unauthenticated in it when `end` has chosen it."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self._callers[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._over:
                raise
            task.uncancel()
            raise Unauthenticated(f"{caller.name!r} was removed", reason="CREDENTIAL_REVOKED") from None
        finally:
            del self._callers[task]
            self._over.discard(task)

    def end(self, is_over: Callable[[Principal], bool]) -> int:
        tasks = [task for task, caller in self._callers.items() if task not in self._over and is_over(caller)]
        for task in tasks:
            self._over.add(task)
            task.cancel()
        return len(tasks)
