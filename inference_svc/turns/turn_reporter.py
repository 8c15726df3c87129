"""Lets the engine run a plan, and takes its events: counts them, reports them to the reader, sends full blocks ahead.
The MLX thread only hands events over (`HandOff`). A reader that falls too far behind has its turn ended here.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from threading import Lock
from typing import Any

import structlog
from kvasir import errors
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.volatile import TEMPLATE_DATE
from kvasir.waits import LOOK_S

from inference_svc.engine import api
from inference_svc.engine.engine import Engine
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Pinning
from inference_svc.memory.reuse_plan import Once, Prepared
from inference_svc.memory.swap_store import SwapRooms, SwapStore
from inference_svc.text.replies.reply_parts import ReplyPart
from inference_svc.text.token_ids import NO_TOKENS
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import Planned, Ran
from inference_svc.turns.progress import Progress, TakenTurn, TurnPhase
from inference_svc.turns.prompts.continuing import of_text
from inference_svc.turns.prompts.texts import reply_reader
from inference_svc.turns.turn_data import TurnDelta, TurnStarted

_LOG = structlog.get_logger(__name__)
_WAITING = (api.Tokens, api.BlocksFull)  # events that may wait for the end of a pause
_FEW = 4  # readers, each of which gets every token by itself


class HandOff:
    """Carries events to their turns, from any thread: one wake-up of the loop for all of a step.

    A message for each token of many readers would keep the loop, and with it the interpreter, which the engine's thread
    needs, for as long as a device's step. So their tokens come once in `LOOK_S`, each reader's as one list. No gap
    grows beyond that: tokens that come later go on at once, and so do those of a reader who had none then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[Callable[..., None], list[Any], tuple[object, ...], bool]] = []
        self._open: dict[Callable[..., None], list[Any]] = {}  # lists among these, which a reader's next tokens join
        self._lock = Lock()
        self._is_scheduled = False
        self._pause: asyncio.TimerHandle | None = None
        self._paused: set[Callable[..., None]] = set()  # until its end, tokens of these wait

    def send(self, deliver: Callable[..., None], events: list[Any], *about: object, can_wait: bool = False) -> None:
        """`can_wait`: for the end of a pause; `deliver` may have more events then. Others take along all that waits."""
        with self._lock:
            if can_wait and deliver in self._open:
                self._open[deliver] += events
            else:
                self._waiting.append((deliver, events, about, can_wait))
                self._open[deliver] = events
            if not can_wait:
                del self._open[deliver]
            if self._is_scheduled or (can_wait and deliver in self._paused) or self._loop.is_closed():
                return
            self._is_scheduled = True
        self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            batch, self._waiting, self._open = self._waiting, [], {}
            self._is_scheduled = False
            if self._pause is not None:
                self._pause.cancel()
            readers = {deliver for deliver, _, _, can_wait in batch if can_wait}
            self._paused = readers if len(readers) > _FEW else set()
            self._pause = self._loop.call_later(LOOK_S, self._deliver) if self._paused else None
        for deliver, events, about, _ in batch:
            deliver(events, *about)


class _Listener:
    """Hears the engine on the MLX thread, and hands over. What it remembers is that thread's alone."""

    def __init__(self, prepared: Prepared, stream: BlockStream | None, hand_over: Callable[..., None]) -> None:
        self._prepared = prepared
        self._stream = stream
        self._hand_over = hand_over
        self._cuts = 0

    def __call__(self, events: list[api.Event]) -> None:
        """At the end a copy is requested here, because the next step may drop this memory for another."""
        pinning, can_wait = None, True
        for event in events:
            if isinstance(event, _WAITING):
                continue
            can_wait = False
            if (cut := _cut(self._prepared, event)) is not None:
                self._prepared, self._cuts = cut, self._cuts + 1
            if self._stream is not None and isinstance(event, api.Ended):
                prepared = self._prepared
                pinning = self._stream.pin_rest(self._cuts, len(prepared.stored_blocks), prepared.stored_windows)
        self._hand_over(events, pinning, can_wait=can_wait)


