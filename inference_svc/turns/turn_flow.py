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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import structlog
from kvasir import errors
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Cold, Ended, TurnPlan
from inference_svc.engine.context import check_fits
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.memory.line_leases import LineLeases
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.publishing import BlockStream
from inference_svc.memory.recall import NOTHING_REMEMBERED, Prepared, Recall, Recollection
from inference_svc.memory.remote_cache import RemoteCache
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store_patience import Budget
from inference_svc.memory.swap_store import SwapLimits, SwapStore, may_be_preempted
from inference_svc.model.model_host import MemoriesLeft
from inference_svc.model.prompting import Prompting
from inference_svc.text import conversation
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns import replay
from inference_svc.turns.admission import Admission
from inference_svc.turns.choices import Choices
from inference_svc.turns.handoff import HandOff
from inference_svc.turns.outbox import Outbox, ReaderLimits
from inference_svc.turns.prompt_text import prompt_text
from inference_svc.turns.shortening import MemoryShortener, Serving
from inference_svc.turns.turn_data import (
    MessagesInput,
    OpenTurn,
    PromptInput,
    TokensInput,
    TurnFinished,
    TurnRequest,
    TurnStarted,
    Warmed,
)
from inference_svc.turns.turn_ending import TurnEnding
from inference_svc.turns.turn_reporter import TurnReporter
from inference_svc.turns.turn_state import (
    TurnState,
    TurnTask,
    as_its_agent_has_it,
    check_existing,
    check_parent,
    continuation,
    reply_reader,
    what_is_left_out,
    whole_conversation,
)

_LOG = structlog.get_logger(__name__)
_DEFAULT_MAX_TOKENS = 512
# Between planning and running, hot memory may be dropped and a file may be refused: plan again this often.
_MAX_PLANS = 4
# Meanwhile the agent may get a newer version: serve a turn from its beginning this often.
_MAX_SERVINGS = 4
# Another engine releases a line within milliseconds of the request, unless a turn of it still runs.
_LEASE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Bounds of what one turn costs others."""

    store_budget_s: float
    """Time without progress that a turn may lose to the store, in total."""
    store_min_bytes_per_s: float
    """A store that sends more slowly than this is slow, and its time counts."""
    publish_timeout_s: float
    swap_read_budget_s: float
    """Time without progress that a preempted turn may lose to the store while its files are read. Where
    `store_budget_s` is more, that holds.
    """
    swap_renew_s: float
    reader: ReaderLimits
    """How far a reader may fall behind its turn."""


class _MemoryMovedError(Exception):
    """The agent's newest version is no longer the one that the turn was planned on."""


