"""The lines that an engine's turns extend: their newest versions, and the right to be the one that extends them."""

import contextlib
import time
from dataclasses import replace

from kvasir import errors

from inference_svc.memory.line_leases import MOVED, LineLeases
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import NOTHING_REMEMBERED, Recollection
from inference_svc.memory.store.answers import StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.trust import LEASE_TTL_S, Version
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.turn_state import BegunTurn, TurnState

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

    def using(self, turn: TurnState) -> contextlib.AbstractContextManager[None]:
        """No other engine gets the turn's line meanwhile."""
        leases = self._leases_for(turn)
        return leases.using(turn.request.agent_id) if leases is not None else contextlib.nullcontext()

    def _leases_for(self, turn: TurnState) -> LineLeases | None:
        """The leases, for a turn that extends a line. One that only reads takes no other engine's."""
        if turn.key is None or turn.request.is_read_only:
            return None
        return self._parts.leases.get(turn.key.namespace)

    async def newest(self, turn: TurnState, budget: Budget) -> Recollection:
        """The agent's memory, and the right to extend it. Raises Unavailable (AGENT_HELD_ELSEWHERE) if another engine
        has that right, and FailedPrecondition (AGENT_MOVED, AGENT_MOVING) if another store has: a turn that is computed
        all the same would lose against that engine.
        """
        assert turn.key is not None
        leases, agent_id = self._leases_for(turn), turn.request.agent_id
        if leases is not None:
            turn.event_cursor = turn.event_cursor or self._parts.stores[turn.request.namespace].event_cursor
            leases.begin(agent_id)
        recollection = await self._parts.recall.newest(turn.key, budget)
        if leases is not None and leases.is_elsewhere(agent_id) and recollection.head is not None:
            try:
                await leases.obtain(agent_id, _LEASE_WAIT_S)
            except errors.KvasirError as error:
                if error.reason in ("AGENT_HELD_ELSEWHERE", *MOVED):
                    raise
            recollection = await self._parts.recall.newest(turn.key, budget)
        return recollection

    async def check(self, turn: TurnState, budget: Budget) -> None:
        """Hear the store's answer about the line before anything is computed: it may come later than the memory. Raises
        MemoryMovedError when another engine or store has taken the line: served again, the turn waits for it, or is
        refused.
        """
        namespace, agent_id = turn.request.namespace, turn.request.agent_id
        leases = self._leases_for(turn)
        if leases is None:
            return
        with budget.spending():
            await leases.answered(agent_id, budget.remaining_s)
        if leases.is_elsewhere(agent_id) and self._parts.stores[namespace].is_reachable:
            raise MemoryMovedError

    async def recall_parent(self, turn: TurnState, begun: BegunTurn, budget: Budget) -> None:
        """Find the version that a turn from another engine extends, as this engine's store has it. Its memory is not
        read: the KV is here. Raises FailedPrecondition (HANDOVER_PARENT_DIFFERS) and Unavailable (MEMORY_UNREADABLE).
        """
        if turn.key is None:
            turn.recollection = NOTHING_REMEMBERED
            return
        if (store := self._parts.stores.get(turn.key.namespace)) is not None:
            turn.event_cursor = store.event_cursor
        found = await self._parts.recall.newest(turn.key, budget)
        if found.head is None:
            raise errors.Unavailable(
                f"the agent's newest version cannot be asked now ({found.miss.detail if found.miss else ''})",
                reason="MEMORY_UNREADABLE",
                metadata={"agent_id": turn.key.agent_id},
                retry_after_s=1.0,
            )
        if not begun.agent_moves:  # else it is here once the turn is this engine's: `take_over` checks it
            _check_extends(turn, begun, found.head.identity)
        turn.recollection = Recollection(None, Source.COLD, found.head, settings=found.settings)
        turn.parent_version = found.head.version

    async def take_over(self, turn: TurnState, begun: BegunTurn) -> None:
        """Another engine has given the turn away: take its line, once that engine lets it go. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) and FailedPrecondition (HANDOVER_PARENT_DIFFERS).
        """
        if (leases := self._leases_for(turn)) is not None:
            lease = await leases.obtain(turn.request.agent_id, _HANDED_ON_WAIT_S)
            _check_extends(turn, begun, lease.newest)
            _learn_version(turn, lease.newest)
        if begun.agent_moves:  # a peer's word counts only for what it has just moved here
            turn.is_text_own = begun.is_text_own and await self._has_just_moved(turn)

    async def _has_just_moved(self, turn: TurnState) -> bool:
        """Whether the agent's newest version here came by a move from its owner."""
        budget = Budget(_LEASE_WAIT_S, 1.0, time.monotonic)
        with contextlib.suppress(StoreMiss):
            heads = await self._parts.stores[turn.request.namespace].heads(turn.request.agent_id, "", budget)
            return heads is not None and heads.newest.is_moved
        return False


def _check_extends(turn: TurnState, begun: BegunTurn, newest: Version) -> None:
    """Raise FailedPrecondition (HANDOVER_PARENT_DIFFERS) unless the agent's newest version is the one that a turn from
    another engine extends.
    """
    if turn.is_kept and newest.manifest != begun.parent_manifest:
        raise errors.FailedPrecondition(
            f"parent_manifest: the turn extends {begun.parent_manifest}, the agent's newest version here is "
            f"{newest.number}, {newest.manifest}",
            reason="HANDOVER_PARENT_DIFFERS",
            field="opening.parent_manifest",
        )


def _learn_version(turn: TurnState, newest: Version) -> None:
    """The version that a taken turn extends may have come, or got another number, since the turn was prepared."""
    found = turn.recollection
    if turn.is_kept and found is not None and found.head is not None:
        turn.recollection = replace(found, head=replace(found.head, version=newest.number, manifest=newest.manifest))
        turn.parent_version = newest.number
