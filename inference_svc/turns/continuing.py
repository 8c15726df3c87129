"""How a turn's input stands to what its agent remembers: the same conversation, or another. Pure."""

from collections.abc import Sequence
from enum import Enum

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clocks import without_times

from inference_svc.text.prefix_matching import Outcome, common_prefix_length
from inference_svc.text.system_values import without_notes


class Continuation(Enum):
    """What a turn does to its agent's line."""

    NEW = "new"  # the agent remembered nothing
    EXTENDED = "extended"
    REWOUND = "rewound"  # an earlier point goes on
    REPLACED = "replaced"
    BRANCHED = "branched"  # answered beside the line, and not remembered
    UNDECIDED = "undecided"  # the memory could not be read: decided when the turn is stored


Messages = Sequence[manifest_pb2.Message]


def is_same_conversation(given: Messages, remembered: Messages, *, at_any_time: bool = False) -> bool:
    """Whether both begin alike. Systems' messages do not count: they name the date, and side calls share them.
    `at_any_time`: a date or a clock in the first text may be another, where its answer is the same.
    """
    said, known = ([_said_by(each) for each in some if each.role != "system"][:2] for some in (given, remembered))
    if said[:1] == known[:1]:
        return bool(said)
    if not at_any_time or len(said) < 2 or said[1:] != known[1:] or said[1][0] != "assistant":
        return False
    return [said[0][0], without_times(said[0][1])] == [known[0][0], without_times(known[0][1])]


def in_common(given: Messages, remembered: Messages) -> int:
    """With how many messages both begin. Systems' messages do not count."""
    said, known = ([_said_by(each) for each in some if each.role != "system"] for some in (given, remembered))
    return common_prefix_length(said, known)


def goes_on(given: Messages, remembered: Messages) -> bool:
    """Whether all that others said to the model stands in the given messages too. Replies come back in other forms."""
    asked, known = _asked(given), _asked(remembered)
    return len(given) >= len(without_notes(remembered)) and asked[: len(known)] == known


def of_text(match: Outcome) -> Continuation:
    """The same for a raw prompt, or one that could not be compared as messages."""
    if match is Outcome.NONE:
        return Continuation.REPLACED
    return Continuation.REWOUND if match is Outcome.DIVERGE else Continuation.EXTENDED


def _asked(messages: Messages) -> list[tuple[str, str]]:
    return [_said_by(message) for message in messages if message.role not in ("system", "assistant")]


def _said_by(message: manifest_pb2.Message) -> tuple[str, str]:
    """Who says what. Clients send a text back without the space around it."""
    return message.role, message.content.strip()
