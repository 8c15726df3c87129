"""Turns that another engine began: planned with the KV that it sent, and with the agent's line once it gave that up."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvasir import errors
from kvasir.waits import HANGS_S, PAUSE_S

from inference_svc.engine.api import AgentKey, TurnPlan
from inference_svc.engine.engine import told_text
from inference_svc.memory.lines.line_lease import MOVED
from inference_svc.memory.outcomes import Source
from inference_svc.memory.recall import NOTHING_REMEMBERED, Recollection
from inference_svc.memory.reuse_plan import Once, Prepared
from inference_svc.memory.store.answers import LEASE_TTL_S, NEVER_MOVED, EventCursor, LastMove, StoreMiss, Version
from inference_svc.memory.store.patience import Budget
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.engine_parts import EngineParts
from inference_svc.turns.phases import BegunTurn, Planned, Prompted, Ran, Recalled
from inference_svc.turns.plan_running import PlanRunner
from inference_svc.turns.progress import Progress, TakenTurn, TurnPhase, is_guest
from inference_svc.turns.prompts.texts import prompted
from inference_svc.turns.turn_data import Continuation, TurnRequest

# An engine that has given a turn away has released the line before. If it could not, its lease ends by itself.
_HANDED_ON_WAIT_S = LEASE_TTL_S + 1.0


@dataclass(frozen=True, slots=True)
class _Early:
    key: AgentKey
    place: contextlib.AsyncExitStack  # in its agent's order; closed with the turn
    takes_place: Callable[[], contextlib.AbstractAsyncContextManager[None]]
    decided: asyncio.Future[None]  # once it has its place, or is over


class TakenTurns:
    def __init__(self, parts: EngineParts, plans: PlanRunner) -> None:
        self._parts = parts
        self._plans = plans
        self._early: dict[Progress, _Early] = {}

    @contextlib.contextmanager
    def before_arrival(
        self,
        turn: Progress,
        key: AgentKey,
        place: contextlib.AsyncExitStack,
        takes_place: Callable[[], contextlib.AbstractAsyncContextManager[None]],
    ) -> Iterator[None]:
        """While a peer's turn waits for its agent, or runs. Whether it is that agent's turn is decided by the move that
        brings the agent, and not by a peer's word: so until then neither the agent's own turns nor other peers' wait.
        """
        early = self._early[turn] = _Early(key, place, takes_place, asyncio.get_running_loop().create_future())
        try:
            yield
        finally:
            self._decided(turn, early)

    async def coming(self, key: AgentKey) -> list[asyncio.Future[None]]:
        """The ends of peers' turns whose agent has come, or is coming: any, while the store does not answer."""
        early = {turn: each for turn, each in self._early.items() if each.key == key}
        if not early:
            return []
        try:
            last = await self._last_move(next(iter(early)).request)
        except errors.Unavailable:
            return [each.decided for each in early.values()]
        return [each.decided for turn, each in early.items() if turn.taken and turn.taken.begun.move_id == last.move_id]

    async def _take_place(self, turn: Progress) -> None:
        if (early := self._early.get(turn)) is None:
            return
        try:
            async with asyncio.timeout(HANGS_S):  # that turn may itself wait for its room
                await early.place.enter_async_context(early.takes_place())
        except TimeoutError:
            raise _not_moved("an older turn of the agent does not end") from None
        if turn not in self._early:  # it ended meanwhile
            await early.place.aclose()
        self._decided(turn, early)

    def _decided(self, turn: Progress, early: _Early) -> None:
        self._early.pop(turn, None)
        if not early.decided.done():
            early.decided.set_result(None)

    async def run(self, turn: Progress, taken: TakenTurn) -> Ran:
        """From the arrival of its KV on; the engine waits for `own` before it computes. Raises FailedPrecondition
        (HANDOVER_PARENT_DIFFERS) if the agent's newest version is not the one that the turn extends, or
        (HANDOVER_NOT_MOVED) if another store's turn is not about to come with its agent.
        """
        begun, request = taken.begun, turn.request
        if is_guest(turn):
            recollection, cursor = await self._newest(request), None
        else:
            recollection, cursor = await self._parent(request, begun, self._parts.budget())
        turn.parent_version = recollection.version
        recalled = Recalled(
            request, recollection, begun.continuation, begun.prompt.messages, begun.shortened, event_cursor=cursor
        )
        made = await prompted(
            self._parts.prompting, recalled, (begun.prompt.template_time_ms, begun.prompt.tools_order)
        )
        if begun.prompt.tokens.chars.total != len(made.text):
            raise errors.InvalidArgument.of("opening.prompt_token_chars", f"the prompt has {len(made.text)} characters")
        planned = self._taken_plan(replace(made, shortening=begun.shortening), taken)
        if is_guest(turn):  # the engine, too, lets turns of one agent wait for each other
            planned = replace(planned, plan=replace(planned.plan, key=None))
        return await self._plans.run(planned, turn)

    def _taken_plan(self, made: Prompted, taken: TakenTurn) -> Planned:
        begun = taken.begun
        prepared = Prepared(made.text, begun.prompt.tokens, Once(None), Source.COLD, Outcome.NONE, None, ())
        # Brought rows serve their own agent: a peer's word gives them to no other.
        carried = replace(taken.carried, shareable=0) if begun.is_brought else taken.carried
        plan = self._plans.plan(made, prepared, begun.prompt.rewind_point_tokens)
        plan = replace(plan, carried=carried, sampling=replace(plan.sampling, max_tokens=begun.max_tokens))
        return Planned(
            made,
            made.recalled.recollection,
            prepared,
            plan,
            is_brought=begun.is_brought,
            is_text_own=begun.is_text_own,
            handed_over_by=begun.handed_over_by,
            begun_reply=self._begun_reply(plan, taken),
        )

    def _begun_reply(self, plan: TurnPlan, taken: TakenTurn) -> str:
        """The reply as far as the other engine has sent it. Raises InvalidArgument if it has sent another text."""
        told = told_text(self._parts.engine, plan, taken.carried)
        if len(told) != taken.told_chars:
            raise errors.InvalidArgument.of(
                "stand.told_chars", f"these tokens tell {len(told)} characters, not {taken.told_chars}"
            )
        return told

    async def own(self, turn: Progress) -> None:
        """The other engine has given a ready turn away: take its agent's line, and let it compute. Raises Unavailable
        (AGENT_HELD_ELSEWHERE) if a third has the line, and FailedPrecondition (HANDOVER_PARENT_DIFFERS) if the line
        went on since the turn was prepared, or (HANDOVER_NOT_MOVED); the turn is over then.
        """
        assert turn.taken is not None
        began, has_other_store = self._parts.clock(), turn.taken.begun.has_other_store
        while True:
            try:
                await self._take_line(turn, turn.taken.begun)
                break
            except errors.KvasirError as error:
                is_lost = error.reason in ("AGENT_HELD_ELSEWHERE", "HANDOVER_PARENT_DIFFERS", *MOVED)
                if not is_lost and not has_other_store:
                    break  # the store is away: its compare-and-swap decides at the end, as for its own engines' turns
                # Nobody else can go on with the turn; whether the agent came with it, only the store knows.
                may_wait = isinstance(error, errors.Unavailable) and self._parts.clock() - began < HANGS_S
                if is_lost or turn.is_cancelled or not may_wait:
                    turn.cancel(error)
                    raise
                await asyncio.sleep(PAUSE_S)
        if turn.phase is TurnPhase.HELD:
            turn.phase = TurnPhase.RUNNING
        if turn.handle is not None:
            turn.handle.release()

    async def _parent(
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
        cursor = store.events.cursor if store is not None else None
        found = await self._parts.recall.newest(key, budget)
        if found.head is None:
            raise _unreadable(request, found.miss.detail if found.miss else "")
        if request.is_kept and begun.continuation is not Continuation.BRANCHED:
            if begun.has_other_store:  # the agent is here once the turn is: `_take_line` checks it
                await self._check_may_come(request, begun)
            else:
                _check_extends(begun, found.head.identity)
        return Recollection(None, Source.COLD, found.head, settings=found.settings), cursor

    async def _newest(self, request: TurnRequest) -> Recollection:
        """The newest version, for a turn that extends none; the hot memory is left alone. Raises Unavailable."""
        if request.key is None:
            return NOTHING_REMEMBERED
        return Recollection(None, Source.COLD, (await self._last_move(request)).newest)

    async def _take_line(self, turn: Progress, begun: BegunTurn) -> None:
        """Take the line of a turn that was given away, once it is free. Raises Unavailable, FailedPrecondition."""
        assert turn.planned is not None
        if not turn.is_kept:
            return
        if begun.has_other_store:
            turn.planned = await self._moved(turn.planned, begun)
            await self._take_place(turn)
        if (line := self._parts.recall.line(turn.request.extended)) is not None:
            lease = await line.lease.obtain(_HANDED_ON_WAIT_S)
            _check_extends(begun, lease.newest)
            turn.planned = _with_version(turn.planned, lease.newest)
            turn.parent_version = lease.newest.number

    async def _check_may_come(self, request: TurnRequest, begun: BegunTurn) -> None:
        """Refuse what the store could not take either, before this store's own turns of the agent wait for it."""
        last = await self._last_move(request)
        if not begun.move_id or begun.move_id == last.move_id:
            raise _not_moved("no move is named, or one that is over")
        if begun.peer and last.is_owned and last.newest.version and last.brought_by != begun.peer:
            raise _not_moved("this store has an agent of that name")

    async def _moved(self, planned: Planned, begun: BegunTurn) -> Planned:
        """A peer's word counts for the agent that it has just moved here, and for nothing else."""
        moved = await self._last_move(planned.request)
        has_come = moved.move_id == begun.move_id and moved.is_owned and moved.given_by
        if not has_come or begun.peer not in ("", moved.given_by):
            raise _not_moved(f"it came by another move, from {moved.given_by or 'nobody'}, or went on since")
        _check_extends(begun, moved.newest.identity)
        recollection = replace(planned.recollection, head=moved.newest, settings=moved.settings)
        return replace(planned, recollection=recollection, handed_over_by=moved.given_by)

    async def _last_move(self, request: TurnRequest) -> LastMove:
        if (store := self._parts.stores.get(request.namespace)) is None:
            return NEVER_MOVED
        try:
            return await store.agents.last_move(request.agent_id, _HANDED_ON_WAIT_S)
        except StoreMiss as error:
            raise _unreadable(request, error.miss.detail) from error


def _unreadable(request: TurnRequest, why: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"the agent's newest version cannot be read now ({why})",
        reason="MEMORY_UNREADABLE",
        metadata={"agent_id": request.agent_id},
        retry_after_s=1.0,
    )


def _not_moved(why: str) -> errors.FailedPrecondition:
    return errors.FailedPrecondition(
        f"agent_id: a turn of another store comes with a move of its agent from the caller's store: {why}",
        reason="HANDOVER_NOT_MOVED",
        field="opening.move_id",
    )


def _check_extends(begun: BegunTurn, newest: Version) -> None:
    """Raise FailedPrecondition (HANDOVER_PARENT_DIFFERS) unless the turn extends the agent's newest version."""
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
