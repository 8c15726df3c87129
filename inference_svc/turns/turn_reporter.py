"""Takes a turn's events from the engine: counts them, reports them to the reader, and sends full blocks ahead.

If the reader falls too far behind, its turn is ended here.
"""

import asyncio
from collections.abc import Callable

import structlog
from kvasir import errors
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.volatile import TEMPLATE_DATE

from inference_svc.engine.api import BlocksFull, Ended, Event, Failed, Prefilled, Resumed, Started, Tokens
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.service_stats import NamespaceCounters
from inference_svc.memory.swap_store import SwapStore
from inference_svc.text.replies.reply_parts import ReplyPart
from inference_svc.text.token_ids import NO_TOKENS
from inference_svc.turns.continuing import of_text
from inference_svc.turns.handoff import HandOff
from inference_svc.turns.turn_data import TurnDelta, TurnStarted
from inference_svc.turns.turn_state import TakenTurn, TurnState

_LOG = structlog.get_logger(__name__)


class TurnReporter:
    """Reports one plan of one turn. Made on the event loop, where all of it runs except `listen`."""

    def __init__(
        self,
        turn: TurnState,
        prepared: Prepared,
        stream: BlockStream | None,
        counters: NamespaceCounters,
        costs: RestoreCosts,
        handoff: HandOff,
        clock: Callable[[], float],
    ) -> None:
        self.prepared = prepared  # as the engine began with it, once it has
        self.swap: SwapStore | TakenTurn | None = None
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._turn = turn
        self._stream = stream
        self._counters = counters
        self._costs = costs
        self._handoff = handoff
        self._clock = clock

    def listen(self, events: list[Event]) -> None:
        """The engine's events. On the MLX thread: a snapshot is asked for here, because the next step may drop this
        memory for another.
        """
        stream = self._stream
        for event in events:
            if isinstance(event, Started):
                self.prepared = self.prepared.begun(event)
                if stream is not None:
                    reused = 0 if event.is_shared else event.cached_tokens // BLOCK_TOKENS
                    stream.keeps(len(self.prepared.stored_blocks), reused)
            elif isinstance(event, Resumed) and event.lost_tokens:
                self.prepared = self.prepared.kept(event.tokens // BLOCK_TOKENS)
                if stream is not None:
                    blocks = event.tokens // BLOCK_TOKENS
                    stream.keeps(blocks, blocks)
        if stream is not None and isinstance(events[-1], Ended):
            self._turn.pinning = stream.pin_rest(self.prepared.stored_windows)
        self._handoff.send(self._take, events)

    def _take(self, events: list[Event]) -> None:
        try:
            for event in events:
                if self.ended.done():
                    return
                self._event(event)
                if self.swap is not None:
                    self.swap.event(event)
                self._check_reader()
                if isinstance(event, Failed):
                    self.ended.set_exception(event.error)
                elif isinstance(event, Ended):
                    self._turn.running.is_ending = True
                    self.ended.set_result(event)
        except Exception as error:  # noqa: BLE001 - the turn waits for its end
            self.ended.set_exception(error)

    def _event(self, event: Event) -> None:
        match event:
            case Started():
                self._started(event)
            case Prefilled(done):
                self._counters.prefilled_tokens += done - self._turn.computed
                self._turn.computed = done
                self._turn.running.tell(event)
            case BlocksFull(count):
                if self._stream is not None:
                    self._stream.blocks_full(count)
            case Tokens():
                self._tokens(event)
            case Resumed() if not self._turn.has_begun:
                self._taken_up()
            case Ended():
                self._ended(event)
            case _:
                pass

    def _check_reader(self) -> None:
        running = self._turn.running
        if overrun := running.outbox.overrun:
            running.cancel(errors.ResourceExhausted(f"the reader is too slow: {overrun}", reason="READER_TOO_SLOW"))

    def _started(self, event: Started) -> None:
        turn, prepared, counters = self._turn, self.prepared, self._counters
        cached_tokens = event.cached_tokens
        planned = Source.SHARED if event.is_shared else prepared.source
        source = planned if cached_tokens else Source.COLD
        if not turn.has_begun:
            counters.waiting_turns -= 1
            counters.running_turns += 1
            counters.times.queue.add(turn.queue_s + event.queue_s)
            if source is Source.WARM:
                counters.times.restore.add(turn.restore_s + event.restore_s)
        turn.has_begun, turn.computed, turn.prepared = True, cached_tokens, prepared
        turn.prompt_tokens, turn.cached_tokens = len(prepared.tokens.ids), cached_tokens
        turn.restoring.close()
        self._learn_restore(event)
        counters.sources[source] += 1
        counters.cached_tokens += cached_tokens
        if prepared.miss is not None:
            counters.misses[prepared.miss.reason] += 1
        turn.running.tell(
            TurnStarted(
                prompt_tokens=len(prepared.tokens.ids),
                cached_tokens=cached_tokens,
                source=source,
                match=prepared.match,
                parent_version=turn.parent_version,
                miss=prepared.miss,
                continuation=turn.continuation or (of_text(prepared.match) if turn.key is not None else None),
                base_version=turn.request.base_version or turn.parent_version,
                is_time_untold=turn.is_time_untold,
                difference=turn.difference,
                kept=tuple(sorted(turn.kept | ({TEMPLATE_DATE} if turn.clock.has_kept else set()))),
                prompt_ids=prepared.tokens.ids if turn.request.returns_prompt_ids else NO_TOKENS,
                ignored_settings=turn.request.ignored_settings,
            )
        )

    def _learn_restore(self, event: Started) -> None:
        """What it costs to restore all files, unless much of them was read while the turn waited. Of a store for which
        the turn did not wait to the end, what it would have cost.
        """
        reading = self.prepared.reading
        if reading is None or event.is_shared or not event.cached_tokens:
            return
        took_s = reading.first_s + event.restore_s
        _LOG.info("memory.restored", tokens=event.cached_tokens, bytes=reading.came_bytes, ms=round(1e3 * took_s))
        if event.queue_s < event.restore_s:
            whole_s = took_s * reading.size_bytes / reading.came_bytes
            self._costs.restored(self._turn.request.namespace, reading.size_bytes, whole_s)

    def _taken_up(self) -> None:
        """A turn that another engine began and reported: it runs here now."""
        turn, counters = self._turn, self._counters
        assert turn.taken is not None
        counters.waiting_turns -= 1
        counters.running_turns += 1
        carried = turn.taken.carried
        turn.has_begun, turn.computed, turn.prepared = True, carried.computed, self.prepared
        turn.prompt_tokens, turn.cached_tokens = len(self.prepared.tokens.ids), carried.cached
        turn.completion_tokens = len(carried.token_ids) - turn.prompt_tokens
        if turn.completion_tokens and turn.first_token_at is None:  # it came while files went ahead
            turn.first_token_at = turn.arrived + carried.spent.first_token_s

    def _tokens(self, event: Tokens) -> None:
        self._time(len(event.ids))
        self._counters.decoded_tokens += len(event.ids)
        self._turn.completion_tokens += len(event.ids)
        part = self._turn.reader.push(event.text)
        self._turn.running.tell(TurnDelta(part.answer, event.ids, part.reasoning, event.logprobs))

    def _time(self, tokens: int) -> None:
        turn, times, now_s = self._turn, self._counters.times, self._clock()
        gaps, since_s = tokens, now_s - (turn.last_token_at or now_s)
        if turn.first_token_at is None:
            turn.first_token_at = now_s
            times.first_token.add(now_s - turn.arrived)
            gaps -= 1
        if gaps > 0:
            times.token_gap.add(since_s / gaps, gaps)
        turn.last_token_at = now_s

    def _ended(self, event: Ended) -> None:
        if self._turn.taken is None:
            self._costs.computed(event.cached_tokens, event.prompt_tokens, event.timings.prefill_s)
        part = self._turn.reader.end(event.generated_text.removeprefix(event.text))
        if part != ReplyPart():
            self._turn.running.tell(TurnDelta(part.answer, (), part.reasoning))
        if self._stream is not None:
            self._stream.stop()
            self._turn.stream = self._stream
