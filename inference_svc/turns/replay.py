"""Retries: a turn that was done before is replayed instead of done twice.

A request is a retry when it has the request id and the input of the agent's last turn, and the same parent version. The
same id with another input is another turn: ids name requests for people, the input says what was asked.
"""

from inference_svc.engine.api import FinishReason
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.turns.turn_data import TurnRequest


def is_retry(request: TurnRequest, memory: AgentMemory) -> bool:
    """Whether the request asks for the turn that made this memory."""
    turn, head = memory.turn, memory.publication.head
    if turn.request_id != request.request_id or turn.input_digest != request.input_digest:
        return False
    if request.expected_version is None or head is None:
        return True
    # A request with the same input that extends this memory is a new turn, not a retry.
    extended = head.parent_version if memory.publication.is_head else head.version
    if memory.shortened is None:
        return request.expected_version == extended
    # Its caller knows no version that only became shorter.
    return request.expected_version <= extended - memory.shortened.is_after_turn


def is_whole(memory: AgentMemory) -> bool:
    """Whether the memory's last turn came to its end. A retry of a cut turn (keep_partial) does it again."""
    return memory.turn.finish_reason != FinishReason.CANCELLED.value
