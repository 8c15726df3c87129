"""Checks a request's reply format before anything else, off the event loop: one at a time, namespaces in turn."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvasir.errors import ResourceExhausted
from kvasir.server.fair_shares import Shares
from kvasir.server.shared_room import SharedRoom

from inference_svc.formats.constraint import Constraint
from inference_svc.formats.grammar_trial import GrammarTrial
from inference_svc.formats.grammars import Grammars

_MAX_WAITING = 128


class ReplyFormats:
    def __init__(self, trial: GrammarTrial, max_waiting: int = _MAX_WAITING) -> None:
        self._trial = trial
        self._waiting = Shares(max_waiting)
        self._working = SharedRoom(1)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def compiled(self, namespace: str, constraint: Constraint | None, grammars: Grammars) -> Constraint | None:
        """A format compiled for a model. Raises InvalidArgument, and ResourceExhausted if too many wait."""
        if constraint is None:
            return None
        if grammars.knows(namespace, constraint):
            return grammars.compile(namespace, constraint)
        with self._waits(namespace, constraint):
            async with self._working.held_for(namespace, 1):
                if grammars.knows(namespace, constraint):  # another request of the namespace compiled it
                    return grammars.compile(namespace, constraint)
                loop = asyncio.get_running_loop()
                in_letters = await loop.run_in_executor(self._thread, grammars.in_letters, constraint)
                await self._trial.check(in_letters)
                return await loop.run_in_executor(self._thread, grammars.compile, namespace, constraint)

    async def close(self) -> None:
        await self._trial.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _waits(self, namespace: str, constraint: Constraint) -> Iterator[None]:
        if not self._waiting.take(namespace, 1):
            field, own = constraint.kind.value, self._waiting.held(namespace)
            raise ResourceExhausted.of(
                field,
                f"{own} formats of the namespace wait to be compiled, and no more may now",
                reason="FORMATS_BUSY",
                retry_after_s=1.0,
                waiting=own,
                max_waiting=self._waiting.total,
            )
        try:
            yield
        finally:
            self._waiting.give_back(namespace, 1)
