"""Several replies to one input in one stream: one turn for each, and all of them end together."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from inference_svc.turns.outbox import Outbox
from inference_svc.turns.turn_data import TurnEvent, TurnRequest
from inference_svc.turns.turn_state import TurnTask

_SEEDS = 1 << 64


class Choices:
    """The turns of one request, as their reader sees them."""

    def __init__(
        self,
        request: TurnRequest,
        outbox: Outbox,
        begin: Callable[[TurnRequest], TurnTask],
        left: Iterable[int] | None = None,
    ) -> None:
        """Begin every choice that is asked for, or those that are `left`, choice i with the seed + i. If `begin`
        raises, none of them runs.
        """
        self._outbox = outbox
        self._turns: list[TurnTask] = []
        sampling = request.sampling
        try:
            for choice in range(request.choices) if left is None else left:
                seeded = replace(sampling, seed=(sampling.seed + choice) % _SEEDS)
                self._turns.append(begin(replace(request, choice=choice, sampling=seeded)))
        except BaseException:
            self.cancel()
            raise

    def events(self) -> AsyncIterator[tuple[int, TurnEvent]]:
        """Each event with the index of its choice; those of one choice are in order: Started first, the end last. The
        choice that begins first reports the beginning and the progress. The first failure ends the stream, as a
        KvasirError.
        """
        return self._outbox.events()

    def cancel(self) -> None:
        """The reader is gone: all of them end. Idempotent."""
        for turn in self._turns:
            turn.cancel()
