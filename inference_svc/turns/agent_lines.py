"""The lines that an engine's turns extend: their newest versions, and the right to be the one that extends them."""

import asyncio
import contextlib
import time
from dataclasses import replace

from kvasir import errors

from inference_svc.memory.line_leases import MOVED, LineLeases
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import NOTHING_REMEMBERED, Recollection
from inference_svc.memory.store.answers import NEVER_MOVED, EventCursor, LastMove, StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.trust import LEASE_TTL_S, Version
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import BegunTurn, Planned, Progress
from inference_svc.turns.turn_data import Continuation, TurnRequest

# Another engine releases a line within milliseconds of the request, unless a turn of it still runs.
_LEASE_WAIT_S = 1.0
# One that has given a turn away has released the line before. If it could not, its lease ends by itself.
_HANDED_ON_WAIT_S = LEASE_TTL_S + 1.0
# The agent of a peer's turn comes within a tenth of a second, unless the peer keeps silent.
_ARRIVAL_WAIT_S = 1.0


class MemoryMovedError(Exception):
    """The agent's newest version is no longer the one that the turn was planned on."""


class AgentLines:
    """Asks for the turns of one engine. Each store, and its leases, is one namespace's."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def using(self, request: TurnRequest) -> contextlib.AbstractContextManager[None]:
        """No other engine gets the turn's line meanwhile."""
        leases = self._leases_for(request)
        return leases.using(request.agent_id) if leases is not None else contextlib.nullcontext()

    def _leases_for(self, request: TurnRequest) -> LineLeases | None:
        """The leases, for a turn that extends a line. One that only reads takes no other engine's."""
        if not request.agent_id or request.memory.is_read_only:
            return None
        return self._parts.leases.get(request.namespace)

    def event_cursor(self, request: TurnRequest) -> EventCursor | None:
        """The place in the store's history now, for a turn that extends a line."""
        return self._parts.stores[request.namespace].event_cursor if self._leases_for(request) is not None else None

    async def newest(self, request: TurnRequest, budget: Budget) -> Recollection:
        """The agent's memory, and the right to extend it. Raises Unavailable (AGENT_HELD_ELSEWHERE) if another engine
        has that right, and FailedPrecondition (AGENT_MOVED, AGENT_MOVING) if another store has: a turn that is computed
        all the same would lose against that engine.
        """
        key, leases = request.key, self._leases_for(request)
        if key is None:
            return NOTHING_REMEMBERED
        if leases is not None:
            leases.begin(key.agent_id)
        recollection = await self._parts.recall.newest(key, budget)
        if leases is not None and leases.is_elsewhere(key.agent_id) and recollection.head is not None:
            try:
                await leases.obtain(key.agent_id, _LEASE_WAIT_S)
            except errors.KvasirError as error:
                if error.reason in ("AGENT_HELD_ELSEWHERE", *MOVED):
                    raise
            recollection = await self._parts.recall.newest(key, budget)
        return recollection

    async def check(self, request: TurnRequest, budget: Budget) -> None:
        """Hear the store's answer about the line before anything is computed: it may come later than the memory. Raises
        MemoryMovedError when another engine or store has taken the line: served again, the turn waits for it, or is
        refused.
        """
        leases = self._leases_for(request)
        if leases is None:
            return
        with budget.spending():
            await leases.answered(request.agent_id, budget.remaining_s)
        if leases.is_elsewhere(request.agent_id) and self._parts.stores[request.namespace].is_reachable:
            raise MemoryMovedError

    async def parent(
        self, request: TurnRequest, begun: BegunTurn, budget: Budget
    ) -> tuple[Recollection, EventCursor | None]:
        """The version that a turn from another engine extends, as this engine's store has it, and the place in that
        store's history. Its memory is not read: the KV is here. Raises FailedPrecondition (HANDOVER_PARENT_DIFFERS,
        HANDOVER_NOT_MOVED) and Unavailable (MEMORY_UNREADABLE).
        """
        key = request.key
        if key is None:
            return NOTHING_REMEMBERED, None
        store = self._parts.stores.get(key.namespace)
        cursor = store.event_cursor if store is not None else None
        found = await self._parts.recall.newest(key, budget)
        if found.head is None:
            raise _unreadable(request, found.miss.detail if found.miss else "")
        if request.is_kept and begun.continuation is not Continuation.BRANCHED:
            if begun.has_other_store:  # the agent is here once the turn is: `take_over` checks it
                await self._check_may_come(request, begun)
            else:
                _check_extends(begun, found.head.identity)
        return Recollection(None, Source.COLD, found.head, settings=found.settings), cursor

    async def read(self, request: TurnRequest) -> Recollection:
        """The newest version, for a turn that extends none: a turn of the agent may run, so its hot memory is left
        alone. Raises Unavailable (MEMORY_UNREADABLE).
        """
        if request.key is None:
            return NOTHING_REMEMBERED
        return Recollection(None, Source.COLD, (await self._last_move(request)).newest)

    async def take_over(self, turn: Progress, begun: BegunTurn) -> None:
        """Another engine has given the turn away: take its line, once that engine lets it go. Raises Unavailable
        (AGENT_HELD_ELSEWHERE, MEMORY_UNREADABLE) and FailedPrecondition (HANDOVER_PARENT_DIFFERS, HANDOVER_NOT_MOVED).
        """
        assert turn.planned is not None
        if not turn.is_kept:
            return
        if begun.has_other_store:
            turn.planned = await self._moved(turn.planned, begun)
        if (leases := self._leases_for(turn.request)) is not None:
            lease = await leases.obtain(turn.request.agent_id, _HANDED_ON_WAIT_S)
            _check_extends(begun, lease.newest)
            turn.planned = _with_version(turn.planned, lease.newest)
            turn.parent_version = lease.newest.number

    async def is_coming(self, request: TurnRequest, begun: BegunTurn) -> bool:
        """Whether the agent of a peer's turn is here by the move that the turn names, or on its way. An agent that is
        not this store's may take a while to come. Raises Unavailable (MEMORY_UNREADABLE).
        """
        last = await self._last_move(request)
        if last.move_id != begun.move_id and not (last.is_owned and last.newest.version):
            await asyncio.sleep(_ARRIVAL_WAIT_S)
            last = await self._last_move(request)
        return last.move_id == begun.move_id

    async def _check_may_come(self, request: TurnRequest, begun: BegunTurn) -> None:
        """Refuse what the store could not take either, before this store's own turns of the agent wait for it."""
        last = await self._last_move(request)
        if not begun.move_id or begun.move_id == last.move_id:
            raise not_moved("no move is named, or one that is over")
        if begun.peer and last.is_owned and last.newest.version and last.given_by != begun.peer:
            raise not_moved("this store has an agent of that name")

    async def _moved(self, planned: Planned, begun: BegunTurn) -> Planned:
        """A peer's word counts for what it has just moved here, and for nothing else."""
        moved = await self._last_move(planned.request)
        has_come = moved.move_id == begun.move_id and moved.is_owned and moved.is_moved
        if not has_come or begun.peer not in ("", moved.given_by):
            raise not_moved(f"it came by another move, from {moved.given_by or 'nobody'}, or went on since")
        _check_extends(begun, moved.newest.identity)
        recollection = replace(planned.recollection, head=moved.newest, settings=moved.settings)
        return replace(planned, recollection=recollection, handed_over_by=moved.given_by)

    async def _last_move(self, request: TurnRequest) -> LastMove:
        """Raises Unavailable (MEMORY_UNREADABLE)."""
        if (store := self._parts.stores.get(request.namespace)) is None:
            return NEVER_MOVED
        try:
            return await store.last_move(request.agent_id, Budget(_HANDED_ON_WAIT_S, 1.0, time.monotonic))
        except StoreMiss as error:
            raise _unreadable(request, error.miss.detail) from error


