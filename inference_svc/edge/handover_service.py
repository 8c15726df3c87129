"""Hand-overs on the wire: takes turns from other engines, whose readers read on through those engines, and gives turns
away at a caller's request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from kvasir.call_context import name_call
from kvasir.credentials import ADMIN, CLIENT, ENGINE, HANDOVER, Principal
from kvasir.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound
from kvasir.inference.v1 import handover_pb2 as pb
from kvasir.inference.v1 import handover_pb2_grpc
from kvasir.server.answers import written
from kvasir.server.interceptors import current_principal
from kvasir.server.operating.audit import current_deed
from kvasir.waits import SILENCE_S, WORK_S

from inference_svc.edge import handover_messages as wire
from inference_svc.edge.service import ServiceParts, check_serves, fit
from inference_svc.handover.giving import TurnGiver
from inference_svc.handover.pairings import peer_name
from inference_svc.handover.passing import Surroundings
from inference_svc.handover.taking import Taking
from inference_svc.served_model import ServedModel
from inference_svc.turns.progress import Progress

HANDOVER_SERVICE_NAME = "kvasir.inference.v1.HandOverService"
HANDOVER_ROLES: Mapping[str, frozenset[str]] = {
    **{f"/{HANDOVER_SERVICE_NAME}/{rpc}": frozenset({ENGINE, HANDOVER}) for rpc in ("TakeTurn", "ReadTurn", "EndTurn")},
    f"/{HANDOVER_SERVICE_NAME}/HandOverTurn": frozenset({CLIENT, ADMIN}),
}

# The other engine gives up before.
_RECEIVE_S = WORK_S + SILENCE_S

T = TypeVar("T")


class HandOverService(handover_pb2_grpc.HandOverServiceServicer):  # type: ignore[misc]
    def __init__(
        self,
        parts: ServiceParts,
        giver_of: Callable[[ServedModel], TurnGiver],
        max_prompt_bytes: int,
    ) -> None:
        self._parts = parts
        self._giver_of = giver_of
        self._max_prompt_bytes = max_prompt_bytes
        self._under_way: set[asyncio.Task[Any]] = set()
        self._read: dict[tuple[str, str], asyncio.Task[None]] = {}  # by the engine that reads, and the resume token

    async def TakeTurn(self, request_iterator: AsyncIterator[pb.TakeTurnRequest], context: Any) -> None:
        check_serves(self._parts.telling.is_stopping)
        parts, caller = aiter(request_iterator), current_principal()
        taking = await self._opened(await _next(parts, "opening"), caller)
        try:
            await context.write(pb.TakeTurnResponse(opened=pb.TurnOpened()))
            async with _in_time(_RECEIVE_S):  # a frame now and then would hold the room of its namespace's memories
                await _receive(parts, taking)
            async with _in_time():
                promise = await taking.prepare()
                await context.write(wire.write_promise(promise))
            await _next(parts, "commit")
            # From here on the turns are this engine's, whatever becomes of the link. Their reader need not wait for the
            # agent's lease to be on its way here.
            taking.own(promise)
            going_on = self._to_its_end(taking.go_on())
            await context.write(pb.TakeTurnResponse(taken=pb.TurnTaken()))
            await going_on
        finally:
            taking.close()

    async def _opened(self, message: pb.TakeTurnRequest, caller: Principal) -> Taking:
        current_deed().is_about(message.opening.request)
        opening = wire.read_opening(message.opening, _peer(caller))
        request = wire.read_request(opening, caller.namespace, self._max_prompt_bytes)
        served = self._parts.host.serving("")
        request = await fit(request, served, self._parts.formats)
        Surroundings.of(served.engine, self._giver_of(served).version).check_alike(opening.surroundings)
        room = self._parts.admission.restoring  # for the bytes of files that are not KV yet
        return Taking(served.turns, served.engine, room, self._parts.resumes, opening, request)

    async def HandOverTurn(self, request: pb.HandOverTurnRequest, context: Any) -> pb.HandOverTurnResponse:
        served = self._parts.host.serving("")
        turns = _named(request, served.turns.under_way(current_principal().namespace))
        # It goes on when the caller goes away: a turn that is half given away is nobody's.
        given = await self._to_its_end(self._giver_of(served).give(turns, request.peer))
        return written(pb.HandOverTurnResponse, given)

    async def ReadTurn(self, request: pb.ReadTurnRequest, context: Any) -> None:
        caller = current_principal()
        reply = self._parts.resumes.claim(request.resume_token, caller.namespace, request.caller, _peer(caller))
        name_call(reply.request_id)
        reader, key = _Reader(context), (caller.name, request.resume_token)
        telling = self._read[key] = asyncio.create_task(self._parts.telling.tell(reply, reader))
        telling.add_done_callback(lambda _: self._read.pop(key))
        try:
            await asyncio.shield(telling)
        except asyncio.CancelledError:
            # The engine that reads may be gone; EndTurn reports whether its reader is.
            reader.is_gone = True
            if telling.cancelled():
                raise Cancelled("the turn was ended") from None
            raise

    async def EndTurn(self, request: pb.EndTurnRequest, context: Any) -> pb.EndTurnResponse:
        caller, token = current_principal(), request.resume_token
        if (telling := self._read.get((caller.name, token))) is not None:
            telling.cancel()
        else:
            with contextlib.suppress(NotFound):
                self._parts.resumes.claim(token, caller.namespace, None, _peer(caller)).choices.cancel()
        return pb.EndTurnResponse()

    def _to_its_end(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        task = asyncio.create_task(work)
        self._under_way.add(task)  # else nothing may hold it once the caller is gone
        task.add_done_callback(self._under_way.discard)
        return asyncio.shield(task)


class _Reader:
    """The call of an engine that reads a turn; after its end the rest is left out, and the turn goes on."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.is_gone = False

    async def write(self, response: Any) -> None:
        if self.is_gone:
            return
        try:
            await self._context.write(response)
        except Exception:  # noqa: BLE001  whatever gRPC raises here, the call is over
            self.is_gone = True


