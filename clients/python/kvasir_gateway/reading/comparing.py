"""What two conversations have in common: messages as clients repeat them, and without dates and clocks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from json.encoder import encode_basestring_ascii

from kvasir.clocks import without_times
from kvasir.formats import manifest

from kvasir_gateway.turn import Said

_MOST_MASKED = 64 << 10  # characters of a text in which dates and clocks are looked for
_MOST_ARGUMENTS = 1 << 20  # characters; an engine refuses more
_PIECE = 64 << 10  # characters of a text that one call encodes: it keeps the interpreter


def common_messages(ones: Sequence[Said], others: Sequence[Said]) -> int:
    """How many messages two conversations begin with in common."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        repeated = [call.id for call in other.tool_calls if call.id]
        if canonical(one) != canonical(other) and not (repeated and repeated == _made(ones, count, len(repeated))):
            break
        count += 1
    return count


def results_of_text(said: Sequence[Said], place: int) -> list[Said]:
    """The results of a reply whose calls still stand in its text: the memory's own spelling, in which a client's call
    came back. Only they name its calls."""
    message = said[place]
    if message.role != "assistant" or message.tool_calls:
        return []
    return [*takewhile(lambda each: each.role == "tool", said[place + 1 :])]


def _made(said: Sequence[Said], place: int, calls: int) -> list[str]:
    """The ids of a message's calls. Of the newest reply, whose calls stand in its text, they follow from its own."""
    message = said[place]
    if message.reply_id:
        return [manifest.call_id(message.reply_id, number) for number in range(calls)]
    named = [each.tool_call_id for each in results_of_text(said, place)]
    return named or [call.id for call in message.tool_calls if call.id]


def at_any_time(messages: Sequence[Said]) -> Sequence[Said]:
    """The messages without dates and clocks in systems' texts and in the first of another role."""
    opening = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    return [
        _timeless(message) if index <= opening or message.role == "system" else message
        for index, message in enumerate(messages)
    ]


def _timeless(message: Said) -> Said:
    # One substitution holds the interpreter until it ends.
    head, rest = message.content[:_MOST_MASKED], message.content[_MOST_MASKED:]
    plain = without_times(head) + rest
    return message if plain == message.content else replace(message, content=plain)


def canonical(message: Said) -> bytes:
    """The message as clients repeat it: without ids, the space around a text, and the form of arguments."""
    calls = [[call.name, _arguments(call.arguments_json)] for call in message.tool_calls]
    role, name, text = map(_as_json, (message.role, message.name, message.content.strip()))
    return f"[{role}, {name}, {text}, {json.dumps(calls) if calls else '[]'}]\n".encode()


def _as_json(text: str) -> str:
    if len(text) <= _PIECE:
        return encode_basestring_ascii(text)
    pieces = [encode_basestring_ascii(text[at : at + _PIECE])[1:-1] for at in range(0, len(text), _PIECE)]
    return f'"{"".join(pieces)}"'


def _arguments(text: str) -> object:
    if len(text) > _MOST_ARGUMENTS:
        return text
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text
