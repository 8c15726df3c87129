"""Retries: reporter a turn again instead of doing it twice.

A request is a retry when it has the request id and the input of the agent's last turn and extends what that turn
extended. The same id with another input is another turn: ids name requests for people, the input says what was asked.
"""

from inference_svc.engine.api import FinishReason
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.turns.turn_data import TurnRequest


def is_retry(request: TurnRequest, memory: AgentMemory) -> bool:
    """Whether the request asks for the turn that made this memory."""
    turn, head = memory.turn, memory.publication.head
    if turn.request_id != request.request_id or turn.input_digest != request.input_digest:
        return False
    if request.parent_version is None or head is None:
        return True
    # Extending this very memory with the same words is a new turn, not a retry.
    return request.parent_version == (head.parent_version if memory.publication.is_head else head.version)


def is_whole(memory: AgentMemory) -> bool:
    """Whether the memory's last turn came to its end. One that was cut (keep_partial) is done again by a retry."""
    return memory.turn.finish_reason != FinishReason.CANCELLED.value
