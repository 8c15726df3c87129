"""The engine's own turns, which put an agent to sleep or wake it. A caller's turn ends them, here or elsewhere."""

import asyncio
from collections.abc import Callable
from itertools import count

from kvasir.waits import LOOK_S

from inference_svc.engine.api import AgentKey, Pace, Priority, SamplingParams
from inference_svc.turns.turn_data import PromptInput, TurnRequest, Work
from inference_svc.turns.turn_service import Choices, TurnService


class OwnTurns:
    def __init__(
        self, turns: TurnService, is_wanted: Callable[[AgentKey], bool], give_way: Callable[[], bool] = lambda: False
    ) -> None:
        """`is_wanted`: whether another engine waits for the agent. `give_way`: whether texts are embedded now, or the
        model is about to go.
        """
        self._turns = turns
        self._is_wanted = is_wanted
        self._give_way = give_way
        self._numbers = count(1)

    @property
    def may_begin(self) -> bool:
        return self._turns.is_idle and not self._give_way()

    async def make(self, key: AgentKey, work: Work) -> None:
        """To its end, or until a caller's turn comes. Raises a KvasirError: why it failed, or Cancelled."""
        running = self._turns.begin(
            TurnRequest(
                request_id=f"{work.value}-{next(self._numbers)}",
                namespace=key.namespace,
                agent_id=key.agent_id,
                input=PromptInput(""),
                input_digest="",
                sampling=SamplingParams(max_tokens=0),
                clamps_max_tokens=False,
                pace=Pace(Priority.BACKGROUND),
                work=work,
            ),
            is_own=True,
        )
        reading = asyncio.create_task(_read(running))
        try:
            while not (await asyncio.wait({reading}, timeout=LOOK_S))[0]:
                if self._stands_in_the_way(key, work):
                    running.cancel()
            await reading
        finally:
            running.cancel()
            reading.cancel()

    def _stands_in_the_way(self, key: AgentKey, work: Work) -> bool:
        """Whether a caller's work runs beside it, or waits elsewhere. Who waits until its agent is awake here gains."""
        if self._is_wanted(key) or self._give_way():
            return True
        callers = [turn for turns in self._turns.under_way() for turn in turns]
        waits_for_it = work is Work.WAKE and all(turn.request.key == key for turn in callers)
        return len(callers) > 1 and not waits_for_it


async def _read(running: Choices) -> None:
    async for _ in running.events():
        pass
