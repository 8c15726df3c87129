"""The RPCs that another store calls while an agent moves: the source's side of a move, and news of an agent's owner."""

from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.names import check_agent_id
from kvasir.server.interceptors import current_principal

from cachestore_svc.edge import messages
from cachestore_svc.edge.store_calls import caller_namespace
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.peering.peers import Peers


class MovingService(cachestore_pb2_grpc.MovingServiceServicer):
    """Calls of peers. The peer that is meant is the caller. On one event loop."""

    def __init__(self, handing_over: HandingOver, peers: Peers) -> None:
        self._handing_over = handing_over
        self._peers = peers

    async def OfferAgent(self, request: pb.OfferAgentRequest, context: Any) -> pb.OfferAgentResponse:
        agent, known = await self._handing_over.offer(
            caller_namespace(),
            check_agent_id(request.agent_id),
            self._peer(),
            messages.read_move_id(request.move_id),
            messages.read_generation(request.generation),
            context.time_remaining(),
        )
        return pb.OfferAgentResponse(agent=messages.write_agent(agent), generation=known.generation)

    async def HandOverAgent(self, request: pb.HandOverAgentRequest, context: Any) -> pb.HandOverAgentResponse:
        agent_id, move_id = check_agent_id(request.agent_id), messages.read_move_id(request.move_id)
        generation = messages.read_generation(request.generation, least=1)
        await self._handing_over.hand_over(caller_namespace(), agent_id, self._peer(), move_id, generation)
        return pb.HandOverAgentResponse()

    async def UndoMove(self, request: pb.UndoMoveRequest, context: Any) -> pb.UndoMoveResponse:
        agent_id, move_id = check_agent_id(request.agent_id), messages.read_move_id(request.move_id)
        await self._handing_over.undo(caller_namespace(), agent_id, self._peer(), move_id)
        return pb.UndoMoveResponse()

    async def FenceAgent(self, request: pb.FenceAgentRequest, context: Any) -> pb.FenceAgentResponse:
        await self._handing_over.fence(
            caller_namespace(),
            check_agent_id(request.agent_id),
            self._peer(),
            messages.read_generation(request.generation, least=1),
            context.time_remaining(),
        )
        return pb.FenceAgentResponse()

    def _peer(self) -> str:
        return self._peers.calling(current_principal())