def _peer(caller: Principal) -> str:
    """The engine's store, as this engine's store names it; empty: both have one store."""
    return "" if ENGINE in caller.roles else peer_name(caller)


async def _receive(parts: AsyncIterator[pb.TakeTurnRequest], taking: Taking) -> None:
    while not taking.is_whole:
        part = await _next(parts, "file", "stand")
        if part.HasField("stand"):
            taking.add_stand(wire.read_stand(part.stand, taking.prompt))
            continue
        file = wire.ArrivingFile(part.file)
        async with _in_time():
            await taking.hold(file.digest.size_bytes)
        while not file.is_whole:
            file.add((await _next(parts, "frame")).frame)
        taking.add_file(file.choice, file.data())


async def _next(parts: AsyncIterator[pb.TakeTurnRequest], *expected: str) -> pb.TakeTurnRequest:
    """Raises InvalidArgument for another part, or none; DeadlineExceeded for a peer that is silent."""
    async with _in_time():
        part = await anext(parts, None)
    kind = part.WhichOneof("part") if part is not None else None
    if part is None or kind not in expected:
        raise InvalidArgument.of("part", f"expected {' or '.join(expected)}, got {kind or 'nothing'}")
    return part


@contextlib.asynccontextmanager
async def _in_time(within_s: float | None = None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded for a step of a hand-over that takes too long; None: for a peer that is silent."""
    within_s = SILENCE_S if within_s is None else within_s
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the hand-over got no further for {within_s:g} s") from None


def _named(request: pb.HandOverTurnRequest, under_way: list[list[Progress]]) -> list[Progress]:
    by = request.WhichOneof("turn")
    if by is None:
        raise InvalidArgument.of("turn", "expected agent_id or request_id")
    name = getattr(request, by)
    for turns in under_way:
        if getattr(turns[0].request, by) == name and any(turn.is_running for turn in turns):
            return turns
    raise NotFound.of(by, f"no turn of {name!r} is decoding", reason="TURN_NOT_FOUND")
