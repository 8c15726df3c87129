"""Runs one plan of one turn on the engine, and lends it what it needs meanwhile: room, the block stream, the swap."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvasir import errors
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import AgentKey, Cold, Ended, TurnPlan
from inference_svc.engine.context import check_fits
from inference_svc.engine.engine import Engine, TurnHandle
from inference_svc.engine.reply_text import told_text
from inference_svc.memory.copies import Copies
from inference_svc.memory.publishing import BlockStream
from inference_svc.memory.remote_cache import RemoteCache
from inference_svc.memory.reuse_planning import Prepared
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.swap_store import SwapLimits, SwapStore
from inference_svc.model.prompting import Prompting
from inference_svc.turns.admission import Admission
from inference_svc.turns.handoff import HandOff
from inference_svc.turns.outbox import ReaderLimits
from inference_svc.turns.turn_reporter import TurnReporter
from inference_svc.turns.turn_state import TakenTurn, TurnState, reply_reader

_DEFAULT_MAX_TOKENS = 512


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
        copies: Copies,
        stores: Mapping[str, RemoteCache],
        limits: TurnLimits,
        admission: Admission,
        stats: ServiceStats,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._prompting = prompting
        self._copies = copies
        self._stores = stores
        self._limits = limits
        self._admission = admission
        self._stats = stats
        self._clock = clock
        self._handoff = HandOff(asyncio.get_running_loop())
        self._compiling = SharedRoom(1)

    def plan(self, turn: TurnState, prepared: Prepared) -> TurnPlan:
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

    async def run(self, turn: TurnState, prepared: Prepared, plan: TurnPlan) -> tuple[Prepared, Ended]:
        """What the turn truly began with, and its end."""
        namespace, constraint = turn.request.namespace, turn.request.sampling.constraint
        if constraint is not None and not self._engine.grammars.knows(namespace, constraint):
            # Other formats took its place while the turn waited. To compile one may take a second.
            async with self._compiling.held_for(namespace, 1):
                await asyncio.to_thread(self._engine.grammars.compile, namespace, constraint)
        store, counters = self._stores.get(namespace), self._stats.of(namespace)
        stream = self._stream(turn.key, store, prepared) if turn.is_kept and turn.key and store is not None else None
        if turn.running.is_cancelled:
            raise errors.Cancelled("the turn was cancelled")
        needed_bytes = self._engine.needed_bytes(plan)
        turn.reader = reply_reader(turn.request, self._prompting, prepared.text)
        reporter = TurnReporter(turn, prepared, stream, counters, self._handoff, self._clock)
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
        ends = frozenset((*self._engine.model.stop_token_ids, *plan.sampling.stop_token_ids))
        reply = taken.carried.token_ids[len(plan.token_ids) :]
        told = told_text(self._engine.token_text, plan.sampling, ends, reply)
        if len(told) != taken.told_chars:
            raise errors.InvalidArgument(
                f"stand.told_chars: these tokens tell {len(told)} characters, not {taken.told_chars}",
                field="stand.told_chars",
            )
        return told

    def _stream(self, key: AgentKey, store: RemoteCache, prepared: Prepared) -> BlockStream:
        timeout_s, stored = self._limits.publish_timeout_s, prepared.stored_blocks
        return BlockStream(self._engine, self._copies, key, store, stored, timeout_s)

    def _swap_store(self, turn: TurnState, handle: TurnHandle, store: RemoteCache) -> SwapStore:
        limits = SwapLimits(
            write_timeout_s=self._limits.publish_timeout_s,
            read_budget_s=max(self._limits.store_budget_s, self._limits.swap_read_budget_s),
            min_bytes_per_s=self._limits.store_min_bytes_per_s,
            renew_s=self._limits.swap_renew_s,
            piece_files=self._copies.piece_blocks,
        )
        namespace, copies, restoring = turn.request.namespace, self._copies.held, self._admission.restoring
        return SwapStore(handle, store, namespace, copies, restoring, self._stats.of(namespace), limits, self._clock)
