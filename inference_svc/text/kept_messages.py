"""Which messages of a conversation stay when it outgrew its model's context: the oldest are left out behind the
system's, up to a user's message. Of one question with many tool calls, the oldest calls go with their results. Pure.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.templates.system_values import without_notes

FULL_SHARE = 0.8  # A memory that fills more of its context is full
SUMMARY_REQUEST = (
    "Our conversation is longer than you can keep, and you will soon forget its beginning. Write down, in short "
    "sentences, what you must not forget: names, facts, decisions, and what is still to be done."
)
SUMMARY_MESSAGES = 2  # A summary is a user's message, which every template takes, and a reply to it
_TOLD, _HEARD = "Remember: ", "I will remember that."

Messages = tuple[manifest_pb2.Message, ...]


@dataclass(frozen=True, slots=True)
class Shorter:
    messages: Messages
    dropped: int  # messages that are left out now; an older summary is none, and may be all that is
    shortened: manifest_pb2.Shortened  # what `messages` lack of the whole conversation


@dataclass(frozen=True, slots=True)
class _Cut:
    """The question that stays, and the first message behind it that does."""

    question: int
    rest: int


def leading_system(messages: Sequence[manifest_pb2.Message]) -> int:
    return next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))


def shorter(
    messages: Messages,
    tokens_of: Callable[[Messages], int],
    *,
    wanted_tokens: int,
    most_tokens: int,
    before: manifest_pb2.Shortened | None = None,
    keeps_summary: bool = True,
) -> Shorter | None:
    """The conversation with as many of its newest messages as fit into `wanted_tokens`; with its last question and the
    newest step behind it if only that fits into `most_tokens`; None if not even that does, or nothing can be left out.
    `tokens_of` counts a whole conversation's tokens, and is called a few times. `before`: what the conversation lacks
    already. Without `keeps_summary` an older summary goes, for a newer one.
    """
    before = before or manifest_pb2.Shortened()
    lead = leading_system(messages)
    start = lead + len(summary_of(messages, before))
    head = messages[: start if keeps_summary else lead]
    cuts = _cuts(messages, start, first=len(head) + 1)
    if not cuts:
        return None

    def kept(cut: _Cut) -> Messages:
        return (*head, messages[cut.question], *messages[cut.rest :])

    fits = bisect_left(cuts, True, key=lambda cut: tokens_of(kept(cut)) <= wanted_tokens)
    if fits == len(cuts) and tokens_of(kept(cuts[-1])) > most_tokens:
        return None
    cut = cuts[min(fits, len(cuts) - 1)]
    # Notes of the engine's own are none of the caller's messages.
    behind = len(without_notes(messages[cut.question + 1 : cut.rest]))
    dropped = len(without_notes(messages[start : cut.question])) + behind
    same_question = before.dropped_behind_question if cut.question == start else 0
    shortened = manifest_pb2.Shortened(
        dropped_messages=before.dropped_messages + dropped,
        has_summary=before.has_summary and keeps_summary,
        dropped_behind_question=same_question + behind,
    )
    return Shorter(kept(cut), dropped, shortened)


def _cuts(messages: Messages, start: int, first: int) -> list[_Cut]:
    """Each way to leave out the oldest messages from `start` (some: `first` - 1) on; the longest conversation first."""
    questions = [index for index in range(start, len(messages)) if messages[index].role == "user"]
    calls = _earliest_calls(messages)
    cuts = [_Cut(index, index + 1) for index in questions if index >= first]
    if questions:
        last = questions[-1]
        # A step is the assistant's message, a call or the reply, with the results that follow it.
        steps = [index for index in range(last + 2, len(messages)) if messages[index].role == "assistant"]
        cuts += [_Cut(last, index) for index in steps]
    return [cut for cut in cuts if cut.rest == len(messages) or calls[cut.rest] >= cut.rest]


def _earliest_calls(messages: Messages) -> list[int]:
    """By message: where the first of the calls stands whose results are that message or follow it."""
    made = dict[str, int]()
    earliest = []
    for index, message in enumerate(messages):
        made |= {call.id: index for call in message.tool_calls if call.id}
        earliest.append(made.get(message.tool_call_id, index))
    for index in range(len(earliest) - 1, 0, -1):
        earliest[index - 1] = min(earliest[index - 1 : index + 1])
    return earliest


def summary_of(messages: Messages, shortened: manifest_pb2.Shortened | None) -> Messages:
    """The summary that stands in a conversation for its dropped messages; empty if none does."""
    lead = leading_system(messages)
    return messages[lead : lead + SUMMARY_MESSAGES] if shortened is not None and shortened.has_summary else ()


def as_summary(said: str) -> Messages:
    told = manifest_pb2.Message(role="user", content=_TOLD + said)
    return told, manifest_pb2.Message(role="assistant", content=_HEARD)


def with_summary(kept: Messages, summary: Messages) -> Messages:
    lead = leading_system(kept)
    return (*kept[:lead], *summary, *kept[lead:])


def as_remembered(given: Messages, remembered: Messages, shortened: manifest_pb2.Shortened) -> Messages | None:
    """A conversation as its agent has it: without what it left out, with its summary. None for one that ends inside."""
    lead, behind = leading_system(given), shortened.dropped_behind_question
    question = lead + shortened.dropped_messages - behind
    kept = given[question : question + 1] if behind else ()
    rest = given[question + len(kept) + behind :]
    return (*given[:lead], *summary_of(remembered, shortened), *kept, *rest) if rest else None
