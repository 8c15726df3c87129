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
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import structlog
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.engine.api import AgentKey, Cold, Ended
from inference_svc.engine.context import ContextExceeded
from inference_svc.memory.line_leases import MOVED
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import NOTHING_REMEMBERED, Recollection
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.store.patience import Budget
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.agent_lines import AgentLines, MemoryMovedError
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.plan_running import PlanRunner, moved_away
from inference_svc.turns.prompt_text import (
    drop_notes,
    find_difference,
    keep_values,
    order_tools,
    prompt_text,
    remembered_order,
    remembered_time_ms,
    with_note,
)
from inference_svc.turns.shortening import MemoryShortener, Serving
from inference_svc.turns.turn_data import (
    PromptInput,
    TokensInput,
    TurnRequest,
    TurnStarted,
    Warmed,
)
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_state import (
    TakenTurn,
    TurnState,
    as_its_agent_has_it,
    check_existing,
    check_parent,
    continuation,
    is_retry,
    is_whole,
    what_is_left_out,
    whole_conversation,
)

_LOG = structlog.get_logger(__name__)
# While a turn is planned, its agent may get a newer version: serve it from its beginning this often.
_MAX_SERVINGS = 4


class TurnFlow:
    """Serves the turns of one engine, each in a task of its own. Made on the event loop that will run it."""

    def __init__(self, parts: EngineParts, ending: TurnEnding) -> None:
        self._parts = parts
        self._ending = ending
        self._lines = AgentLines(parts)
        self._plans = PlanRunner(parts, self._lines)
        self._order: dict[AgentKey, asyncio.Lock] = {}
        self._waiting: Counter[AgentKey] = Counter()
        serving = Serving(self._lines.newest, self._plans.plan_and_run, self._counted)
        self._shortener = MemoryShortener(parts, ending, serving)

    async def run(self, turn: TurnState) -> None:
        """The turn from its arrival to its end. Its reader gets an end whatever happens."""
        request, running = turn.request, turn.running
        counters = self._parts.stats.of(request.namespace)
        counters.turns += 1
        end = "failed"
        running.task = asyncio.current_task()
        try:
            with self._counted(turn):
                # A task that is cancelled before it begins would tell its reader no end.
                if running.is_cancelled:
                    raise errors.Cancelled("the turn was cancelled")
                async with self._in_order(request):
                    await self._parts.prompting.read(request.namespace, request.objects)
                    if turn.taken is None:  # else the engine that began it has told how long it waited
                        turn.queue_s = self._parts.clock() - turn.arrived
                    with self._lines.using(turn):
                        await (self._serve(turn) if turn.taken is None else self._go_on(turn, turn.taken))
                        if turn.shorter is not None:
                            await self._shorten(turn)
        except asyncio.CancelledError:
            end = "finished" if running.has_ended else "cancelled"
            self._end_early(turn, errors.Cancelled("the turn was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - the reader must get an end whatever happens; the edge logs the error
            end = "cancelled" if running.is_cancelled else "refused" if _is_refusal(error) else end
            end = "moved" if turn.is_given else end
            self._end_early(turn, error)
        else:
            end = "cancelled" if running.is_cancelled else "finished"
            running.end(running.ended_by)
        finally:
            counters.ends[end] += 1
            if end == "cancelled" and not turn.has_begun:  # else long waits would be missing where readers give up
                counters.times.queue.add(self._parts.clock() - turn.arrived)

    @contextlib.contextmanager
    def _counted(self, turn: TurnState) -> Iterator[None]:
        """The turn counts as waiting until it begins, and then as running."""
        counters = self._parts.stats.of(turn.request.namespace)
        counters.waiting_turns += 1
        try:
            yield
        finally:
            if turn.has_begun:
                counters.running_turns -= 1
            else:
                counters.waiting_turns -= 1

    async def _shorten(self, turn: TurnState) -> None:
        """After the reader has the turn's end: the agent's next turn waits, its reader does not. Where it fails, or is
        ended (`end_work_behind`), the memory stays as it is, and the next turn leaves messages out.
        """
        turn.running.end(turn.running.ended_by)
        try:
            await self._shortener.shorten(turn)
        except Exception as error:  # noqa: BLE001 - nobody waits for it
            _LOG.warning("memory.not_shortened", request_id=turn.request.request_id, error=type(error).__name__)

    def _end_early(self, turn: TurnState, error: BaseException) -> None:
        """The last that the reader hears of a turn that leaves no memory."""
        running = turn.running
        if turn.taken is not None:
            turn.taken.failed(error)
        if running.is_stopped and isinstance(error, asyncio.CancelledError | errors.Cancelled):
            running.tell(self._ending.stopped(turn))
            running.end()
        else:
            running.end(running.ended_by or error)

    @contextlib.asynccontextmanager
    async def _in_order(self, request: TurnRequest) -> AsyncIterator[None]:
        """Turns of one agent run one after the other, in order of arrival; different agents' turns run in parallel."""
        if not request.agent_id:
            yield
            return
        key = AgentKey(request.namespace, request.agent_id)
        lock = self._order.setdefault(key, asyncio.Lock())
        self._waiting[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._order[key]

    # --- one turn ---

    async def _serve(self, turn: TurnState) -> None:
        budget = self._parts.budget()
        for _ in range(_MAX_SERVINGS):
            try:
                return await self._serve_once(turn, budget)
            except MemoryMovedError:
                turn.damage = None  # it belonged to the old memory
        raise moved_away()

    async def _serve_once(self, turn: TurnState, budget: Budget) -> None:
        """Raises MemoryMovedError when the turn has had no effect yet and must be served from its beginning."""
        request = turn.as_asked()
        recollection = await self._lines.newest(turn, budget) if turn.key else NOTHING_REMEMBERED
        if request.is_warming:
            return await self._warm(turn, recollection, budget)
        memory = recollection.memory
        is_again = memory is not None and not request.is_read_only and is_retry(request, memory)
        if memory is not None and is_again and is_whole(memory) and recollection.kv_from is not Source.COLD:
            self._parts.stats.of(request.namespace).sources[Source.REPLAY] += 1
            return await self._ending.replay(turn, recollection, memory)
        if not is_again:
            check_parent(request, recollection)
        turn.parent_version = recollection.head.version if recollection.head is not None else 0
        if request.base_version is not None and turn.key is not None:
            recollection = await self._parts.recall.with_base(turn.key, recollection, request.base_version, budget)
        if turn.key is not None:
            check_existing(request, recollection)
            request = turn.request = as_its_agent_has_it(request, recollection)
            turn.continuation = continuation(request, recollection)
            keep_values(turn, recollection)
        turn.shortened = what_is_left_out(turn, recollection)
        turn.messages = whole_conversation(turn.request, recollection, is_retry=is_again)
        text = await self._prompt(turn, remembered_time_ms(turn, recollection), remembered_order(turn, recollection))
        turn.difference = await find_difference(self._parts.prompting, turn, recollection, text)
        try:
            ran = await self._plans.plan_and_run(turn, recollection, text, budget)
        except ContextExceeded as error:
            text = await self._shortener.before_reply(turn, recollection, error)
            ran = await self._plans.plan_and_run(turn, recollection, text, budget)
        return await self._end(turn, *ran)

    async def _end(self, turn: TurnState, recollection: Recollection, prepared: Prepared, ended: Ended) -> None:
        """Remember the turn, and tell its reader how it ended."""
        memory = await self._ending.remember(turn, recollection, prepared, ended)
        if memory is not None and not turn.running.is_cancelled:  # whoever cancels wants nothing more computed
            await self._shortener.after_reply(turn, recollection, memory)
        await self._ending.finish(turn, recollection, prepared, ended, memory)

    # --- a turn that another engine began ---

    async def _go_on(self, turn: TurnState, taken: TakenTurn) -> None:
        """From the arrival of its KV on; the engine waits for `own` before it computes. Raises FailedPrecondition
        (HANDOVER_PARENT_DIFFERS) if the agent's newest version is not the one that the turn extends.
        """
        begun = taken.begun
        await self._lines.recall_parent(turn, begun, self._parts.budget())
        turn.messages, turn.continuation = begun.messages, begun.continuation
        turn.shortened, turn.shortening = begun.shortened, begun.shortening
        turn.is_brought = begun.is_brought
        text = await self._prompt(turn, begun.template_time_ms, begun.tools_order)
        if sum(begun.prompt.chars) != len(text):
            raise errors.InvalidArgument(
                f"opening.prompt_token_chars: the prompt has {len(text)} characters", field="opening.prompt_token_chars"
            )
        turn.is_text_own = begun.is_text_own
        prepared = Prepared(text, begun.prompt, Cold(), Source.COLD, Outcome.NONE, None, ())
        # Brought rows serve their own agent: what a peer says of them lends them to no other.
        carried = replace(taken.carried, shareable=0) if begun.is_brought else taken.carried
        plan = replace(self._plans.plan(turn, prepared), carried=carried, rewind_point_tokens=begun.rewind_point_tokens)
        plan = replace(plan, sampling=replace(plan.sampling, max_tokens=begun.max_tokens))
        prepared, ended = await self._plans.run(turn, prepared, plan)
        assert turn.recollection is not None
        await self._end(turn, turn.recollection, prepared, ended)

    async def own(self, turn: TurnState) -> None:
        """The other engine has given a ready turn away: take its agent's line, and let it compute. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) if a third has the line, and FailedPrecondition (HANDOVER_PARENT_DIFFERS) if the line
        went on since the turn was prepared; the turn is over then.
        """
        assert turn.taken is not None
        try:
            await self._lines.take_over(turn, turn.taken.begun)
        except errors.KvasirError as error:
            # If the store is away, its compare-and-swap decides at the end, as for any turn.
            if error.reason in ("AGENT_HELD_ELSEWHERE", "HANDOVER_PARENT_DIFFERS", *MOVED):
                turn.running.cancel(error)
                raise
        turn.taken.is_owned = True
        if turn.running.handle is not None:
            turn.running.handle.release()

    async def _warm(self, turn: TurnState, recollection: Recollection, budget: Budget) -> None:
        """Make the agent's memory hot, or the request's prompt, and generate nothing."""
        request, memory = turn.request, recollection.memory
        turn.parent_version = recollection.head.version if recollection.head is not None else 0
        if (recollection.head is None and recollection.kv_from is not Source.HOT) or recollection.is_unread:
            raise errors.Unavailable(
                f"the agent's memory cannot be read now ({recollection.miss.detail if recollection.miss else ''})",
                reason="MEMORY_UNREADABLE",
                metadata={"agent_id": request.agent_id},
                retry_after_s=1.0,
            )
        if request.input != PromptInput(""):
            publication = memory.publication if memory is not None and request.namespace in self._parts.stores else None
            if publication is not None and not publication.is_safe:
                raise errors.Unavailable(
                    "the agent's memory is not stored yet, and the prompt would take its place",
                    reason="MEMORY_NOT_STORED",
                    metadata={"agent_id": request.agent_id},
                    retry_after_s=1.0,
                )
            turn.request = as_its_agent_has_it(request, recollection)
            keep_values(turn, recollection)
            turn.messages = whole_conversation(turn.request, recollection, is_retry=False)
            text = await self._prompt(
                turn, remembered_time_ms(turn, recollection), remembered_order(turn, recollection)
            )
        elif memory is None or not memory.transcript.token_ids:
            miss = recollection.miss
            turn.running.tell(TurnStarted(0, 0, Source.COLD, Outcome.NONE, turn.parent_version, miss))
            turn.running.tell(Warmed(0, 0, turn.parent_version))
            return
        else:
            text = memory.transcript.text
        recollection, prepared, ended = await self._plans.plan_and_run(turn, recollection, text, budget)
        self._ending.warmed(turn, recollection, prepared, ended)

    async def _prompt(self, turn: TurnState, told_ms: int, order: manifest_pb2.ToolsOrder | None) -> str:
        """The prompt's text. Sets the tokens or the dialogue that belong to it, and the time that it tells, which is
        `told_ms` unless that is 0.
        """
        request, given, prompting = turn.request, turn.request.input, self._parts.prompting
        if isinstance(given, TokensInput):
            text, turn.tokens = await prompting.run(request.namespace, lambda: prompting.spelled(given.token_ids))
            return text
        turn.clock = prompting.clock(told_ms)
        await order_tools(prompting, turn, order)
        try:
            text, turn.dialogue = await prompt_text(prompting, turn.request, turn.messages, turn.clock)
        except errors.InvalidArgument:
            if not drop_notes(turn):
                raise
            turn.is_time_untold = True
            text, turn.dialogue = await prompt_text(prompting, turn.request, turn.messages, turn.clock)
        return await with_note(prompting, turn, text)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, errors.KvasirError) and not error.is_failure