def _joined(events: Sequence[api.Event]) -> Sequence[api.Event]:
    """Tokens that follow one another as one event: each takes the interpreter from the engine's thread for a while."""
    joined: list[api.Event] = []
    for _, same in groupby(events, type):
        some = [*same]
        tokens = [each for each in some if isinstance(each, api.Tokens)]
        joined += [_as_one(tokens)] if len(tokens) > 1 else some
    return joined


def _as_one(parts: Sequence[api.Tokens]) -> api.Tokens:
    ids, logprobs = (token for each in parts for token in each.ids), (one for each in parts for one in each.logprobs)
    return api.Tokens(tuple(ids), "".join(each.text for each in parts), tuple(logprobs))


def _cut(prepared: Prepared, event: api.Event) -> Prepared | None:
    """What is left of the prepared KV, if the event reports that the turn's KV has other rows behind some place."""
    if isinstance(event, api.Started):
        return prepared.begun(event)
    if isinstance(event, api.Resumed) and event.lost_tokens:
        return prepared.kept(event.tokens // BLOCK_TOKENS)
    return None


@contextlib.contextmanager
def counted(turn: Progress) -> Iterator[None]:
    """The turn counts as waiting until it begins, and then as running."""
    counters = turn.counters
    counters.waiting_turns += 1
    try:
        yield
    finally:
        if turn.phase.has_begun:
            counters.running_turns -= 1
        else:
            counters.waiting_turns -= 1


class TurnReporter:
    """Lets the engine run one plan of one turn, and reports that. On the event loop."""

    def __init__(self, planned: Planned, turn: Progress, parts: EngineParts, handoff: HandOff) -> None:
        self._ran: asyncio.Future[Ran] = asyncio.get_running_loop().create_future()
        self._planned = planned
        self._prepared = planned.prepared  # as the engine began with it, once it has
        self._turn = turn
        self._parts = parts
        self._counters = turn.counters
        self._swap: SwapStore | TakenTurn | None = turn.taken  # brings its KV in, or keeps it after a preemption
        self._stream = self._new_stream()
        self._reader = reply_reader(planned.request, parts.prompting, planned.prepared.text, planned.begun_reply)
        self._handoff = handoff

    def _new_stream(self) -> BlockStream | None:
        planned, key, parts = self._planned, self._planned.request.key, self._parts
        line = parts.recall.line(key) if planned.recalled.is_kept else None
        if key is None or line is None:
            return None
        previous = planned.recollection.memory if planned.prepared.source is Source.HOT else None
        stored, stall_s = planned.prepared.stored_blocks, parts.limits.publish_timeout_s
        return BlockStream(parts.copies, key, line.store, stored, stall_s, previous)

    def _new_swap(self) -> SwapStore | None:
        handle, parts, namespace = self._turn.handle, self._parts, self._planned.request.namespace
        store = parts.stores.get(namespace)
        if store is None or handle is None:
            return None
        rooms = SwapRooms(namespace, parts.copies.held, parts.admission.restoring)
        limits = parts.limits.swap(parts.copies.piece_blocks)
        return SwapStore(handle, store, rooms, self._counters, limits, parts.clock)

    async def run(self) -> Ran:
        planned, turn, plan = self._planned, self._turn, self._planned.plan
        # The engine alone holds its listener: a turn that is over leaves no circle of references.
        hand_over = partial(self._handoff.send, self._take)
        try:
            with self._parts.admission.kv(planned.request.namespace, self._parts.engine.needed_bytes(plan.most_tokens)):
                turn.handle = self._parts.engine.submit(
                    replace(plan, reuse=planned.prepared.kv.take() or api.Cold()),
                    _Listener(planned.prepared, self._stream, hand_over),
                )
                turn.planned = replace(planned, plan=replace(plan, carried=None))
                if turn.taken is not None:
                    turn.taken.handle = turn.handle
                return await self._ran
        except BaseException:
            if self._turn.handle is not None:
                self._turn.handle.cancel()
            if self._stream is not None:  # no manifest will name its blocks
                self._stream.abandon()
            raise
        finally:
            turn.handle = None
            if self._swap is not None:
                self._swap.close()

    def _take(self, events: list[api.Event], pinning: Pinning | None) -> None:
        try:
            for event in _joined(events):
                if self._ran.done():
                    return
                self._event(event)
                if isinstance(event, api.Preempted) and self._swap is None:
                    self._swap = self._new_swap()
                if self._swap is not None:
                    self._swap.event(event)
                self._check_reader()
                if isinstance(event, api.Failed):
                    self._ran.set_exception(event.error)
                elif isinstance(event, api.Ended):
                    if not self._turn.phase.has_ended:
                        self._turn.begin(TurnPhase.ENDING)
                    reader, planned = self._reader, self._turn.planned or self._planned  # the line as it is now
                    calls, pinned = tuple(reader.calls), Once(pinning)
                    ran = Ran(planned, self._prepared, event, calls, reader.has_reasoned, self._stream, pinned)
                    self._ran.set_result(ran)
        except Exception as error:  # noqa: BLE001 - the turn waits for its end
            self._ran.set_exception(error)

    def _event(self, event: api.Event) -> None:
        if (cut := _cut(self._prepared, event)) is not None:
            self._prepared = cut
        match event:
            case api.Started():
                self._keeps(len(self._prepared.stored_blocks), 0 if event.is_shared else event.cached_tokens)
                self._started(event)
            case api.Prefilled(done):
                self._counters.tokens["prefilled"] += done - self._turn.tokens.computed
                self._turn.tokens.computed = done
                self._turn.emit(event)
            case api.BlocksFull(count):
                if self._stream is not None:
                    self._stream.blocks_full(count)
            case api.Tokens():
                self._tokens(event)
            case api.Resumed():
                if event.lost_tokens:
                    self._keeps(event.tokens // BLOCK_TOKENS, event.tokens)
                if not self._turn.phase.has_begun:
                    self._taken_up()
            case api.Ended():
                self._ended(event)
            case _:
                pass

    def _keeps(self, blocks: int, reused_tokens: int) -> None:
        if self._stream is not None:
            self._stream.keeps(blocks, reused_tokens // BLOCK_TOKENS)

    def _check_reader(self) -> None:
        if overrun := self._turn.outbox.overrun:
            error = errors.ResourceExhausted(f"the reader is too slow: {overrun}", reason="READER_TOO_SLOW")
            self._turn.cancel(error)

    def _started(self, event: api.Started) -> None:
        turn, prepared, counters, times = self._turn, self._prepared, self._counters, self._turn.times
        planned_source = Source.SHARED if event.is_shared else prepared.source
        source = planned_source if event.cached_tokens else Source.COLD
        if source is Source.HOT and turn.source is Source.WOKEN:
            source = Source.WOKEN
        turn.source = source
        if not turn.phase.has_begun:
            counters.times.queue.add(times.queue_s + event.queue_s)
            if source is Source.WARM:
                counters.times.restore.add(times.restore_s + event.restore_s)
            turn.begin(TurnPhase.RUNNING)
        tokens = turn.tokens
        tokens.prompt = len(prepared.tokens.ids)
        tokens.cached = tokens.computed = event.cached_tokens
        self._planned.restoring.close()
        self._learn_restore(event)
        counters.sources[source] += 1
        counters.tokens["cached"] += event.cached_tokens
        if prepared.miss is not None:
            counters.misses[prepared.miss.reason] += 1
        turn.emit(self._beginning(event.cached_tokens, source))

    def _beginning(self, cached_tokens: int, source: Source) -> TurnStarted:
        prepared, prompted, recalled = self._prepared, self._planned.prompted, self._planned.recalled
        request, parent_version = recalled.request, self._turn.parent_version
        how = recalled.continuation or (of_text(prepared.match) if request.agent_id else None)
        return TurnStarted(
            prompt_tokens=len(prepared.tokens.ids),
            cached_tokens=cached_tokens,
            source=source,
            match=prepared.match,
            parent_version=parent_version,
            miss=prepared.miss,
            continuation=how,
            base_version=request.memory.base_version or parent_version,
            is_time_untold=prompted.is_time_untold,
            difference=prompted.difference,
            kept=tuple(sorted(recalled.kept | ({TEMPLATE_DATE} if prompted.clock.has_kept else set()))),
            prompt_ids=prepared.tokens.ids if request.prompt.returns_ids else NO_TOKENS,
            ignored_settings=request.prompt.ignored_settings,
        )

    def _learn_restore(self, event: api.Started) -> None:
        """What restoring all files costs, or would have, unless much of them was read while the turn waited."""
        reading = self._prepared.reading
        if reading is None or event.is_shared or not event.cached_tokens:
            return
        took_s = reading.first_s + event.restore_s
        times = self._turn.times
        since = {
            "arrived": self._parts.clock() - times.arrived,
            "lookup": times.restore_s - reading.first_s,
            "first_file": reading.first_s,
            "queue": event.queue_s,
            "load": event.restore_s,
            "read": reading.took_s,  # by itself, beside the others
            "read_waited": reading.waited_s,
        }
        in_ms = {f"{name}_ms": round(1e3 * seconds, 1) for name, seconds in since.items()}
        found = {"tokens": event.cached_tokens, "bytes": reading.came_bytes, "ms": round(1e3 * took_s)}
        from_disk = reading.is_from_disk
        _LOG.info("memory.restored", **found, from_disk=from_disk, **in_ms)
        if event.queue_s < event.restore_s:
            whole_s = took_s * reading.size_bytes / reading.came_bytes
            source = self._turn.request.namespace
            self._parts.planner.costs.restored(source, reading.size_bytes, whole_s, from_disk=from_disk)

    def _taken_up(self) -> None:
        """A turn that another engine began and reported: its KV is here now."""
        turn, tokens, times = self._turn, self._turn.tokens, self._turn.times
        assert turn.taken is not None
        turn.begin(TurnPhase.HELD)
        carried = turn.taken.carried
        tokens.prompt, tokens.cached, tokens.computed = len(self._prepared.tokens.ids), carried.cached, carried.computed
        tokens.completion = len(carried.token_ids) - tokens.prompt
        if tokens.completion and times.first_token_at is None:  # it came while files went ahead
            times.first_token_at = times.arrived + carried.spent.first_token_s

    def _tokens(self, event: api.Tokens) -> None:
        self._time(len(event.ids))
        self._counters.tokens["decoded"] += len(event.ids)
        self._turn.tokens.completion += len(event.ids)
        part = self._reader.push(event.text)
        self._turn.emit(TurnDelta(part.answer, event.ids, part.reasoning, event.logprobs))

    def _time(self, tokens: int) -> None:
        turn_times, times, now_s = self._turn.times, self._counters.times, self._parts.clock()
        gaps, since_s = tokens, now_s - (turn_times.last_token_at or now_s)
        if turn_times.first_token_at is None:
            turn_times.first_token_at = now_s
            times.first_token.add(now_s - turn_times.arrived)
            gaps -= 1
        if gaps > 0:
            times.token_gap.add(since_s / gaps, gaps)
        turn_times.last_token_at = now_s

    def _ended(self, event: api.Ended) -> None:
        if self._turn.taken is None:
            self._parts.planner.costs.computed(event.cached_tokens, event.prompt_tokens, event.timings.prefill_s)
        part = self._reader.end(event.generated_text.removeprefix(event.text))
        if part != ReplyPart():
            self._turn.emit(TurnDelta(part.answer, (), part.reasoning))
        if self._stream is not None:
            self._stream.stop()


async def run_to_end(
    engine: Engine, plan: api.TurnPlan, handoff: HandOff, hear: Callable[[api.Event], object] = lambda _: None
) -> api.Ended:
    """Run a plan that has no reader; `hear` gets each event. A cancel ends it. Raises the reason of a failure."""
    over: asyncio.Future[api.Ended] = asyncio.get_running_loop().create_future()

    def take(events: list[api.Event]) -> None:
        for event in events:
            hear(event)
            if isinstance(event, api.Ended) and not over.done():
                over.set_result(event)
            elif isinstance(event, api.Failed) and not over.done():
                over.set_exception(event.error)

    handle = engine.submit(plan, lambda events: handoff.send(take, events))
    try:
        return await over
    except BaseException:
        handle.cancel()
        raise
