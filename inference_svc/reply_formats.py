"""A reply format at the service's edge: tried, then compiled, before anything else is done, and off the event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from inference_svc.grammar_trial import GrammarTrial
from inference_svc.grammars import Grammars
from inference_svc.plan import Constraint


class ReplyFormats:
    """Of all models of one service. Made on the event loop that will use it."""

    def __init__(self, trial: GrammarTrial) -> None:
        self._trial = trial
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def check(self, constraint: Constraint | None, grammars: Grammars) -> None:
        """See that a format is compiled for a model. Raises InvalidArgument that names the field."""
        if constraint is None or grammars.knows(constraint):
            return
        await self._trial.check(constraint)
        await asyncio.get_running_loop().run_in_executor(self._thread, grammars.compile, constraint)

    async def close(self) -> None:
        await self._trial.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