def _unreadable(request: TurnRequest, why: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"the agent's newest version cannot be asked now ({why})",
        reason="MEMORY_UNREADABLE",
        metadata={"agent_id": request.agent_id},
        retry_after_s=1.0,
    )


def not_moved(why: str) -> errors.FailedPrecondition:
    return errors.FailedPrecondition(
        f"agent_id: a turn of another store comes with a move of its agent from the caller's store: {why}",
        reason="HANDOVER_NOT_MOVED",
        field="opening.move_id",
    )


def _check_extends(begun: BegunTurn, newest: Version) -> None:
    """Raise FailedPrecondition (HANDOVER_PARENT_DIFFERS) unless the agent's newest version is the one that a turn from
    another engine extends.
    """
    if newest.manifest != begun.parent_manifest:
        raise errors.FailedPrecondition(
            f"parent_manifest: the turn extends {begun.parent_manifest}, the agent's newest version here is "
            f"{newest.number}, {newest.manifest}",
            reason="HANDOVER_PARENT_DIFFERS",
            field="opening.parent_manifest",
        )


def _with_version(planned: Planned, newest: Version) -> Planned:
    """The version that a taken turn extends may have come, or got another number, since the turn was prepared."""
    found = planned.recollection
    if found.head is None:
        return planned
    head = replace(found.head, version=newest.number, manifest=newest.manifest)
    return replace(planned, recollection=replace(found, head=head))
