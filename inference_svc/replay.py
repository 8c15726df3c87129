"""Retries: telling a turn again instead of doing it twice.

A request is a retry when it has the request id and the input of the agent's last turn and extends what that turn
extended. The same id with another input is another turn: ids name requests for people, the input says what was asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from inference_svc.memory import AgentMemory
from inference_svc.plan import FinishReason
from inference_svc.service_data import TurnRequest


@dataclass(frozen=True, slots=True)
class ToldReply:
    """A remembered turn's reply as its client saw it."""

    text: str
    token_ids: tuple[int, ...]
    matched_stop: str


def is_retry(request: TurnRequest, memory: AgentMemory) -> bool:
    """Whether the request asks for the turn that made this memory."""
    turn, head = memory.turn, memory.kept.head
    if turn.request_id != request.request_id or turn.input_digest != request.input_digest:
        return False
    if request.parent_version is None or head is None:
        return True
    # Extending this very memory with the same words is a new turn, not a retry.
    return request.parent_version == (head.parent_version if memory.kept.is_head else head.version)


def is_whole(memory: AgentMemory) -> bool:
    """Whether the memory's last turn came to its end. One that was cut (keep_partial) is done again by a retry."""
    return memory.turn.finish_reason != FinishReason.CANCELLED.value


def told_reply(memory: AgentMemory, stop_token_ids: Sequence[int], stop: Sequence[str]) -> ToldReply:
    """The reply behind the prompt, without the end token's spelling or what of a stop string its tokens hold."""
    turn, words = memory.turn, memory.words
    token_ids = tuple(words.token_ids[turn.prompt_tokens :])
    text = words.text[turn.prompt_chars :]
    if turn.finish_reason in ("stop", "tool_calls") and token_ids and token_ids[-1] in stop_token_ids:
        end_chars = words.token_chars[-1]
        return ToldReply(text[: len(text) - end_chars], token_ids, "")
    if turn.finish_reason == FinishReason.STOP_SEQUENCE.value:
        # Tokens that only spell the stop string are not remembered, but one may begin it and end the reply.
        matched, cut = _stop_border(text, stop)
        return ToldReply(text[:cut], token_ids, matched)
    return ToldReply(text, token_ids, "")


def _stop_border(text: str, stop: Sequence[str]) -> tuple[str, int]:
    """The stop string whose longest beginning ends the text, and where that begins."""
    borders = [
        (length, stop_string)
        for stop_string in stop
        for length in range(min(len(stop_string), len(text)), -1, -1)
        if text.endswith(stop_string[:length])
    ]
    length, matched = max(borders, key=lambda border: border[0], default=(0, ""))
    return matched, len(text) - length
