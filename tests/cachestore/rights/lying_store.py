"""What the liar's store says of itself: that it owns everything, in any generation, and knows newer owners."""

import random
from collections import Counter
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.errors import FailedPrecondition

from cachestore_svc.facts.ownership import CLAIM_STEP, MAX_TOLD_GENERATION, MAX_UNHEARD_CLAIMS
from tests.cachestore.rights.peered import Mac

TOO_FAR = (MAX_UNHEARD_CLAIMS + 1) * CLAIM_STEP


class Lies:
    """Its answers, in place of true ones."""

    def __init__(self, mac: Mac, chance: random.Random, counts: Counter[str]) -> None:
        agents, moving = mac.services.agents, mac.services.moving
        get_agent, fence, hand_over = agents.GetAgent, moving.FenceAgent, moving.HandOverAgent

        async def boast(request: Any, context: Any) -> pb.GetAgentResponse:
            answer = await get_agent(request, context)
            if chance.random() < 0.7:
                counts["lies about owners"] += 1
                answer.agent.ownership.state = pb.OWNER_STATE_OWNED
                answer.agent.ownership.generation = chance.choice((1, 3 * CLAIM_STEP, TOO_FAR, MAX_TOLD_GENERATION))
            return answer

        async def know_better(request: Any, context: Any) -> pb.FenceAgentResponse:
            if chance.random() < 0.7:
                counts["lies about newer owners"] += 1
                newer = str(request.generation + chance.choice((1, CLAIM_STEP, TOO_FAR, 1 << 62)))
                said = {"generation": chance.choice((newer, newer, "", "-1", "9" * 5000, "many"))}
                raise FailedPrecondition("newer", reason="OWNER_NEWER", metadata=said)
            return await fence(request, context)

        async def deny(request: Any, context: Any) -> pb.HandOverAgentResponse:
            if chance.random() < 0.3:
                raise FailedPrecondition("never heard of it", reason="MOVE_UNKNOWN")
            return await hand_over(request, context)

        agents.GetAgent, moving.FenceAgent, moving.HandOverAgent = boast, know_better, deny  # type: ignore[method-assign]
