"""The lines that an engine's turns extend: their newest versions, and the right to be the one that extends them."""

import contextlib
import time
from dataclasses import replace

from kvasir import errors

from inference_svc.memory.line_leases import MOVED, LineLeases
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import NOTHING_REMEMBERED, Recollection
from inference_svc.memory.store.answers import EventCursor, StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.trust import LEASE_TTL_S, Version
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import BegunTurn, Planned, Progress
from inference_svc.turns.turn_data import TurnRequest

# Another engine releases a line within milliseconds of the request, unless a turn of it still runs.
_LEASE_WAIT_S = 1.0
# One that has given a turn away has released the line before. If it could not, its lease ends by itself.
_HANDED_ON_WAIT_S = LEASE_TTL_S + 1.0


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
        if not request.agent_id or request.is_read_only:
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
        store's history. Its memory is not read: the KV is here. Raises FailedPrecondition (HANDOVER_PARENT_DIFFERS) and
        Unavailable (MEMORY_UNREADABLE).
        """
        key = request.key
        if key is None:
            return NOTHING_REMEMBERED, None
        store = self._parts.stores.get(key.namespace)
        cursor = store.event_cursor if store is not None else None
        found = await self._parts.recall.newest(key, budget)
        if found.head is None:
            raise errors.Unavailable(
                f"the agent's newest version cannot be asked now ({found.miss.detail if found.miss else ''})",
                reason="MEMORY_UNREADABLE",
                metadata={"agent_id": key.agent_id},
                retry_after_s=1.0,
            )
        if request.is_kept and not begun.agent_moves:  # else it is here once the turn is: `take_over` checks it
            _check_extends(begun, found.head.identity)
        return Recollection(None, Source.COLD, found.head, settings=found.settings), cursor

    async def take_over(self, turn: Progress, begun: BegunTurn) -> None:
        """Another engine has given the turn away: take its line, once that engine lets it go. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) and FailedPrecondition (HANDOVER_PARENT_DIFFERS).
        """
        assert turn.planned is not None
        if (leases := self._leases_for(turn.request)) is not None:
            lease = await leases.obtain(turn.request.agent_id, _HANDED_ON_WAIT_S)
            if turn.is_kept:
                _check_extends(begun, lease.newest)
                turn.planned = _with_version(turn.planned, lease.newest)
                turn.parent_version = lease.newest.number
        if begun.agent_moves:  # a peer's word counts only for what it has just moved here
            has_moved = begun.is_text_own and await self._has_just_moved(turn.request)
            turn.planned = replace(turn.planned, is_text_own=has_moved)

    async def _has_just_moved(self, request: TurnRequest) -> bool:
        """Whether the agent's newest version here came by a move from its owner."""
        budget = Budget(_LEASE_WAIT_S, 1.0, time.monotonic)
        with contextlib.suppress(StoreMiss):
            heads = await self._parts.stores[request.namespace].heads(request.agent_id, "", budget)
            return heads is not None and heads.newest.is_moved
        return False


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
