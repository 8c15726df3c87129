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
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog
from kvasir import errors

from inference_svc.engine.api import AgentKey, Cold
from inference_svc.engine.context import ContextExceeded
from inference_svc.memory.line_leases import MOVED
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.store.answers import EventCursor
from inference_svc.memory.store.patience import Budget
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.agent_lines import AgentLines, MemoryMovedError, not_moved
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import (
    Planned,
    Progress,
    Prompted,
    Ran,
    Recalled,
    Remembered,
    Stop,
    TakenTurn,
    TurnPhase,
)
from inference_svc.turns.plan_running import PlanRunner, moved_away
from inference_svc.turns.prompts.continuing import check_parent, is_retry, is_whole
from inference_svc.turns.prompts.prompt_text import prompted, recalled_by, with_difference
from inference_svc.turns.shortening import MemoryShortener
from inference_svc.turns.turn_data import PromptInput, TurnRequest, TurnStarted, Warmed
from inference_svc.turns.turn_ending import TurnEnding, stopped
from inference_svc.turns.turn_reporter import counted

_LOG = structlog.get_logger(__name__)
# While a turn is planned, its agent may get a newer version: serve it from its beginning this often.
_MAX_SERVINGS = 4
# For so long a turn that was given here waits for a store that is away.
_STORE_AWAY_S, _STORE_PAUSE_S = 60.0, 0.25


