"""Several replies to one input in one stream: one turn for each, and all of them end together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from inference_svc.turns.turn_data import TurnEvent, TurnProgress, TurnRequest, TurnStarted
from inference_svc.turns.turn_flow import TurnService
from inference_svc.turns.turn_state import TurnTask

_SEEDS = 1 << 64


class Choices:
    """Turns under way, as their reader sees them."""

    def __init__(self, turns: Sequence[TurnTask]) -> None:
        self._turns = turns
        self._first: int | None = None  # the choice that began first: only its beginning is reported

    async def events(self) -> AsyncIterator[tuple[int, TurnEvent]]:
        """Each event with the index of its choice; events of one choice are in order. The first failure ends them all.

        No choice is read ahead, so that each turn's own outbox notices a slow reader.
        """
        streams = [turn.events() for turn in self._turns]
        coming = {asyncio.ensure_future(_next(stream)): choice for choice, stream in enumerate(streams)}
        try:
            while coming:
                arrived, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(arrived, key=lambda task: coming[task]):
                    choice = coming.pop(task)
                    if (event := task.result()) is None:
                        continue
                    if self._is_reported(choice, event):
                        yield choice, event
                    coming[asyncio.ensure_future(_next(streams[choice]))] = choice
        finally:
            for task in coming:
                task.cancel()

    def cancel(self) -> None:
        """The reader is gone: all of them end. Idempotent."""
        for turn in self._turns:
            turn.cancel()

    def _is_reported(self, choice: int, event: TurnEvent) -> bool:
        if isinstance(event, TurnStarted) and self._first is None:
            self._first = choice
            return True
        return choice == self._first or not isinstance(event, TurnStarted | TurnProgress)


def begin(turns: TurnService, request: TurnRequest) -> Choices:
    """Start every choice that is asked for, choice i with the seed + i. Raises what `TurnService.begin` raises; none of
    them runs then.
    """
    choices = Choices(running := [])
    try:
        for choice in range(request.choices):
            seed = (request.sampling.seed + choice) % _SEEDS
            running.append(turns.begin(replace(request, choice=choice, sampling=replace(request.sampling, seed=seed))))
    except BaseException:
        choices.cancel()
        raise
    return choices


async def _next(stream: AsyncIterator[TurnEvent]) -> TurnEvent | None:
    return await anext(stream, None)
