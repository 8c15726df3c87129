"""Plans a turn and runs the plan on the engine; plans again where the memory that it reuses went away in between.

While a plan runs, it is lent what it needs: room, the block stream, the swap.
"""

import asyncio
from dataclasses import replace

import structlog
from kvasir import errors
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Cold, DamagedFile, Ended, Hot, HotMemoryGone, TurnPlan
from inference_svc.engine.context import check_fits
from inference_svc.engine.engine import TurnHandle
from inference_svc.memory.agent_memory import as_hot
from inference_svc.memory.outcomes import Miss, MissReason
from inference_svc.memory.publishing.block_stream import BlockStream
from inference_svc.memory.recall import Recollection
from inference_svc.memory.reuse_planning import NOTHING_REFUSED, Prepared
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.swap_store import SwapLimits, SwapStore, may_be_preempted
from inference_svc.text import conversation
from inference_svc.turns.agent_lines import AgentLines, MemoryMovedError
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.handoff import HandOff
from inference_svc.turns.turn_reporter import TurnReporter
from inference_svc.turns.turn_state import TakenTurn, TurnState, reply_reader

_LOG = structlog.get_logger(__name__)
# Of what fits behind a prompt, a reply that asked for more may take one of so many parts, or so many tokens.
_CLAMPED_PART, _LEAST_CLAMPED = 4, 512
# Between planning and running, hot memory may be dropped and a file may be refused: plan again this often.
_MAX_PLANS = 4


class PlanRunner:
    """Runs the plans of one engine's turns. Made on the event loop that will run it."""

    def __init__(self, parts: EngineParts, lines: AgentLines) -> None:
        self._parts = parts
        self._lines = lines
        self._handoff = HandOff(asyncio.get_running_loop())
        self._compiling = SharedRoom(1)

    async def plan_and_run(
        self, turn: TurnState, recollection: Recollection, text: str, budget: Budget
    ) -> tuple[Recollection, Prepared, Ended]:
        """Plan and run the turn; plan again when the memory that the plan reuses went away in between."""
        if turn.tokens is None:
            self._check_length(text, turn.request.input.name)
        avoid = NOTHING_REFUSED
        if (dialogue := turn.dialogue) is not None and self._parts.engine.model.has_rewind_points:
            template = self._parts.prompting.template_at(turn.clock, turn.request.template_settings)
            turn.rewind_point_chars = await self._parts.prompting.run(
                turn.request.namespace, lambda: conversation.lasting_chars(template, dialogue, text)
            )

        async def hold(size_bytes: int) -> None:
            restoring, namespace = self._parts.admission.restoring, turn.request.namespace
            await restoring.wait_for(namespace, size_bytes)
            turn.restoring.callback(restoring.give_back, namespace, size_bytes)

        for _ in range(_MAX_PLANS):
            try:
                prepared = await self._parts.planner.plan(
                    recollection,
                    text,
                    given=turn.tokens,
                    namespace=turn.request.namespace,
                    budget=budget,
                    hold=hold,
                    avoid=avoid,
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
                    self._parts.stores.get(turn.request.namespace), recollection.memory, prepared.reuse
                )
                is_lent = turn.key is not None and not turn.is_kept  # its rows are the memory's, which must stay hot
                plan = replace(self.plan(turn, prepared), can_be_preempted=may_wait and not is_lent)
                prepared, turn.recollection = replace(prepared, reuse=Cold()), recollection
                running = self.run(turn, prepared, plan)
                del plan  # what was read from the store is the engine's to drop
                prepared, ended = await running
                return recollection, prepared, ended
            except HotMemoryGone:
                if turn.key is None:
                    raise
                recollection = _same_version(recollection, await self._parts.recall.newest(turn.key, budget))
            except DamagedFile as refused:
                # The bytes have their digest and are still no valid file. The stored tokens are known, so the turn
                # computes them again from there on.
                avoid, what = avoid.also(refused)
                turn.damage = Miss(MissReason.BLOB_DAMAGED, f"{what} was refused")
                _LOG.warning("restore.refused", request_id=turn.request.request_id, what=what)
            finally:
                turn.restoring.close()
        raise moved_away()

    def _check_length(self, text: str, field: str) -> None:
        """Refuse an absurdly long prompt without tokenizing it."""
        fewest, context = self._parts.prompting.fewest_tokens(text), self._parts.engine.model.context_tokens
        check_fits(fewest, max_tokens=0, context_tokens=context, field=field, is_lower_bound=True)

    def plan(self, turn: TurnState, prepared: Prepared) -> TurnPlan:
        context, count = self._parts.engine.model.context_tokens, len(prepared.tokens.ids)
        if not count:
            name = turn.request.input.name
            raise errors.InvalidArgument(f"{name}: expected at least one token", field=name)
        sampling = turn.request.sampling
        if turn.request.clamps_max_tokens:
            fitting = self._parts.engine.most_new_tokens(count)
            sampling = replace(sampling, max_tokens=_clamped(sampling.max_tokens, fitting))
        check_fits(count, sampling.max_tokens, context, field=turn.request.input.name)
        if (most := turn.request.most_reasoning_tokens) is not None:
            sampling = replace(sampling, reasoning_limit=self._parts.prompting.reasoning_limit(most, prepared.text))
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
        if constraint is not None and not self._parts.engine.grammars.knows(namespace, constraint):
            # Other formats took its place while the turn waited. To compile one may take a second.
            async with self._compiling.held_for(namespace, 1):
                await asyncio.to_thread(self._parts.engine.grammars.compile, namespace, constraint)
        store, counters = self._parts.stores.get(namespace), self._parts.stats.of(namespace)
        is_sent = turn.is_kept and turn.key is not None and store is not None
        stream = self._stream(turn, plan, store, prepared) if is_sent and store is not None else None
        if turn.running.is_cancelled:
            raise errors.Cancelled("the turn was cancelled")
        needed_bytes = self._parts.engine.needed_bytes(plan)
        turn.reader = reply_reader(turn.request, self._parts.prompting, prepared.text)
        costs, clock = self._parts.planner.costs, self._parts.clock
        reporter = TurnReporter(turn, prepared, stream, counters, costs, self._handoff, clock)
        if turn.taken is not None:
            turn.reader.push(self._told(turn.taken, plan))  # its reader was told
        try:
            with self._parts.admission.kv(namespace, needed_bytes):
                turn.running.handle = self._parts.engine.submit(plan, reporter.listen)
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
        told = self._parts.engine.told_text(plan, taken.carried)
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
        stored, stall_timeout_s = prepared.stored_blocks, self._parts.limits.publish_timeout_s
        return BlockStream(self._parts.copies, turn.key, store, stored, stall_timeout_s, previous)

    def _swap_store(self, turn: TurnState, handle: TurnHandle, store: RemoteCache) -> SwapStore:
        limits = SwapLimits(
            write_stall_s=self._parts.limits.publish_timeout_s,
            read_budget_s=max(self._parts.limits.store_budget_s, self._parts.limits.swap_read_budget_s),
            min_bytes_per_s=self._parts.limits.store_min_bytes_per_s,
            renew_s=self._parts.limits.swap_renew_s,
            piece_files=self._parts.copies.piece_blocks,
        )
        namespace, copies, restoring = turn.request.namespace, self._parts.copies.held, self._parts.admission.restoring
        counters, clock = self._parts.stats.of(namespace), self._parts.clock
        return SwapStore(handle, store, namespace, copies, restoring, counters, limits, clock)


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
