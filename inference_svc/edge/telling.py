"""Streams the events of replies to their readers, also the rest of one whose turn moved to another engine: this engine
reads it there and passes it on, so that readers need no address and no credential of a peer.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any

import structlog
from kvasir import errors
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.waits import ANSWER_S

from inference_svc.edge import messages
from inference_svc.edge.peer_links import Peers
from inference_svc.handover.resume_tokens import WaitingReply
from inference_svc.turns.turn_data import TurnMoved

_LOG = structlog.get_logger(__name__)


class Telling:
    """How this engine's replies reach their readers."""

    def __init__(self, peers: Peers, stall_s: float, is_stopping: Callable[[], bool]) -> None:
        """`stall_s`: how long a reader may take nothing."""
        self._peers = peers
        self._stall_s = stall_s
        self.is_stopping = is_stopping
        self._ending: set[asyncio.Task[None]] = set()

    async def tell(self, reply: WaitingReply, context: Any, followed: Collection[str] = ()) -> None:
        """The reply to its end. A move to a peer that is `followed`, or while this engine stops, ends it with Moved. A
        reader that leaves cancels the turns."""
        try:
            async with aclosing(reply.choices.events()) as events:
                async for choice, event in events:
                    if isinstance(event, TurnMoved) and event.peer not in followed and not self.is_stopping():
                        await self._pass_on(reply, event, context)
                    else:
                        told = messages.response(event, reply.request_id, reply.model, choice, reply.bytes_of)
                        await send(context, told, self._stall_s)
        except errors.Unavailable as error:
            moved = _uncertain(error)
            if moved is None or moved.peer in followed or self.is_stopping():
                raise
            await self._pass_on(reply, moved, context, error)
        finally:
            # A cancel, a deadline and a disconnect all end here, while the turn runs; at its end this does nothing.
            reply.choices.cancel()

    async def _pass_on(
        self, reply: WaitingReply, moved: TurnMoved, context: Any, lost: errors.Unavailable | None = None
    ) -> None:
        """The rest of a reply, from the peer. `lost`: what its reader gets if the turn never arrived there."""
        has_left = True
        try:
            async with aclosing(self._rest(reply, moved, lost)) as rest:
                async for event in rest:
                    await send(context, event, self._stall_s)
            has_left = False
        except errors.Unavailable:  # its reader has heard that it goes on there, and is remembered
            has_left = False
            raise
        finally:
            # A reader that left cancels its turn, as it would here. If this engine stops, the turn goes on there.
            if has_left and not self.is_stopping():
                ending = asyncio.create_task(self._end(reply, moved))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    async def _rest(
        self, reply: WaitingReply, moved: TurnMoved, lost: errors.Unavailable | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        try:
            client = await self._peers.client(moved.peer, reply.namespace)
            async with aclosing(client.read_turn(moved.resume_token, reply.caller)) as events:
                async for event in events:
                    if event.HasField("moved"):  # a name of the peer's own peers, which means nothing here
                        raise errors.Unavailable("the turn went on from there")
                    yield event
        except errors.KvasirError as error:
            if lost is not None and error.reason == "RESUME_TOKEN_UNKNOWN":
                raise lost from None  # the peer never heard that the turn is its own: asking again does it
            raise _of_peer(moved, error) from None

    async def _end(self, reply: WaitingReply, moved: TurnMoved) -> None:
        with contextlib.suppress(errors.KvasirError):  # the turn ends there at its own end
            client = await self._peers.client(moved.peer, reply.namespace)
            await client.end_turn(moved.resume_token, ANSWER_S)


def _uncertain(error: errors.Unavailable) -> TurnMoved | None:
    """Where a reply may go on that ended because the link broke when its turn was given away."""
    if error.reason != "HANDOVER_UNCERTAIN":
        return None
    return TurnMoved(error.metadata["peer"], error.metadata["resume_token"], 0.0)


def _of_peer(moved: TurnMoved, error: errors.KvasirError) -> errors.KvasirError:
    """What its reader hears of a peer's error: one between two engines names where the rest is."""
    between = (errors.Unavailable, errors.Unauthenticated, errors.PermissionDenied, errors.NotFound, errors.Internal)
    if not isinstance(error, between):
        return error
    _LOG.warning("turn.not_passed_on", peer=moved.peer, reason=error.reason)
    return errors.Unavailable(
        f"the turn went on to {moved.peer!r}, which remembers it; the rest cannot be read from there: {error.message}",
        reason="TURN_MOVED",
        metadata={"peer": moved.peer, "resume_token": moved.resume_token},
    )


async def send(context: Any, response: Any, stall_s: float) -> None:
    """Write a response. While its turn runs, the turn notices a reader that stops; after that, this function does."""
    try:
        async with asyncio.timeout(stall_s):
            await context.write(response)
    except TimeoutError:
        raise errors.DeadlineExceeded(f"nothing was taken for {stall_s:g} s", reason="READER_STALLED") from None
