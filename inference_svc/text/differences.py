"""Where a prompt first differs from its agent's memory, and why. It holds texts: for its owner, never for logs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.conversation import ChatTemplate, Dialogue, render
from inference_svc.text.literal_text import without_guards
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.templates.system_values import TIMES
from inference_svc.text.templates.template_names import REASONING

SHOWN_CHARS = 20
_WORD_CHARS = 10  # of a word before the first character that differs; a longer beginning is not shown
TOOLS, TEMPLATE, THOUGHTS = "tools", "template", "thoughts"
_FIELDS = ("role", "content", "reasoning", "tool_calls")  # of a message
_MARK = "\ue000{}\ue001"  # messages' texts give way to these, so that what the template itself prints shows


@dataclass(frozen=True, slots=True)
class Difference:
    """`role`: of the message, or another source of the text ("tools", "template"); empty for a raw prompt."""

    character: int  # of the prompt
    remembered: str
    given: str
    role: str = ""
    message: int | None = None
    what: str = ""  # if nothing else in this message differs: "date", "clock", "date and clock", "thoughts"; or "order"
    rules: tuple[str, ...] = ()  # that would have helped


def difference(remembered: str, given: str, at: int) -> Difference | None:
    """Of two texts that are equal before `at`; None if they are equal there too, or one ends."""
    before, remembered, behind = without_guards(given[:at]), without_guards(remembered[at:]), without_guards(given[at:])
    if not remembered or not behind or remembered[0] == behind[0]:
        return None
    word = before[-_WORD_CHARS - 1 :].split()[-1] if before[-1:].strip() else ""
    word = word if len(word) <= _WORD_CHARS else ""
    ours, theirs = (f"{word}{text[:SHOWN_CHARS]}"[:SHOWN_CHARS] for text in (remembered, behind))
    return Difference(len(before), ours, theirs)


def placed(found: Difference, text: str, conversation: Dialogue, template: ChatTemplate) -> Difference:
    index = _message_at(without_guards(text), found.character, conversation, template)
    if index is not None:
        return replace(found, message=index, role=conversation.messages[index]["role"])
    if not conversation.tools:
        return replace(found, role=TEMPLATE)
    untold = without_guards(render(template, replace(conversation, tools=())))
    plain = without_guards(text)
    start = common_prefix_length(plain, untold)
    end = len(plain) - common_prefix_length(plain[start:][::-1], untold[start:][::-1])
    return replace(found, role=TOOLS if start <= found.character <= end else TEMPLATE)


def explained(
    found: Difference,
    remembered: Sequence[manifest_pb2.Message],
    given: Sequence[manifest_pb2.Message],
    in_force: frozenset[str] = frozenset(),
) -> Difference:
    """The same; if only dates or clocks of a system's text differ, with the rules that would have helped."""
    index = found.message
    if index is None and found.role == TEMPLATE:  # where it prints thoughts, too
        pairs = enumerate(zip(remembered, given, strict=False))
        index = next((number for number, (known, said) in pairs if _differing(known, said)), None)
    if index is None or index >= min(len(remembered), len(given)):
        return found
    known, said = remembered[index], given[index]
    differing = _differing(known, said)
    if differing == ["reasoning"]:
        return replace(found, message=index, role=said.role, what=THOUGHTS)
    if found.message is None or differing != ["content"]:
        return found
    for what, rules, without in TIMES:
        if without(known.content) == without(said.content):
            helps = sorted(rules - in_force) if said.role == "system" else ()
            return replace(found, what=what, rules=tuple(helps))
    return found


def _differing(known: manifest_pb2.Message, said: manifest_pb2.Message) -> list[str]:
    """Fields that differ in more than the ids of calls and the space around texts."""
    return [name for name in _FIELDS if _read(known, name) != _read(said, name)]


def _read(message: manifest_pb2.Message, name: str) -> object:
    if name == "tool_calls":
        return [(call.name, call.arguments_json) for call in message.tool_calls]
    return without_guards(getattr(message, name)).strip()


def _message_at(text: str, at: int, conversation: Dialogue, template: ChatTemplate) -> int | None:
    """The message whose text, or whose calls, are printed at a character; None where the template's own text is."""
    said = [(index, each) for index, each in enumerate(conversation.messages) if each["content"].strip()]
    marked = [
        {**each, "content": _MARK.format(index) if each["content"].strip() else each["content"]}
        for index, each in enumerate(conversation.messages)
    ]
    form = without_guards(render(template, replace(conversation, messages=tuple(marked))))
    pieces, order = _pieces(form, [index for index, _ in said])
    cursor, last = 0, -1
    for piece, following, index in zip(pieces, pieces[1:], order, strict=False):
        start = cursor + len(piece)
        if at < start:
            return _between(conversation, last, index)
        end = start + _printed(text, start, without_guards(conversation.messages[index]["content"]), following)
        if at <= end:
            return index
        cursor, last = end, index
    return _between(conversation, last, len(conversation.messages))


def _pieces(form: str, indices: Sequence[int]) -> tuple[list[str], list[int]]:
    places = sorted((place, index) for index in indices if (place := form.find(_MARK.format(index))) >= 0)
    pieces, cursor = [], 0
    for place, index in places:
        pieces.append(form[cursor:place])
        cursor = place + len(_MARK.format(index))
    return [*pieces, form[cursor:]], [index for _, index in places]


def _printed(text: str, start: int, content: str, following: str) -> int:
    """How many characters of a message the template has printed at `start`, before its own text that follows."""
    for form in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(form + following, start):
            return len(form)
    found = text.find(following, start) if following else -1
    return (found if found >= 0 else len(text)) - start


def _between(conversation: Dialogue, before: int, behind: int) -> int | None:
    """Of two messages and those between them, the first that has thoughts behind the one or calls before the other."""
    messages: Sequence[dict[str, Any]] = conversation.messages
    for index in range(max(before, 0), min(behind + 1, len(messages))):
        thinks = index > before and messages[index].get(REASONING)
        if thinks or (index < behind and messages[index].get("tool_calls")):
            return index
    return None
