"""The life of a request. Start here to see how a turn is served.

1. The turn waits for the turn of its agent before it, and finds the agent's newest memory.
2. A retry is replayed from that memory. Otherwise the prompt is rendered and compared with the memory, and the engine
   gets a plan.
3. The turn's events go to its reader as they come.
4. At the end the hot memory gets its description (`AgentMemory`) as a tag, and is published. The last message reports
   the turn's end and the publication.

Each turn is a task of its own, not its RPC's. A reader that disconnects ends generation; a memory that the turn leaves
is still stored.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import structlog
from kvasir import errors
from kvasir.server.locks import Locks
from kvasir.waits import SOON_S

from inference_svc.engine.api import AgentKey, ContextExceeded
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import Recollection, unreadable
from inference_svc.memory.store.answers import EventCursor
from inference_svc.memory.store.patience import Budget
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.asleep.sleeping import Sleeper
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import Prompted, Ran, Recalled, Remembered
from inference_svc.turns.plan_running import MemoryMovedError, PlanRunner, moved_away
from inference_svc.turns.progress import Progress, Stop, TurnPhase, is_guest
from inference_svc.turns.prompts.texts import prompted, recalled_by, with_difference
from inference_svc.turns.shortening import MemoryShortener
from inference_svc.turns.taken_turns import TakenTurns
from inference_svc.turns.turn_data import MessagesInput, PromptInput, TurnRequest, TurnStarted, Warmed, Work
from inference_svc.turns.turn_ending import Retry, TurnEnding, retried, stopped
from inference_svc.turns.turn_reporter import counted

_LOG = structlog.get_logger(__name__)
_MAX_SERVINGS = 4  # while a turn is planned, its agent may get a newer version: serve it from its beginning this often


class _OvertakenError(Exception):
    """Another engine's turn of the agent comes first."""


