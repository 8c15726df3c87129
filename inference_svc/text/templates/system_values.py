"""Dates and clocks in systems' texts, which a conversation keeps as it began: newer values follow the history as a
system message of the engine's own, a note. Callers know of no notes, so they are put back where they stood. Pure.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvasir import clocks
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.volatile import SYSTEM_CLOCK, SYSTEM_DATE

from inference_svc.text.prefix_matching import common_prefix_length

TIMES: Sequence[tuple[str, frozenset[str], Callable[[str], str]]] = (
    ("date", frozenset((SYSTEM_DATE,)), clocks.without_dates),
    ("clock", frozenset((SYSTEM_CLOCK,)), clocks.without_clocks),
    ("date and clock", frozenset((SYSTEM_DATE, SYSTEM_CLOCK)), clocks.without_times),
)
"""What two texts may differ in alone, the rules that keep it, and a text without it."""
_PIECE = re.compile(r"\n|(?<=[.!?])\s+")
_SHOWN_CHARS, _BEFORE_CHARS = 200, 120  # of a sentence that is longer: what is repeated, and how much before a value

Messages = tuple[manifest_pb2.Message, ...]


@dataclass(frozen=True, slots=True)
class KeptConversation:
    """A conversation with the memory's values and notes. `note`: the values now, if the model got others last."""

    messages: Messages
    rules: frozenset[str] = frozenset()
    note: manifest_pb2.Message | None = None


def without_notes(messages: Sequence[manifest_pb2.Message]) -> Messages:
    return tuple(message for message in messages if not message.is_note)


def kept_values(
    given: Messages, remembered: Sequence[manifest_pb2.Message], rules: Collection[str]
) -> KeptConversation:
    """`rules`: those that the conversation keeps."""
    messages, used, changed = list(given), frozenset[str](), list[str]()
    shared = 0  # leading messages that both have
    for said, known in zip(given, without_notes(remembered), strict=False):
        if said.role != known.role or (said.role in ("user", "tool") and said.content.strip() != known.content.strip()):
            break
        if said.role == "system" and (needed := _rules_between(said.content, known.content, rules)):
            messages[shared] = known
            changed += _changed(said.content, known.content)
            used |= needed
        shared += 1
    notes = [each for each in _notes(remembered) if each[0] <= min(shared, len(given) - 1)]
    for place, note in reversed(notes):
        messages.insert(place, note)
    told, newest = notes[-1][1].content if notes else "", "\n".join(changed)
    if told and not newest:  # the first values are the newest again
        newest = "\n".join(line for said in given if said.role == "system" for line in _with_values(said.content))
    news = manifest_pb2.Message(role="system", content=newest, is_note=True) if newest not in ("", told) else None
    return KeptConversation(tuple(messages), used or frozenset(rules if notes else ()), news)


def _rules_between(one: str, other: str, rules: Collection[str]) -> frozenset[str]:
    fitting = (needed for _, needed, without in TIMES if needed <= set(rules) and without(one) == without(other))
    return next(fitting, frozenset()) if one != other else frozenset()


def _changed(said: str, known: str) -> list[str]:
    ones, others = _PIECE.split(said), _PIECE.split(known)
    if len(ones) != len(others):
        ones, others = said.splitlines(), known.splitlines()
    return [_shown(one, other) for one, other in zip(ones, others, strict=False) if one != other]


def _shown(said: str, known: str) -> str:
    start = max(common_prefix_length(said, known) - _BEFORE_CHARS, 0) if len(said) > _SHOWN_CHARS else 0
    return said[start : start + _SHOWN_CHARS].strip()


def _with_values(text: str) -> list[str]:
    return [
        _shown(line, clocks.without_times(line)) for line in _PIECE.split(text) if clocks.without_times(line) != line
    ]


def _notes(remembered: Sequence[manifest_pb2.Message]) -> list[tuple[int, manifest_pb2.Message]]:
    notes, place = [], 0
    for message in remembered:
        if message.is_note:
            notes.append((place, message))
        place += not message.is_note
    return notes