class TurnService:
    """Runs turns over one engine."""

    def __init__(
        self,
        engine: Engine,
        prompting: Prompting,
        recall: Recall,
        ending: TurnEnding,
        stores: Mapping[str, RemoteCache],
        leases: Mapping[str, LineLeases],
        limits: TurnLimits,
        admission: Admission,
        stats: ServiceStats,
        clock: Callable[[], float],
    ) -> None:
        """Must be made on the event loop that will run it. All models that the service loads one after the other share
        `admission` and `stats`. `clock` gives seconds, monotonic.
        """
        self._engine = engine
        self._prompting = prompting
        self._recall = recall
        self._ending = ending
        self._stores = stores
        self._leases = leases
        self._limits = limits
        self._admission = admission
        self.stats = stats
        self._clock = clock
        self._handoff = HandOff(asyncio.get_running_loop())
        self._running: dict[asyncio.Task[None], TurnState] = {}
        self._order: dict[AgentKey, asyncio.Lock] = {}
        self._waiting: Counter[AgentKey] = Counter()
        self._counting = SharedRoom(1)
        self._compiling = SharedRoom(1)
        serving = Serving(
            newest=self._newest,
            plan_and_run=self._plan_and_run,
            counted=self._counted,
            budget=self._budget,
            outbox=lambda: Outbox(limits.reader, clock),
            clock=clock,
        )
        self._shortener = MemoryShortener(prompting, ending, serving, engine)

    def begin(self, request: TurnRequest) -> Choices:
        """Start a turn for each choice. Raises ResourceExhausted when too many turns wait or run, of all callers or of
        this one.
        """
        outbox = Outbox(self._limits.reader, self._clock, request.choices)
        return Choices(request, outbox, lambda choice: self._begin(choice, outbox))

    def _begin(self, request: TurnRequest, outbox: Outbox) -> TurnTask:
        place = contextlib.ExitStack()
        place.enter_context(self._admission.turn(request.namespace, request.caller, request.input_bytes))
        running = TurnTask(outbox, request.choice)
        turn = TurnState(request, running, arrived=self._clock())
        task = asyncio.create_task(self._run(turn))
        self._running[task] = turn
        task.add_done_callback(self._running.pop)
        task.add_done_callback(lambda _: place.close())
        return running

    @property
    def is_idle(self) -> bool:
        """Whether no turn waits or runs."""
        return not self._running

    async def drain(self, patience_s: float) -> None:
        """Wait for the running turns, end those that take longer, then wait for publications."""
        for turn in self._running.values():
            turn.running.end_work_behind()
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)
        for turn in list(self._running.values()):
            turn.running.end_work_behind()
            turn.running.cancel(
                errors.Unavailable("the model is going away", reason="SHUTTING_DOWN", retry_after_s=1.0)
            )
        if self._running:
            await asyncio.wait(set(self._running), timeout=patience_s)
        await self._ending.drain(patience_s)

    def open_turns(self, namespace: str) -> list[OpenTurn]:
        """The namespace's turns that wait or run, the oldest first."""
        now_s = self._clock()
        return [
            OpenTurn(
                turn.request.request_id,
                turn.request.agent_id,
                turn.request.choice,
                turn.has_begun,
                now_s - turn.arrived,
                turn.prompt_tokens,
                turn.cached_tokens,
                turn.completion_tokens,
            )
            for turn in self._running.values()
            if turn.request.namespace == namespace and not (turn.request.is_warming or turn.running.has_ended)
        ]

    async def stop(self, namespace: str, request_id: str) -> dict[int, TurnFinished]:
        """End a request's turns; by choice, how they ended. Raises NotFound if none is under way."""
        named = {
            task: turn
            for task, turn in self._running.items()
            if (turn.request.namespace, turn.request.request_id) == (namespace, request_id)
            and not turn.running.has_ended
        }
        if not named:
            raise errors.NotFound(
                f"request_id: no turn of {request_id!r} is under way",
                reason="TURN_NOT_FOUND",
                field="request_id",
                metadata={"request_id": request_id},
            )
        for turn in named.values():
            turn.running.stop()
        await asyncio.wait(named)
        ends = {turn.request.choice: turn.running.finished for turn in named.values()}
        return {choice: end for choice, end in ends.items() if end is not None}

    async def store_hot(self, patience_s: float) -> MemoriesLeft:
        """After `drain`: store the hot memories that are not in the store."""
        return await self._ending.store_hot(patience_s)

    async def count_tokens(self, request: TurnRequest) -> int:
        """Tokens of the prompt of a turn that finds no memory. Takes a turn's place: raises ResourceExhausted. Counts
        run one after the other, namespaces in turn. They use a copy of the tokenizer, so that no turn waits for them
        except while the first count makes that copy.
        """
        given = request.input
        messages = given.messages if isinstance(given, MessagesInput) else ()
        with self._admission.turn(request.namespace, request.caller, request.input_bytes):
            async with self._counting.held_for(request.namespace, 1):
                counter = await self._prompting.twin(request.namespace)
                text, _ = await prompt_text(counter, request, messages)
                return len((await counter.run(request.namespace, lambda: counter.tokenize(text))).ids)

    async def _run(self, turn: TurnState) -> None:
        request, running = turn.request, turn.running
        counters = self.stats.of(request.namespace)
        counters.turns += 1
        end = "failed"
        running.task = asyncio.current_task()
        try:
            with self._counted(turn):
                # A task that is cancelled before it begins would tell its reader no end.
                if running.is_cancelled:
                    raise errors.Cancelled("the turn was cancelled")
                async with self._in_order(request):
                    await self._prompting.read(request.namespace, request.objects)
                    turn.queue_s = self._clock() - turn.arrived
                    with self._using_lease(turn):
                        await self._serve(turn)
                        if turn.shorter is not None:
                            await self._shorten(turn)
        except asyncio.CancelledError:
            end = "finished" if running.has_ended else "cancelled"
            self._end_early(turn, errors.Cancelled("the turn was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - the reader must get an end whatever happens; the edge logs the error
            end = "cancelled" if running.is_cancelled else "refused" if _is_refusal(error) else end
            self._end_early(turn, error)
        else:
            end = "cancelled" if running.is_cancelled else "finished"
            running.end(running.ended_by)
        finally:
            counters.ends[end] += 1
            if end == "cancelled" and not turn.has_begun:  # else long waits would be missing where readers give up
                counters.times.queue.add(self._clock() - turn.arrived)

    @contextlib.contextmanager
    def _counted(self, turn: TurnState) -> Iterator[None]:
        """The turn counts as waiting until it begins, and then as running."""
        counters = self.stats.of(turn.request.namespace)
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
        budget = self._budget()
        for _ in range(_MAX_SERVINGS):
            try:
                return await self._serve_once(turn, budget)
            except _MemoryMovedError:
                turn.damage = None  # it belonged to the old memory
        raise _moved_away()

    def _budget(self) -> Budget:
        return Budget(self._limits.store_budget_s, self._limits.store_min_bytes_per_s, self._clock)

    async def _serve_once(self, turn: TurnState, budget: Budget) -> None:
        """Raises _MemoryMovedError when the turn has had no effect yet and must be served from its beginning."""
        request = turn.request
        recollection = await self._newest(turn, budget) if turn.key else NOTHING_REMEMBERED
        if request.is_warming:
            return await self._warm(turn, recollection, budget)
        memory = recollection.memory
        is_retry = memory is not None and not request.is_read_only and replay.is_retry(request, memory)
        if memory is not None and is_retry and replay.is_whole(memory) and recollection.kv_from is not Source.COLD:
            self.stats.of(request.namespace).sources[Source.REPLAY] += 1
            return await self._ending.replay(turn, recollection, memory)
        if not is_retry:
            check_parent(request, recollection)
        turn.parent_version = recollection.head.version if recollection.head is not None else 0
        if request.base_version is not None and turn.key is not None:
            recollection = await self._recall.with_base(turn.key, recollection, request.base_version, budget)
        if turn.key is not None:
            check_existing(request, recollection)
            request = turn.request = as_its_agent_has_it(request, recollection)
            turn.continuation = continuation(request, recollection)
        turn.shortened = what_is_left_out(turn.continuation, recollection)
        turn.messages = whole_conversation(request, recollection, is_retry=is_retry)
        text = await self._prompt(turn)
        try:
            ran = await self._plan_and_run(turn, recollection, text, budget)
        except errors.ResourceExhausted as error:
            if error.reason != "CONTEXT_EXCEEDED":
                raise
            text = await self._shortener.before_reply(turn, recollection, error)
            ran = await self._plan_and_run(turn, recollection, text, budget)
        memory = await self._ending.remember(turn, *ran)
        if memory is not None and not turn.running.is_cancelled:  # whoever cancels wants nothing more computed
            await self._shortener.after_reply(turn, recollection, memory)
        return await self._ending.finish(turn, *ran, memory)

    def _using_lease(self, turn: TurnState) -> contextlib.AbstractContextManager[None]:
        leases = self._leases_for(turn)
        return leases.using(turn.request.agent_id) if leases is not None else contextlib.nullcontext()

    def _leases_for(self, turn: TurnState) -> LineLeases | None:
        """The leases, for a turn that extends a line. One that only reads takes no other engine's."""
        if turn.key is None or turn.request.is_read_only:
            return None
        return self._leases.get(turn.key.namespace)

    async def _newest(self, turn: TurnState, budget: Budget) -> Recollection:
        """The agent's memory, and the right to extend it. Raises Unavailable (AGENT_HELD_ELSEWHERE) if another engine
        has that right: a turn that is computed all the same would lose against that engine.
        """
        assert turn.key is not None
        leases, agent_id = self._leases_for(turn), turn.request.agent_id
        if leases is not None:
            turn.event_cursor = turn.event_cursor or self._stores[turn.request.namespace].event_cursor
            leases.begin(agent_id)
        recollection = await self._recall.newest(turn.key, budget)
        if leases is not None and leases.is_elsewhere(agent_id) and recollection.head is not None:
            try:
                await leases.obtain(agent_id, _LEASE_WAIT_S)
            except errors.KvasirError as error:
                if error.reason == "AGENT_HELD_ELSEWHERE":
                    raise
            recollection = await self._recall.newest(turn.key, budget)
        return recollection

    def _check_line(self, turn: TurnState) -> None:
        """Raises _MemoryMovedError when another engine has taken the line since the memory was read: the store may
        report a lease later than a memory. Served again, the turn waits for the line, or is refused.
        """
        namespace, agent_id = turn.request.namespace, turn.request.agent_id
        leases = self._leases_for(turn)
        if leases is not None and leases.is_elsewhere(agent_id) and self._stores[namespace].is_reachable:
            raise _MemoryMovedError

    async def _warm(self, turn: TurnState, recollection: Recollection, budget: Budget) -> None:
        """Make the agent's memory hot, or the request's prompt, and generate nothing."""
        request, memory = turn.request, recollection.memory
        turn.parent_version = recollection.head.version if recollection.head is not None else 0
        if recollection.head is None and recollection.kv_from is not Source.HOT:
            raise errors.Unavailable(
                f"the agent's memory cannot be read now ({recollection.miss.detail if recollection.miss else ''})",
                reason="MEMORY_UNREADABLE",
                retry_after_s=1.0,
            )
        if request.input != PromptInput(""):
            publication = memory.publication if memory is not None and request.namespace in self._stores else None
            if publication is not None and not publication.is_safe:
                raise errors.Unavailable(
                    "the agent's memory is not stored yet, and the prompt would take its place",
                    reason="MEMORY_NOT_STORED",
                    retry_after_s=1.0,
                )
            request = turn.request = as_its_agent_has_it(request, recollection)
            turn.messages = whole_conversation(request, recollection, is_retry=False)
            text = await self._prompt(turn)
        elif memory is None or not memory.transcript.token_ids:
            miss = recollection.miss
            turn.running.tell(TurnStarted(0, 0, Source.COLD, Outcome.NONE, turn.parent_version, miss))
            turn.running.tell(Warmed(0, 0, turn.parent_version))
            return
        else:
            text = memory.transcript.text
        recollection, prepared, ended = await self._plan_and_run(turn, recollection, text, budget)
        self._ending.warmed(turn, recollection, prepared, ended)

    async def _prompt(self, turn: TurnState) -> str:
        """The prompt's text. Sets the tokens or the dialogue that belong to it."""
        request, given, prompting = turn.request, turn.request.input, self._prompting
        if isinstance(given, TokensInput):
            text, turn.tokens = await prompting.run(request.namespace, lambda: prompting.spelled(given.token_ids))
            return text
        text, turn.dialogue = await prompt_text(prompting, request, turn.messages)
        return text

    def _check_length(self, text: str, field: str) -> None:
        """Refuse an absurdly long prompt without tokenizing it."""
        fewest, context = self._prompting.fewest_tokens(text), self._engine.model.context_tokens
        check_fits(fewest, max_tokens=0, context_tokens=context, field=field, is_lower_bound=True)

    async def _plan_and_run(
        self, turn: TurnState, recollection: Recollection, text: str, budget: Budget
    ) -> tuple[Recollection, Prepared, Ended]:
        """Plan and run the turn; plan again when the memory that the plan reuses went away in between."""
        if turn.tokens is None:
            self._check_length(text, turn.request.input.name)
        usable_files: int | None = None
        usable_rewind_point: int | None = None
        usable_windows = True
        if (dialogue := turn.dialogue) is not None and self._engine.model.has_rewind_points:
            template = self._prompting.template
            turn.rewind_point_chars = await self._prompting.run(
                turn.request.namespace, lambda: conversation.lasting_chars(template, dialogue, text)
            )

        async def hold(size_bytes: int) -> None:
            restoring, namespace = self._admission.restoring, turn.request.namespace
            await restoring.wait_for(namespace, size_bytes)
            turn.restoring.callback(restoring.give_back, namespace, size_bytes)

        for _ in range(_MAX_PLANS):
            try:
                prepared = await self._recall.plan(
                    recollection,
                    text,
                    given=turn.tokens,
                    namespace=turn.request.namespace,
                    budget=budget,
                    hold=hold,
                    usable_files=usable_files,
                    usable_rewind_point=usable_rewind_point,
                    usable_windows=usable_windows,
                    generates=not turn.request.is_warming,
                )
                self._check_line(turn)
                if turn.spoken is not None:
                    prepared = replace(prepared, tokens=prepared.tokens + turn.spoken)
                if turn.damage is not None:
                    prepared = replace(prepared, miss=turn.damage)
                turn.restore_s = budget.spent_s
                may_wait = may_be_preempted(
                    self._stores.get(turn.request.namespace), recollection.memory, prepared.reuse
                )
                is_lent = turn.key is not None and not turn.is_kept  # its rows are the memory's, which must stay hot
                plan = replace(self._plan(turn, prepared), can_be_preempted=may_wait and not is_lent)
                prepared = replace(prepared, reuse=Cold())
                running = self._run_plan(turn, prepared, plan)
                del plan  # what was read from the store is the engine's to drop
                prepared, ended = await running
                return recollection, prepared, ended
            except errors.FailedPrecondition as error:
                if error.reason != "HOT_MEMORY_GONE" or turn.key is None:
                    raise
                recollection = _same_version(recollection, await self._recall.newest(turn.key, budget))
            except errors.DataLoss as error:
                # The bytes have their digest and are still no valid file. The stored tokens are known, so the turn
                # computes them again from there on.
                if point := error.metadata.get("state"):
                    usable_rewind_point, what = int(point) - 1, f"the state of {point} tokens"
                elif window := error.metadata.get("window"):
                    usable_windows, what = False, f"a tensor file of window {window}"
                else:
                    usable_files = int(error.metadata.get("blob", "0"))
                    what = f"tensor file {usable_files} of the memory"
                turn.damage = Miss(MissReason.BLOB_DAMAGED, f"{what} was refused")
                _LOG.warning("restore.refused", request_id=turn.request.request_id, what=what)
            finally:
                turn.restoring.close()
        raise _moved_away()

    async def _run_plan(self, turn: TurnState, prepared: Prepared, plan: TurnPlan) -> tuple[Prepared, Ended]:
        """What the turn truly began with, and its end."""
        namespace, constraint = turn.request.namespace, turn.request.sampling.constraint
        if constraint is not None and not self._engine.grammars.knows(namespace, constraint):
            # Other formats took its place while the turn waited. To compile one may take a second.
            async with self._compiling.held_for(namespace, 1):
                await asyncio.to_thread(self._engine.grammars.compile, namespace, constraint)
        store, counters = self._stores.get(namespace), self.stats.of(namespace)
        stream = self._stream(turn.key, store, prepared) if turn.is_kept and turn.key and store is not None else None
        if turn.running.is_cancelled:
            raise errors.Cancelled("the turn was cancelled")
        needed_bytes = self._engine.needed_bytes(plan)
        turn.reader = reply_reader(turn.request, self._prompting, prepared.text)
        reporter = TurnReporter(turn, prepared, stream, counters, self._handoff, self._clock)
        try:
            with self._admission.kv(namespace, needed_bytes):
                turn.running.handle = self._engine.submit(plan, reporter.listen)
                del plan
                if store is not None:
                    reporter.swap = self._swap_store(turn, turn.running.handle, store)
                ended = await reporter.ended
                return reporter.prepared, ended
        except BaseException:
            if turn.running.handle is not None:
                turn.running.handle.cancel()
            if stream is not None:
                stream.abandon()
            raise
        finally:
            turn.running.handle = None
            if reporter.swap is not None:
                reporter.swap.close()

    def _stream(self, key: AgentKey, store: RemoteCache, prepared: Prepared) -> BlockStream:
        timeout_s, stored = self._limits.publish_timeout_s, prepared.stored_blocks
        return BlockStream(self._engine, self._ending.copies, key, store, stored, timeout_s)

    def _swap_store(self, turn: TurnState, handle: TurnHandle, store: RemoteCache) -> SwapStore:
        limits = SwapLimits(
            write_timeout_s=self._limits.publish_timeout_s,
            read_budget_s=max(self._limits.store_budget_s, self._limits.swap_read_budget_s),
            min_bytes_per_s=self._limits.store_min_bytes_per_s,
            renew_s=self._limits.swap_renew_s,
            piece_files=self._ending.copies.piece_blocks,
        )
        namespace, copies, restoring = turn.request.namespace, self._ending.copies.held, self._admission.restoring
        return SwapStore(handle, store, namespace, copies, restoring, self.stats.of(namespace), limits, self._clock)

    def _plan(self, turn: TurnState, prepared: Prepared) -> TurnPlan:
        context, count = self._engine.model.context_tokens, len(prepared.tokens.ids)
        if not count:
            name = turn.request.input.name
            raise errors.InvalidArgument(f"{name}: expected at least one token", field=name)
        sampling = turn.request.sampling
        if turn.request.max_tokens_is_default:
            sampling = replace(sampling, max_tokens=max(1, min(_DEFAULT_MAX_TOKENS, context - count)))
        check_fits(count, sampling.max_tokens, context, field=turn.request.input.name)
        return TurnPlan(
            token_ids=prepared.tokens.ids,
            token_chars=prepared.tokens.chars,
            sampling=sampling,
            reuse=prepared.reuse,
            key=turn.key,
            is_remembered=turn.is_kept or turn.request.is_warming,
            keep_partial=turn.request.keep_partial and turn.is_kept,
            priority=turn.request.priority,
            namespace=turn.request.namespace,
            rewind_point_tokens=turn.rewind_point_tokens(prepared.tokens.chars),
        )


def _same_version(planned: Recollection, found: Recollection) -> Recollection:
    """The recollection `found`, if it has the version that the turn was planned on. Raises _MemoryMovedError otherwise:
    the turn's prompt was made from the planned version, and its parent was checked against that version.
    """
    if found.head is None:
        # The store cannot be asked now. The turn extends the planned version; compare-and-swap decides at the end.
        return replace(found, head=planned.head, base=planned.base)
    if planned.head is None or (found.head.version, found.head.manifest) != (
        planned.head.version,
        planned.head.manifest,
    ):
        raise _MemoryMovedError
    return replace(found, base=planned.base)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, errors.KvasirError) and not error.is_failure


def _moved_away() -> errors.Unavailable:
    return errors.Unavailable("the agent's memory went away while the turn was planned", retry_after_s=1.0)
