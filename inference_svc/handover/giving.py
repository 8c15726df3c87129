"""Gives the turns of one request away to another engine, between two tokens: full blocks ahead, then the tail and where
each stands. Once the other reports that it has all, this engine gives the lease back and commits. Until the commit
every failure means that the turns go on here; after it they are never computed here again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog
from kvasir.errors import Cancelled, DeadlineExceeded, FailedPrecondition, KvasirError, PermissionDenied, Unavailable
from kvasir.formats.layer_groups import keeps_all_tokens
from kvasir.waits import ANSWER_S, LOOK_S, SOON_S, WORK_S

from inference_svc.engine.api import HeldTurn, Timings
from inference_svc.engine.engine import Engine, told_text
from inference_svc.handover.passing import Opening, PeerLink, Promise, Stand, Surroundings
from inference_svc.memory.lines.line_lease import LineLease
from inference_svc.memory.lines.lines import Lines
from inference_svc.memory.outcomes import Source
from inference_svc.memory.publishing.copies import piece_blocks
from inference_svc.memory.store.answers import LEASE_TTL_S
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.turns.phases import BegunPrompt, BegunTurn
from inference_svc.turns.progress import Progress, TurnPhase, TurnTiming
from inference_svc.turns.turn_data import MessagesInput, TurnMoved
from inference_svc.turns.turn_service import TurnService

_LOG = structlog.get_logger(__name__)
_SEEDS = 1 << 64
# The agent's memory is in the peer's store but for its owner. A lease that cannot be given back ends by itself first.
_MOVE_S = LEASE_TTL_S + SOON_S

AnswerT = TypeVar("AnswerT")
Links = Callable[[str, str], contextlib.AbstractAsyncContextManager[PeerLink]]


@dataclass(slots=True)
class HandOverCost:
    request_id: str
    peer: str
    gap_s: float = 0.0
    ahead_bytes: int = 0
    tail_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TurnGiver:
    engine: Engine
    lines: Mapping[str, Lines]
    store_of: Callable[[str], str | None]
    """By the peer's name: its store, as this engine's store names it; None: both engines have one store."""
    links: Links  # By the peer's name and the namespace. Raises NotFound (PEER_UNKNOWN).
    version: str
    clock: Callable[[], float]
    new_move_id: Callable[[], str]

    async def give(self, turns: Sequence[Progress], peer: str) -> HandOverCost:
        """Give all turns of one request away; returns once they are the peer's. Raises FailedPrecondition
        (HANDOVER_NOT_NOW) and what the peer refuses: they go on here then. Raises Unavailable (HANDOVER_UNCERTAIN) if
        the link broke at the last word: they have ended here then, with that error.
        """
        speaking = [turn for turn in turns if not turn.phase.has_ended]
        if not speaking or not all(turn.can_move for turn in speaking):
            raise _not_now("the turn has not begun, is ending, or fills a window of masks (WeDLM)")
        if any(turn.phase is TurnPhase.MOVING for turn in speaking):
            raise _not_now("it is being given away already")
        # Two would release each other's hold: tokens after the one's last word would be computed in both engines.
        for turn in speaking:
            turn.phase = TurnPhase.MOVING
        try:
            return await self._give(speaking, peer)
        except PermissionDenied as error:
            if error.reason != "ROLE_REQUIRED":
                raise
            text = f"peer {peer}: it takes no turns from here; there `kvasir peers allow NAME --takes move` allows it"
            about = {"agent_id": turns[0].request.agent_id, "verb": "turn"}
            raise PermissionDenied(text, reason="PEER_MAY_NOT", metadata=about) from None
        finally:
            for turn in speaking:
                if turn.phase is TurnPhase.MOVING:
                    turn.phase = TurnPhase.RUNNING

    async def _give(self, speaking: Sequence[Progress], peer: str) -> HandOverCost:
        given = HandOverCost(speaking[0].request.request_id, peer)
        begun = await self._begun(speaking[0])
        giving = _HandOver(self, speaking, given)
        async with self.links(peer, speaking[0].request.namespace) as link:
            if self._other_store(speaking[0], peer) is not None:
                if begun.parent_manifest is None:
                    raise _not_now("it is its agent's first, whose store has nothing yet that could move")
                begun = replace(begun, move_id=self.new_move_id(), handed_over_by="")
            async with _within(WORK_S, "what goes ahead"):  # the turns go on meanwhile
                await self._copy_agent(speaking[0], peer)
                await link.open(self._opening(speaking, begun))
                await giving.send_ahead(link)
            try:
                async with _within(ANSWER_S, "the other engine"):  # the turns stand still meanwhile
                    promise = await giving.send_rest(link)
                await self._let_go(speaking[0], begun.move_id, peer)
                giving.check_wanted()
            except BaseException:
                self._take_back(speaking)
                raise
            await giving.commit(link, promise)
        given.gap_s = self.clock() - giving.held_s
        _LOG.info(
            "turn.given",
            request_id=given.request_id,
            peer=peer,
            gap_ms=round(given.gap_s * 1e3),
            ahead_bytes=given.ahead_bytes,
            tail_bytes=given.tail_bytes,
        )
        return given

    async def give_all(self, turns: TurnService, peer: str) -> None:
        """Give away every decoding request, later ones too, until cancelled. Others end here as always."""
        tried = set[Progress]()
        async with asyncio.TaskGroup() as giving:
            while True:
                for request in turns.under_way():
                    is_free = all(turn.can_move and turn.phase is not TurnPhase.MOVING for turn in request)
                    if request[0] not in tried and is_free:
                        tried.add(request[0])
                        giving.create_task(self._try(request, peer))
                await asyncio.sleep(LOOK_S)

    async def _try(self, turns: Sequence[Progress], peer: str) -> None:
        try:
            await self.give(turns, peer)
        except KvasirError as error:
            _LOG.warning("turn.not_given", request_id=turns[0].request.request_id, peer=peer, reason=error.reason)

    async def _begun(self, turn: Progress) -> BegunTurn:
        """Raises FailedPrecondition (HANDOVER_NOT_NOW) if the version that the turn extends is not in the store."""
        planned, request = turn.planned, turn.request
        assert planned is not None
        recalled, recollection = planned.recalled, planned.recollection
        head = recollection.head
        memory = recollection.memory if recollection.kv_from is Source.HOT else None
        if memory is not None and recalled.is_kept:
            publication = memory.publication
            if publication.is_running and publication.task is not None:
                await asyncio.wait({publication.task}, timeout=ANSWER_S)
            if not publication.standing.is_stored:
                raise _not_now("the version that the turn extends is not in the store")
            head = publication.standing.head
        return BegunTurn(
            seed=(request.sampling.seed - request.choice) % _SEEDS,
            max_tokens=planned.plan.sampling.max_tokens,
            prompt=BegunPrompt(
                planned.prepared.tokens,
                planned.plan.rewind_point_tokens,
                recalled.messages if isinstance(request.input, MessagesInput) else (),
                planned.prompted.clock.told_ms,
                planned.prompted.tools_order,
            ),
            parent_manifest=head.manifest if head is not None else None,
            is_brought=planned.has_brought_kv,
            is_text_own=planned.is_text_own and recollection.is_text_own,
            handed_over_by=planned.handed_over_by,
            continuation=recalled.continuation,
            shortened=recalled.shortened,
            shortening=planned.prompted.shortening,
            age_s=self.clock() - turn.times.arrived,
            first_token_s=turn.times.first_token_s,
        )

    def _opening(self, turns: Sequence[Progress], begun: BegunTurn) -> Opening:
        request = turns[0].request
        surroundings = Surroundings.of(self.engine, self.version)
        choices = tuple(turn.request.choice for turn in turns)
        return Opening(surroundings, request.origin.message, request.request_id, request.origin.caller, begun, choices)

    def stand(self, turn: Progress, held: HeldTurn) -> Stand:
        assert turn.planned is not None
        told = told_text(self.engine, turn.planned.plan, held.carried)
        carried = replace(held.carried, spent=_as_callers_count(turn.times, held.carried.spent))
        return Stand(turn.request.choice, carried, len(told), len(held.files))

    async def _let_go(self, turn: Progress, move_id: str, peer: str) -> None:
        """Give the agent's line back, for the other engine. After an error it is still here, as far as is known."""
        if (lease := self._lease_of(turn)) is None:
            return
        agent_id = turn.request.agent_id
        async with _within(_MOVE_S, "the store"):
            await lease.hand_on()
        if (other := self._other_store(turn, peer)) is None:
            return
        store, name = other
        try:
            async with _within(_MOVE_S, "the store"):
                await store.agents.move_agent(agent_id, name, move_id, _MOVE_S)
        except KvasirError:
            # The stores may have done it all the same: then the turn must go there too, or its memory is lost.
            if not await self._has_moved(store, agent_id, name, move_id):
                raise

    async def _has_moved(self, store: RemoteCache, agent_id: str, peer: str, move_id: str) -> bool:
        """Whether the agent is the peer's by this move, once one that is under way has ended."""
        try:
            async with _within(ANSWER_S, "the store"):
                while (has_moved := await store.agents.has_moved(agent_id, peer, move_id)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except KvasirError:
            return False
        return has_moved

    async def _copy_agent(self, turn: Progress, peer: str) -> None:
        """Bring the bytes of the version that the turn extends to the peer's store, if that is another one."""
        if (other := self._other_store(turn, peer)) is not None:
            store, name = other
            await store.agents.copy_agent(turn.request.agent_id, name, WORK_S)

    def _other_store(self, turn: Progress, peer: str) -> tuple[RemoteCache, str] | None:
        """This engine's store, and its name for the peer's; None if the turn leaves no memory, or both have one."""
        lines, name = self.lines.get(turn.request.namespace), self.store_of(peer)
        return (lines.store, name) if lines is not None and turn.is_kept and name is not None else None

    def _take_back(self, turns: Sequence[Progress]) -> None:
        for turn in turns:
            if turn.handle is not None:
                turn.handle.release()
        if (lease := self._lease_of(turns[0])) is not None:
            lease.request()

    def _lease_of(self, turn: Progress) -> LineLease | None:
        lines = self.lines.get(turn.request.namespace) if turn.is_kept else None
        return lines.line(turn.request.agent_id).lease if lines is not None else None


@dataclass(slots=True)
class _HandOver:
    giver: TurnGiver
    turns: Sequence[Progress]
    given: HandOverCost
    held_s: float = 0.0  # since then no token is computed
    _sent: dict[int, int] = field(default_factory=dict)  # by choice: blocks that went ahead

    async def send_ahead(self, link: PeerLink) -> None:
        if not keeps_all_tokens(self.giver.engine.model.kv_identity):
            return
        most = piece_blocks(self.giver.engine)
        for turn in self.turns:
            choice = turn.request.choice
            while (handle := turn.handle) is not None:
                files = await _answer(handle.full_blocks(self._sent.get(choice, 0), most)) or ()
                for data in files:
                    await link.send_file(choice, data)
                self._sent[choice] = self._sent.get(choice, 0) + len(files)
                self.given.ahead_bytes += sum(map(len, files))
                if len(files) < most:
                    break

    async def send_rest(self, link: PeerLink) -> Promise:
        """Hold the turns and send what is left; returns when the peer holds everything."""
        self.held_s = self.giver.clock()
        held = await self._all_held()
        for turn, each in zip(self.turns, held, strict=True):
            await link.send_stand(self.giver.stand(turn, each))
            for data in each.files:
                await link.send_file(turn.request.choice, data)
            self.given.tail_bytes += sum(map(len, each.files))
        promise = await link.prepared()
        self.check_wanted()
        return promise

    def check_wanted(self) -> None:
        """Raise Cancelled if a turn was cancelled meanwhile: nobody could cancel it at the peer."""
        if any(turn.is_cancelled or turn.phase.is_ending for turn in self.turns):
            raise Cancelled("the turn was cancelled")

    async def _all_held(self) -> list[HeldTurn]:
        holding = [asyncio.ensure_future(self._held(turn)) for turn in self.turns]
        try:
            return await asyncio.gather(*holding)
        except BaseException:
            # One that is held after the others were let go on would stand still for good.
            for each in holding:
                each.cancel()
            await asyncio.wait(holding)
            raise

    async def _held(self, turn: Progress) -> HeldTurn:
        give_up = self.giver.clock() + SOON_S
        while (handle := turn.handle) is not None and turn.can_move:
            held = await _answer(handle.hold(self._sent.get(turn.request.choice, 0)))
            if held is not None:
                return held
            if self.giver.clock() > give_up:
                break
            await asyncio.sleep(LOOK_S)  # a choice that waits for its room cannot be held yet
        raise _not_now("the turn ended meanwhile, or waits for room")

    async def commit(self, link: PeerLink, promise: Promise) -> None:
        """The last word. From here on the turns are not this engine's, even if the link breaks."""
        peer, end = self.given.peer, None
        for turn in self.turns:  # a cancel would end them here, and they would go on there
            turn.phase = TurnPhase.ENDING
        try:
            async with _within(ANSWER_S, "the other engine"):
                await link.commit()
        except BaseException as error:
            _LOG.warning("turn.given_uncertainly", request_id=self.given.request_id, peer=peer)
            end = Unavailable(
                f"the link to {peer!r} broke when the turn was given away: it continues there, or was lost; retry "
                "with the resume token or the same request_id to find out",
                reason="HANDOVER_UNCERTAIN",
                retry_after_s=1.0,
                metadata={"peer": peer, "resume_token": promise.resume_token},
            )
            raise end from error
        finally:
            heard = [turn for turn in self.turns if not turn.phase.has_ended]
            if end is None and heard:
                heard[-1].emit(TurnMoved(peer, promise.resume_token, promise.expires_s))
            for turn in self.turns:
                turn.end(end, phase=TurnPhase.MOVED)
                if turn.handle is not None:
                    turn.handle.give_away()
            if (key := self.turns[0].request.key) is not None and self.turns[0].is_kept:
                self.giver.engine.memories.drop(key)


def _as_callers_count(times: TurnTiming, spent: Timings) -> Timings:
    """With what the turn waited before the engine had it: the other engine does not know of that."""
    first_token_s = spent.first_token_s if times.first_token_s is None else times.first_token_s
    queue_s, restore_s = times.queue_s + spent.queue_s, times.restore_s + spent.restore_s
    return replace(spent, queue_s=queue_s, restore_s=restore_s, first_token_s=first_token_s)


@contextlib.asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from None


async def _answer(asked: "Future[AnswerT]") -> AnswerT:
    try:
        return await asyncio.wrap_future(asked)
    except asyncio.CancelledError:
        if asked.cancelled():
            raise Unavailable("the engine is shutting down") from None
        raise


def _not_now(why: str) -> FailedPrecondition:
    return FailedPrecondition(f"the turn stays here: {why}", reason="HANDOVER_NOT_NOW")
