"""Which messages of a conversation stay when it outgrew its model's context. Pure.

What is left out is the oldest, behind the system's messages at the beginning, and ends before a user's message: a
template wants a question first, and a tool's result wants its call.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.cachestore.v1 import manifest_pb2

SUMMARY_REQUEST = (
    "Our conversation is longer than you can keep, and you will soon forget its beginning. Write down, in short "
    "sentences, what you must not forget: names, facts, decisions, and what is still to be done."
)
SUMMARY_MESSAGES = 2
"""A summary is a user's message, which every template takes, and a reply to it."""
_TOLD, _HEARD = "Remember: ", "I will remember that."

Messages = tuple[manifest_pb2.Message, ...]


@dataclass(frozen=True, slots=True)
class Shorter:
    """A conversation without its oldest messages."""

    messages: Messages
    dropped: int  # messages of the conversation that are left out; an older summary is none


def leading_system(messages: Sequence[manifest_pb2.Message]) -> int:
    """How many system messages stand at the beginning."""
    return next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))


def shorter(
    messages: Messages,
    tokens_of: Callable[[Messages], int],
    *,
    wanted_tokens: int,
    most_tokens: int,
    has_summary: bool = False,
) -> Shorter | None:
    """The conversation with as many of its newest messages as fit into `wanted_tokens`; with its last question and what
    follows if only that fits into `most_tokens`; None if not even that does, or nothing can be left out.

    `tokens_of` counts a whole conversation's tokens, and is asked a few times. `has_summary`: the first two messages
    behind the system's are an older summary.
    """
    lead = leading_system(messages)
    borders = [index for index in range(lead + 1, len(messages)) if messages[index].role == "user"]
    if not borders:
        return None

    def without(border: int) -> Messages:
        return (*messages[:lead], *messages[border:])

    fits = bisect_left(borders, True, key=lambda border: tokens_of(without(border)) <= wanted_tokens)
    if fits == len(borders) and tokens_of(without(borders[-1])) > most_tokens:
        return None
    border = borders[min(fits, len(borders) - 1)]
    summary = SUMMARY_MESSAGES if has_summary else 0
    return Shorter(without(border), max(border - lead - summary, 0))


def with_summary(kept: Messages, summary: str) -> Messages:
    """The conversation with what the agent must not forget before the messages that stay."""
    lead = leading_system(kept)
    told = manifest_pb2.Message(role="user", content=_TOLD + summary)
    heard = manifest_pb2.Message(role="assistant", content=_HEARD)
    return (*kept[:lead], told, heard, *kept[lead:])


def as_remembered(given: Messages, remembered: Messages, shortened: manifest_pb2.Shortened) -> Messages:
    """A whole conversation as its agent would have it: without what the agent left out, and with its summary."""
    lead, known_lead = leading_system(given), leading_system(remembered)
    summary = remembered[known_lead : known_lead + SUMMARY_MESSAGES] if shortened.has_summary else ()
    return (*given[:lead], *summary, *given[lead + shortened.dropped_messages :])
