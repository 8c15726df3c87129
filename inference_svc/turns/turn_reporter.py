"""Handles a turn's events: counts them, reports them to the turn's reader, and sends full blocks ahead.

If the reader falls too far behind, its turn is ended here.
"""

from collections.abc import Callable

from kvasir import errors

from inference_svc.engine.api import BlocksFull, Ended, Event, Prefilled, Started, Tokens
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing import BlockStream
from inference_svc.memory.recall import Prepared
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.text.reply_parts import ReplyPart
from inference_svc.turns.turn_data import TurnDelta, TurnProgress, TurnStarted
from inference_svc.turns.turn_state import TurnState


class TurnReporter:
    """Reports one plan of one turn. On the event loop."""

    def __init__(
        self,
        turn: TurnState,
        prepared: Prepared,
        stream: BlockStream | None,
        counters: NamespaceCounters,
        clock: Callable[[], float],
    ) -> None:
        self._turn = turn
        self._prepared = prepared
        self._stream = stream
        self._counters = counters
        self._clock = clock

    def event(self, event: Event) -> None:
        match event:
            case Started():
                self._started(event)
            case Prefilled(done, total):
                self._counters.prefilled_tokens += done - self._turn.computed
                self._turn.computed = done
                self._turn.running.outbox.put(TurnProgress(done, total))
            case BlocksFull(count):
                if self._stream is not None:
                    self._stream.blocks_full(count)
            case Tokens():
                self._tokens(event)
            case Ended():
                self._ended(event)
            case _:
                pass
        if overrun := self._turn.running.outbox.overrun:
            self._turn.running.cancel(
                errors.ResourceExhausted(f"the reader is too slow: {overrun}", reason="READER_TOO_SLOW")
            )

    def _started(self, event: Started) -> None:
        turn, prepared, counters = self._turn, self._prepared, self._counters
        cached_tokens = event.cached_tokens
        planned = Source.SHARED if event.is_shared else prepared.source
        source = planned if cached_tokens else Source.COLD
        if not turn.has_begun:
            counters.waiting_turns -= 1
            counters.running_turns += 1
        turn.has_begun, turn.computed = True, cached_tokens
        counters.sources[source] += 1
        counters.cached_tokens += cached_tokens
        if prepared.miss is not None:
            counters.misses[prepared.miss.reason] += 1
        turn.running.outbox.put(
            TurnStarted(
                prompt_tokens=len(prepared.tokens.ids),
                cached_tokens=cached_tokens,
                source=source,
                match=prepared.match,
                parent_version=turn.parent_version,
                miss=prepared.miss,
            )
        )

    def _tokens(self, event: Tokens) -> None:
        if self._turn.first_token_at is None:
            self._turn.first_token_at = self._clock()
        self._counters.decoded_tokens += len(event.ids)
        part = self._turn.reader.push(event.text)
        self._turn.running.outbox.put(TurnDelta(part.answer, event.ids, part.reasoning, event.logprobs))

    def _ended(self, event: Ended) -> None:
        part = self._turn.reader.end(event.generated_text.removeprefix(event.text))
        if part != ReplyPart():
            self._turn.running.outbox.put(TurnDelta(part.answer, (), part.reasoning))
        if self._stream is not None:
            self._stream.stop()
            self._turn.stream = self._stream
