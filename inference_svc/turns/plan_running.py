"""Plans a turn and runs the plan on the engine; plans again where the memory that it reuses went away in between.

While a plan runs, it is lent what it needs: room, the block stream, the swap.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog
from kvasir import errors
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Cold, Ended, Hot, TurnPlan
from inference_svc.engine.context import check_fits
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.memory.agent_memory import as_hot
from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.recall import Recall, Recollection
from inference_svc.memory.reuse_planning import Prepared, ReusePlanner
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.swap_store import SwapLimits, SwapStore, may_be_preempted
from inference_svc.model.prompting import Prompting
from inference_svc.text import conversation
from inference_svc.turns.admission import Admission
from inference_svc.turns.agent_lines import AgentLines, MemoryMovedError
from inference_svc.turns.handoff import HandOff
from inference_svc.turns.outbox import ReaderLimits
from inference_svc.turns.turn_reporter import TurnReporter
from inference_svc.turns.turn_state import TakenTurn, TurnState, reply_reader

_LOG = structlog.get_logger(__name__)
# Of what fits behind a prompt, a reply that asked for more may take one of so many parts, or so many tokens.
_CLAMPED_PART, _LEAST_CLAMPED = 4, 512
# Between planning and running, hot memory may be dropped and a file may be refused: plan again this often.
_MAX_PLANS = 4


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


class PlanRunner:
    """Runs the plans of one engine's turns. Made on the event loop that will run it."""

    def __init__(
        self,
        engine: Engine,
        prompting: Prompting,
        recall: Recall,
        planner: ReusePlanner,
        lines: AgentLines,
        copies: Copies,
        stores: Mapping[str, RemoteCache],
        limits: TurnLimits,
        admission: Admission,
        stats: ServiceStats,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._prompting = prompting
        self._recall = recall
        self._planner = planner
        self._lines = lines
        self._copies = copies
        self._stores = stores
        self._limits = limits
        self._admission = admission
        self._stats = stats
        self._clock = clock
        self._handoff = HandOff(asyncio.get_running_loop())
        self._compiling = SharedRoom(1)

    async def plan_and_run(
        self, turn: TurnState, recollection: Recollection, text: str, budget: Budget
    ) -> tuple[Recollection, Prepared, Ended]:
        """Plan and run the turn; plan again when the memory that the plan reuses went away in between."""
        if turn.tokens is None:
            self._check_length(text, turn.request.input.name)
        usable_files: int | None = None
        usable_rewind_point: int | None = None
        usable_windows = True
        if (dialogue := turn.dialogue) is not None and self._engine.model.has_rewind_points:
            template = self._prompting.template_at(turn.clock, turn.request.template_settings)
            turn.rewind_point_chars = await self._prompting.run(
                turn.request.namespace, lambda: conversation.lasting_chars(template, dialogue, text)
            )

        async def hold(size_bytes: int) -> None:
            restoring, namespace = self._admission.restoring, turn.request.namespace
            await restoring.wait_for(namespace, size_bytes)
            turn.restoring.callback(restoring.give_back, namespace, size_bytes)

        for _ in range(_MAX_PLANS):
            try:
                prepared = await self._planner.plan(
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
                turn.restoring.callback(prepared.stop_reading)
                await self._lines.check(turn, budget)
                if turn.spoken is not None:
                    prepared = replace(prepared, tokens=prepared.tokens + turn.spoken)
                if turn.damage is not None:
                    prepared = replace(prepared, miss=turn.damage)
                turn.restore_s = budget.spent_s
                may_wait = may_be_preempted(
                    self._stores.get(turn.request.namespace), recollection.memory, prepared.reuse
                )
                is_lent = turn.key is not None and not turn.is_kept  # its rows are the memory's, which must stay hot
                plan = replace(self.plan(turn, prepared), can_be_preempted=may_wait and not is_lent)
                prepared, turn.recollection = replace(prepared, reuse=Cold()), recollection
                running = self.run(turn, prepared, plan)
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
        raise moved_away()

    def _check_length(self, text: str, field: str) -> None:
        """Refuse an absurdly long prompt without tokenizing it."""
        fewest, context = self._prompting.fewest_tokens(text), self._engine.model.context_tokens
        check_fits(fewest, max_tokens=0, context_tokens=context, field=field, is_lower_bound=True)

    def plan(self, turn: TurnState, prepared: Prepared) -> TurnPlan:
        context, count = self._engine.model.context_tokens, len(prepared.tokens.ids)
        if not count:
            name = turn.request.input.name
            raise errors.InvalidArgument(f"{name}: expected at least one token", field=name)
        sampling = turn.request.sampling
        if turn.request.clamps_max_tokens:
            sampling = replace(sampling, max_tokens=_clamped(sampling.max_tokens, self._engine.most_new_tokens(count)))
        check_fits(count, sampling.max_tokens, context, field=turn.request.input.name)
        if (most := turn.request.most_reasoning_tokens) is not None:
            sampling = replace(sampling, reasoning_limit=self._prompting.reasoning_limit(most, prepared.text))
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

    async def run(self, turn: TurnState, prepared: Prepared, plan: TurnPlan) -> tuple[Prepared, Ended]:
        """What the turn truly began with, and its end."""
        namespace, constraint = turn.request.namespace, turn.request.sampling.constraint
        if constraint is not None and not self._engine.grammars.knows(namespace, constraint):
            # Other formats took its place while the turn waited. To compile one may take a second.
            async with self._compiling.held_for(namespace, 1):
                await asyncio.to_thread(self._engine.grammars.compile, namespace, constraint)
        store, counters = self._stores.get(namespace), self._stats.of(namespace)
        is_sent = turn.is_kept and turn.key is not None and store is not None
        stream = self._stream(turn, plan, store, prepared) if is_sent and store is not None else None
        if turn.running.is_cancelled:
            raise errors.Cancelled("the turn was cancelled")
        needed_bytes = self._engine.needed_bytes(plan)
        turn.reader = reply_reader(turn.request, self._prompting, prepared.text)
        reporter = TurnReporter(turn, prepared, stream, counters, self._planner.costs, self._handoff, self._clock)
        if turn.taken is not None:
            turn.reader.push(self._told(turn.taken, plan))  # its reader was told
        try:
            with self._admission.kv(namespace, needed_bytes):
                turn.running.handle = self._engine.submit(plan, reporter.listen)
                turn.plan = replace(plan, reuse=Cold(), carried=None)
                del plan
                if turn.taken is not None:
                    reporter.swap, turn.taken.handle = turn.taken, turn.running.handle
                elif store is not None:
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

    def _told(self, taken: TakenTurn, plan: TurnPlan) -> str:
        """The reply as far as the other engine has sent it. Raises InvalidArgument if it has sent another text."""
        told = self._engine.told_text(plan, taken.carried)
        if len(told) != taken.told_chars:
            raise errors.InvalidArgument(
                f"stand.told_chars: these tokens tell {len(told)} characters, not {taken.told_chars}",
                field="stand.told_chars",
            )
        return told

    def _stream(self, turn: TurnState, plan: TurnPlan, store: RemoteCache, prepared: Prepared) -> BlockStream:
        assert turn.key is not None
        known = turn.recollection.memory if turn.recollection is not None else None
        previous = as_hot(known).publication if known is not None and isinstance(plan.reuse, Hot) else None
        stored, stall_timeout_s = prepared.stored_blocks, self._limits.publish_timeout_s
        return BlockStream(self._copies, turn.key, store, stored, stall_timeout_s, previous)

    def _swap_store(self, turn: TurnState, handle: TurnHandle, store: RemoteCache) -> SwapStore:
        limits = SwapLimits(
            write_stall_s=self._limits.publish_timeout_s,
            read_budget_s=max(self._limits.store_budget_s, self._limits.swap_read_budget_s),
            min_bytes_per_s=self._limits.store_min_bytes_per_s,
            renew_s=self._limits.swap_renew_s,
            piece_files=self._copies.piece_blocks,
        )
        namespace, copies, restoring = turn.request.namespace, self._copies.held, self._admission.restoring
        return SwapStore(handle, store, namespace, copies, restoring, self._stats.of(namespace), limits, self._clock)


def _same_version(planned: Recollection, found: Recollection) -> Recollection:
    """The recollection `found`, if it has the version that the turn was planned on. Raises MemoryMovedError otherwise:
    the turn's prompt was made from the planned version, and its parent was checked against that version.
    """
    if found.head is None:
        # The store cannot be asked now. The turn extends the planned version, or what the planned memory has become
        # since: while that is on its way, it is asked for when the turn is stored. Compare-and-swap decides at the end.
        head, publication = planned.head, planned.memory.publication if planned.memory is not None else None
        if publication is not None and (publication.is_being_published or publication.is_head):
            head = None if publication.is_being_published else publication.head
        return replace(found, head=head, base=planned.base)
    if planned.head is None or (found.head.version, found.head.manifest) != (
        planned.head.version,
        planned.head.manifest,
    ):
        raise MemoryMovedError
    return replace(found, base=planned.base)


def moved_away() -> errors.Unavailable:
    return errors.Unavailable("the agent's memory went away while the turn was planned", retry_after_s=1.0)


def _clamped(max_tokens: int, fitting: int) -> int:
    """The length of a reply that may be shorter than was asked for. All of it is reserved: clients that ask for more
    than there is would each take all KV from others.
    """
    if max_tokens <= fitting:
        return max_tokens
    return max(fitting // _CLAMPED_PART, min(fitting, _LEAST_CLAMPED), 1)
