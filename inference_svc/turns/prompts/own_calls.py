"""Calls that come back in another spelling: the prompt has the memory's own, which is computed already. Pure."""

import json
from collections.abc import Callable, Sequence

from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.given_json import is_bounded
from inference_svc.text.literal_text import without_guards
from inference_svc.text.templates.system_values import without_notes

Messages = Sequence[manifest_pb2.Message]
Read = Callable[[str], manifest_pb2.Message]  # a reply's text, as a message with its calls apart
_LARGEST_WHOLE = 1 << 53  # JavaScript has no larger whole numbers, and writes 1.0 as 1


def with_own_calls(
    given: Messages, remembered: Messages, read: Read, prompt: str = ""
) -> tuple[manifest_pb2.Message, ...]:
    """The given messages, with each reply as it is remembered whose calls have the same names and values, with
    the same text and thoughts, as far as both conversations go on alike. Calls keep the ids given, which their results
    name. `prompt`: the text of the given messages.
    """
    known = iter([each for each in without_notes(remembered) if each.role != "system"])
    messages, is_alike = list(given), True
    for place, message in enumerate(given):
        if message.role == "system" or message.is_note or not is_alike:
            continue
        own = next(known, None)
        is_alike = own is not None and own.role == message.role
        if own is None or not is_alike:
            break
        if message.role != "assistant":
            is_alike = own.content.strip() == message.content.strip()
        elif message.tool_calls and own.is_reply and _is_same(own if own.tool_calls else read(own.content), message):
            messages[place] = _with_ids_of(message, own, prompt)
    return tuple(messages)


def _with_ids_of(given: manifest_pb2.Message, own: manifest_pb2.Message, prompt: str) -> manifest_pb2.Message:
    """The memory's message with the ids given. As one text it may have ids of the model's, and stays as given where the
    template prints ids."""
    ids = [call.id for call in given.tool_calls]
    if not own.tool_calls:
        return given if any(each and each in prompt for each in ids) else own
    found = manifest_pb2.Message()
    found.CopyFrom(own)
    for call, each in zip(found.tool_calls, ids, strict=True):
        call.id = each
    return found


def _is_same(own: manifest_pb2.Message, given: manifest_pb2.Message) -> bool:
    texts = [(without_guards(each.content).strip(), without_guards(each.reasoning).strip()) for each in (own, given)]
    calls = [[(call.name, _value(call.arguments_json)) for call in each.tool_calls] for each in (own, given)]
    return texts[0] == texts[1] and calls[0] == calls[1]


def _value(text: str) -> str:
    """Arguments in one spelling; those that are no JSON as they are."""
    text = without_guards(text)
    if not is_bounded(text):
        return text
    try:
        return json.dumps(json.loads(text or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _LARGEST_WHOLE else value