class TurnFlow:
    """Serves the turns of one engine, each in a task of its own. Made on the event loop that will run it."""

    def __init__(self, parts: EngineParts, ending: TurnEnding) -> None:
        self._parts = parts
        self._ending = ending
        self._plans = PlanRunner(parts)
        self._order = Locks[AgentKey]()
        self._shortener = MemoryShortener(parts, self._plans, ending)
        self._sleeper = Sleeper(parts)
        self.taken = TakenTurns(parts, self._plans)

    async def run(self, turn: Progress) -> None:
        turn.counters.turns += 1
        turn.task = asyncio.current_task()
        try:
            with counted(turn):
                # A task that is cancelled before it begins would give its reader no end.
                if turn.is_cancelled:
                    raise errors.Cancelled("the turn was cancelled")
                while await self._is_overtaken(turn):
                    pass
        except asyncio.CancelledError:
            self._count_end(turn, "finished" if turn.phase.has_ended else "cancelled")
            _end_early(turn, errors.Cancelled("the turn was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - the reader must get an end whatever happens; the edge logs the error
            is_refusal = isinstance(error, errors.KvasirError) and not error.is_failure
            end = "cancelled" if turn.is_cancelled else "refused" if is_refusal else "failed"
            self._count_end(turn, "moved" if turn.phase is TurnPhase.MOVED else end)
            _end_early(turn, error)
        else:
            self._count_end(turn, "cancelled" if turn.is_cancelled else "finished")
            turn.end(turn.error)

    def _count_end(self, turn: Progress, end: str) -> None:
        turn.counters.ends[end] += 1
        if end == "cancelled" and not turn.phase.has_begun:  # else long waits would be missing where readers give up
            turn.counters.times.queue.add(self._parts.clock() - turn.times.arrived)

    async def _shorten(self, remembered: Remembered, turn: Progress) -> None:
        """After the reader has the end; the agent's next turn waits. Where it fails, the memory stays as it is."""
        turn.end(turn.error)
        try:
            await self._shortener.shorten(remembered)
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            _LOG.warning("memory.not_shortened", request_id=turn.request.request_id, error=type(error).__name__)

    async def _is_overtaken(self, turn: Progress) -> bool:
        """Serve the turn, unless a peer's turn comes with the agent before this one has had an effect."""
        async with self._in_order(turn):
            turn.phase = TurnPhase.PLANNING
            await self._parts.prompting.read(turn.request.namespace, turn.request.prompt.objects)
            if turn.taken is None:  # else the engine that began it has reported how long it waited
                turn.times.queue_s = self._parts.clock() - turn.times.arrived
            try:
                remembered = await self._served(turn)
            except _OvertakenError:
                return True
            if remembered is not None and remembered.later is not None:
                await self._shorten(remembered, turn)
        return False

    @contextlib.asynccontextmanager
    async def _in_order(self, turn: Progress) -> AsyncIterator[None]:
        """Turns of one agent run one after the other, in order of arrival; different agents' turns run in parallel. A
        peer's turn keeps nobody waiting before its agent has come: then it has its place (`TakenTurns.own`).
        """
        if (key := turn.request.key) is None or is_guest(turn):
            yield
            return
        async with contextlib.AsyncExitStack() as place:
            while True:
                await place.enter_async_context(self._place(turn, key))
                if not (coming := await self.taken.coming(key)):
                    break
                await place.aclose()
                await asyncio.wait(coming)
            if turn.taken is None or not turn.taken.begun.peer:
                yield
                return
            await place.aclose()
            with self.taken.before_arrival(turn, key, place, partial(self._place, turn, key)):
                yield

    @contextlib.asynccontextmanager
    async def _place(self, turn: Progress, key: AgentKey) -> AsyncIterator[None]:
        """Meanwhile no other turn of the agent runs, and its line stays this engine's."""
        async with self._order.held(key):
            line = self._parts.recall.line(turn.request.extended)
            with line.in_use() if line is not None else contextlib.nullcontext():
                yield

    async def _served(self, turn: Progress) -> Remembered | None:
        """None: the turn leaves no memory that it made itself."""
        if turn.taken is not None:
            return await self._end(turn, await self.taken.run(turn, turn.taken))
        serves = {Work.REPLY: self._serve, Work.WARM: self._warm, Work.WAKE: self._warm, Work.SLEEP: self._sleep}
        serve, budget, cursor = serves[turn.request.work], self._parts.budget(), None
        for _ in range(_MAX_SERVINGS):
            cursor = cursor or self._parts.event_cursor(turn.request)
            with contextlib.suppress(MemoryMovedError):  # the turn has had no effect yet
                return await serve(turn, cursor, budget)
        raise moved_away()

    async def _recalled(self, turn: Progress, budget: Budget) -> Recollection:
        """Raises _OvertakenError: the newest memory may have come with a peer's turn, which has waited for it."""
        key, given = turn.request.key, turn.request.input
        takes = turn.request.work is not Work.WAKE
        is_append = isinstance(given, MessagesInput) and given.is_append
        # An append is refused without its agent's memory: a late answer is better.
        with budget.at_least(SOON_S) if is_append else contextlib.nullcontext():
            recollection = await self._parts.recall.of_turn(key, budget, extends=turn.request.extends, takes=takes)
        if key is not None and await self.taken.coming(key):
            raise _OvertakenError
        return recollection

    async def _serve(self, turn: Progress, cursor: EventCursor | None, budget: Budget) -> Remembered | None:
        """Raises MemoryMovedError when the turn must be served from its beginning, and as `_recalled`."""
        request = turn.request
        recollection = await self._recalled(turn, budget)
        retry, memory = retried(request, recollection), recollection.memory
        if memory is not None and retry is Retry.REPLAYED:
            turn.counters.sources[Source.REPLAY] += 1
            await self._ending.replay(memory, turn)
            return None
        turn.parent_version = recollection.version
        self._parts.planner.expect(request.namespace, recollection, self._parts.admission.restoring)
        recollection = await self._sleeper.awake(turn, recollection, budget)
        if request.memory.base_version is not None and request.key is not None:
            with_base = self._parts.recall.with_base
            recollection = await with_base(request.key, recollection, request.memory.base_version, budget)
        recalled = recalled_by(request, recollection, cursor, is_retry=retry is not None)
        made = await prompted(self._parts.prompting, recalled)
        made = await with_difference(self._parts.prompting, made)
        try:
            ran = await self._plans.plan_and_run(made, turn, budget)
        except ContextExceeded as error:
            made = await self._shortener.before_reply(made, error)
            ran = await self._plans.plan_and_run(made, turn, budget)
        return await self._end(turn, ran)

    async def _end(self, turn: Progress, ran: Ran) -> Remembered:
        remembered = await self._ending.remember(ran)
        if not turn.is_cancelled:  # whoever cancels wants nothing more computed
            remembered = await self._shortener.after_reply(remembered)
        await self._ending.finish(remembered, turn)
        self._sleeper.served(turn)
        return remembered

    async def _warm(self, turn: Progress, cursor: EventCursor | None, budget: Budget) -> None:
        """Make the agent's memory hot, or the request's prompt, and generate nothing. Raises as `_serve`."""
        request = turn.request
        recollection = await self._recalled(turn, budget)
        recollection = await self._sleeper.awake(turn, recollection, budget)
        memory, turn.parent_version = recollection.memory, recollection.version
        _check_readable(request, recollection)
        if request.input != PromptInput(""):
            has_store = request.namespace in self._parts.stores
            if memory is not None and has_store and not memory.publication.standing.is_safe:
                why = "the agent's memory is not stored yet, and the prompt would take its place"
                about = {"agent_id": request.agent_id}
                raise errors.Unavailable(why, reason="MEMORY_NOT_STORED", metadata=about, retry_after_s=1.0)
            made = await prompted(self._parts.prompting, recalled_by(request, recollection, cursor))
        elif memory is None or not memory.transcript.token_ids:
            turn.emit(TurnStarted(0, 0, Source.COLD, Outcome.NONE, turn.parent_version, recollection.miss))
            turn.emit(Warmed(0, 0, turn.parent_version))
            return
        else:
            made = Prompted(Recalled(request, recollection, event_cursor=cursor), memory.transcript.text)
        self._ending.warmed(await self._plans.plan_and_run(made, turn, budget), turn)

    async def _sleep(self, turn: Progress, cursor: EventCursor | None, budget: Budget) -> None:
        """Let the agent's KV go. Raises as `_warm`, and as `Sleeper.sleep`."""
        recollection = await self._recalled(turn, budget)
        _check_readable(turn.request, recollection)
        await self._sleeper.sleep(turn, recollection, cursor, budget)


def _check_readable(request: TurnRequest, found: Recollection) -> None:
    if (found.head is None and found.kv_from is not Source.HOT) or found.is_unread:
        why = found.miss.detail if found.miss else ""
        if found.is_unread and found.miss is not None and not found.miss.is_store_away:  # no retry reads it
            problem = f"the agent's memory cannot be read ({why}); roll back, or send all its messages"
            metadata = {"agent_id": request.agent_id}
            raise errors.FailedPrecondition(problem, reason="MEMORY_DAMAGED", metadata=metadata)
        raise unreadable(request.agent_id, why)


def _end_early(turn: Progress, error: BaseException) -> None:
    if turn.taken is not None:
        turn.taken.failed(error)
    if turn.stopped == Stop(None) and isinstance(error, asyncio.CancelledError | errors.Cancelled):
        turn.emit(stopped(turn))
        turn.end()
    else:
        turn.end(turn.error or error)