class TurnFlow:
    """Serves the turns of one engine, each in a task of its own. Made on the event loop that will run it."""

    def __init__(self, parts: EngineParts, ending: TurnEnding) -> None:
        self._parts = parts
        self._ending = ending
        self._lines = AgentLines(parts)
        self._plans = PlanRunner(parts, self._lines)
        self._order: dict[AgentKey, asyncio.Lock] = {}
        self._waiting: Counter[AgentKey] = Counter()
        self._early: dict[Progress, AgentKey] = {}  # peers' turns, which come before their agents
        self._shortener = MemoryShortener(parts, self._lines, self._plans, ending)

    async def run(self, turn: Progress) -> None:
        """The turn from its arrival to its end. Its reader gets an end whatever happens."""
        request, counters = turn.request, self._parts.stats.of(turn.request.namespace)
        counters.turns += 1
        turn.task = asyncio.current_task()
        try:
            with counted(counters, turn):
                # A task that is cancelled before it begins would give its reader no end.
                if turn.is_cancelled:
                    raise errors.Cancelled("the turn was cancelled")
                async with self._in_order(turn):
                    turn.phase = TurnPhase.PLANNING
                    await self._parts.prompting.read(request.namespace, request.prompt.objects)
                    if turn.taken is None:  # else the engine that began it has reported how long it waited
                        turn.times.queue_s = self._parts.clock() - turn.times.arrived
                    with contextlib.nullcontext() if turn.is_guest else self._lines.using(request):
                        remembered = await (self._serve(turn) if turn.taken is None else self._go_on(turn, turn.taken))
                        if remembered is not None and remembered.later is not None:
                            await self._shorten(remembered, turn)
        except asyncio.CancelledError:
            self._count_end(turn, "finished" if turn.has_ended else "cancelled")
            _end_early(turn, errors.Cancelled("the turn was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - the reader must get an end whatever happens; the edge logs the error
            end = "cancelled" if turn.is_cancelled else "refused" if _is_refusal(error) else "failed"
            self._count_end(turn, "moved" if turn.phase is TurnPhase.MOVED else end)
            _end_early(turn, error)
        else:
            self._count_end(turn, "cancelled" if turn.is_cancelled else "finished")
            turn.end(turn.error)

    def _count_end(self, turn: Progress, end: str) -> None:
        counters = self._parts.stats.of(turn.request.namespace)
        counters.ends[end] += 1
        if end == "cancelled" and not turn.has_begun:  # else long waits would be missing where readers give up
            counters.times.queue.add(self._parts.clock() - turn.times.arrived)

    async def _shorten(self, remembered: Remembered, turn: Progress) -> None:
        """After the reader has the turn's end: the agent's next turn waits, its reader does not. Where it fails, or is
        ended (`end_work_behind`), the memory stays as it is, and the next turn leaves messages out.
        """
        turn.end(turn.error)
        try:
            await self._shortener.shorten(remembered)
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            _LOG.warning("memory.not_shortened", request_id=turn.request.request_id, error=type(error).__name__)

    @contextlib.asynccontextmanager
    async def _in_order(self, turn: Progress) -> AsyncIterator[None]:
        """Turns of one agent run one after the other, in order of arrival; different agents' turns run in parallel."""
        key = turn.key
        if key is None or turn.is_guest:
            yield
            return
        lock = self._order.setdefault(key, asyncio.Lock())
        self._waiting[key] += 1
        if turn.taken is not None and turn.taken.begun.peer:
            self._early[turn] = key
        early = [each for each, awaited in self._early.items() if awaited == key and turn.taken is None]
        ending = [asyncio.create_task(self._end_unless_coming(each)) for each in early]
        try:
            async with lock:
                yield
        finally:
            for each in ending:
                each.cancel()
            self._early.pop(turn, None)
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._order[key]

    async def _end_unless_coming(self, turn: Progress) -> None:
        """End a peer's turn whose agent does not come: a peer that keeps silent would keep the agent's own turns
        waiting. While the store does not answer, they wait.
        """
        assert turn.taken is not None
        with contextlib.suppress(errors.Unavailable):
            if not await self._lines.is_coming(turn.request, turn.taken.begun) and turn in self._early:
                turn.cancel(not_moved("the agent had a turn here meanwhile"))

    # --- one turn ---

    async def _serve(self, turn: Progress) -> Remembered | None:
        """None: the turn leaves no memory that it made itself."""
        budget, request, cursor = self._parts.budget(), turn.request, None
        for _ in range(_MAX_SERVINGS):
            cursor = cursor or self._lines.event_cursor(request)
            with contextlib.suppress(MemoryMovedError):  # the turn has had no effect yet
                return await self._serve_once(turn, cursor, budget)
        raise moved_away()

    async def _serve_once(self, turn: Progress, cursor: EventCursor | None, budget: Budget) -> Remembered | None:
        """Raises MemoryMovedError when the turn must be served from its beginning."""
        request, recollection = turn.request, await self._lines.newest(turn.request, budget)
        memory = recollection.memory
        if request.is_warming:
            await self._warm(turn, recollection, cursor, budget)
            return None
        is_again = memory is not None and not request.memory.is_read_only and is_retry(request, memory)
        if memory is not None and is_again and is_whole(memory) and recollection.kv_from is not Source.COLD:
            self._parts.stats.of(request.namespace).sources[Source.REPLAY] += 1
            await self._ending.replay(memory, turn)
            return None
        if not is_again:
            check_parent(request, recollection)
        turn.parent_version = recollection.version
        if request.memory.base_version is not None and request.key is not None:
            with_base = self._parts.recall.with_base
            recollection = await with_base(request.key, recollection, request.memory.base_version, budget)
        made = await prompted(self._parts.prompting, recalled_by(request, recollection, cursor, is_retry=is_again))
        made = await with_difference(self._parts.prompting, made)
        try:
            ran = await self._plans.plan_and_run(made, turn, budget)
        except ContextExceeded as error:
            made = await self._shortener.before_reply(made, error)
            ran = await self._plans.plan_and_run(made, turn, budget)
        return await self._end(turn, ran)

    async def _end(self, turn: Progress, ran: Ran) -> Remembered:
        """Remember the turn, and report to its reader how it ended."""
        remembered = await self._ending.remember(ran)
        if not turn.is_cancelled:  # whoever cancels wants nothing more computed
            remembered = await self._shortener.after_reply(remembered)
        await self._ending.finish(remembered, turn)
        return remembered

    # --- a turn that another engine began ---

    async def _go_on(self, turn: Progress, taken: TakenTurn) -> Remembered:
        """From the arrival of its KV on; the engine waits for `own` before it computes. Raises FailedPrecondition
        (HANDOVER_PARENT_DIFFERS) if the agent's newest version is not the one that the turn extends, or
        (HANDOVER_NOT_MOVED) if another store's turn is not about to come with its agent.
        """
        begun, request = taken.begun, turn.request
        if turn.is_guest:
            recollection, cursor = await self._lines.read(request), None
        else:
            recollection, cursor = await self._lines.parent(request, begun, self._parts.budget())
        turn.parent_version = recollection.version
        recalled = Recalled(
            request, recollection, begun.continuation, begun.prompt.messages, begun.shortened, event_cursor=cursor
        )
        made = await prompted(
            self._parts.prompting, recalled, (begun.prompt.template_time_ms, begun.prompt.tools_order)
        )
        if sum(begun.prompt.tokens.chars) != len(made.text):
            raise errors.InvalidArgument(
                f"opening.prompt_token_chars: the prompt has {len(made.text)} characters",
                field="opening.prompt_token_chars",
            )
        planned = self._taken_plan(replace(made, shortening=begun.shortening), taken)
        if turn.is_guest:  # the engine, too, lets turns of one agent wait for each other
            planned = replace(planned, plan=replace(planned.plan, key=None))
        return await self._end(turn, await self._plans.run(planned, turn))

    def _taken_plan(self, made: Prompted, taken: TakenTurn) -> Planned:
        begun = taken.begun
        prepared = Prepared(made.text, begun.prompt.tokens, Cold(), Source.COLD, Outcome.NONE, None, ())
        # Brought rows serve their own agent: what a peer says of them lends them to no other.
        carried = replace(taken.carried, shareable=0) if begun.is_brought else taken.carried
        plan = replace(
            self._plans.plan(made, prepared), carried=carried, rewind_point_tokens=begun.prompt.rewind_point_tokens
        )
        plan = replace(plan, sampling=replace(plan.sampling, max_tokens=begun.max_tokens))
        is_brought, is_text_own = begun.is_brought, begun.is_text_own
        return Planned(made, made.recalled.recollection, prepared, plan, is_brought=is_brought, is_text_own=is_text_own)

    async def own(self, turn: Progress) -> None:
        """The other engine has given a ready turn away: take its agent's line, and let it compute. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) if a third has the line, and FailedPrecondition (HANDOVER_PARENT_DIFFERS) if the line
        went on since the turn was prepared, or (HANDOVER_NOT_MOVED); the turn is over then.
        """
        assert turn.taken is not None
        self._early.pop(turn, None)
        began, has_other_store = self._parts.clock(), turn.taken.begun.has_other_store
        while True:
            try:
                await self._lines.take_over(turn, turn.taken.begun)
                break
            except errors.KvasirError as error:
                is_lost = error.reason in ("AGENT_HELD_ELSEWHERE", "HANDOVER_PARENT_DIFFERS", *MOVED)
                if not is_lost and not has_other_store:
                    break  # the store is away: its compare-and-swap decides at the end, as for its own engines' turns
                # Nobody else can go on with the turn; whether the agent came with it, only the store knows.
                may_wait = isinstance(error, errors.Unavailable) and self._parts.clock() - began < _STORE_AWAY_S
                if is_lost or turn.is_cancelled or not may_wait:
                    turn.cancel(error)
                    raise
                await asyncio.sleep(_STORE_PAUSE_S)
        if turn.phase is TurnPhase.HELD:
            turn.phase = TurnPhase.RUNNING
        if turn.handle is not None:
            turn.handle.release()

    # --- a turn that generates nothing ---

    async def _warm(
        self, turn: Progress, recollection: Recollection, cursor: EventCursor | None, budget: Budget
    ) -> None:
        """Make the agent's memory hot, or the request's prompt, and generate nothing."""
        request, memory = turn.request, recollection.memory
        turn.parent_version = recollection.version
        if (recollection.head is None and recollection.kv_from is not Source.HOT) or recollection.is_unread:
            why = recollection.miss.detail if recollection.miss else ""
            raise _not_warmed(request, "MEMORY_UNREADABLE", f"the agent's memory cannot be read now ({why})")
        if request.input != PromptInput(""):
            publication = memory.publication if memory is not None and request.namespace in self._parts.stores else None
            if publication is not None and not publication.is_safe:
                why = "the agent's memory is not stored yet, and the prompt would take its place"
                raise _not_warmed(request, "MEMORY_NOT_STORED", why)
            made = await prompted(self._parts.prompting, recalled_by(request, recollection, cursor))
        elif memory is None or not memory.transcript.token_ids:
            turn.emit(TurnStarted(0, 0, Source.COLD, Outcome.NONE, turn.parent_version, recollection.miss))
            turn.emit(Warmed(0, 0, turn.parent_version))
            return
        else:
            made = Prompted(Recalled(request, recollection, event_cursor=cursor), memory.transcript.text)
        self._ending.warmed(await self._plans.plan_and_run(made, turn, budget), turn)


def _end_early(turn: Progress, error: BaseException) -> None:
    """The last that the reader hears of a turn that leaves no memory."""
    if turn.taken is not None:
        turn.taken.failed(error)
    if turn.stopped == Stop(None) and isinstance(error, asyncio.CancelledError | errors.Cancelled):
        turn.emit(stopped(turn))
        turn.end()
    else:
        turn.end(turn.error or error)


def _not_warmed(request: TurnRequest, reason: str, why: str) -> errors.Unavailable:
    return errors.Unavailable(why, reason=reason, metadata={"agent_id": request.agent_id}, retry_after_s=1.0)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, errors.KvasirError) and not error.is_failure
