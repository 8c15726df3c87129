"""What may be told of people and things, how it is told and how it is asked.

In a template, {N} is the subject (I, Anna, my sister), {P} the same as an owner (my, Anna's), {v} what only the telling
can give, {x} what question and answer share, {live|lives} one verb in both forms; {be} and {was} are verbs of {N}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.kvasir_tiny.everyday import values
from tools.kvasir_tiny.everyday.values import Make
from tools.kvasir_tiny.material import material


@dataclass(frozen=True)
class Attribute:
    """What may be told of a subject.

    A question is "question // what was not told // answer"; the last two only where they are not the attribute's."""

    name: str
    tellings: list[str]
    questions: list[str]
    missing: str
    answer: str
    value: Make
    shared: Make | None = None  # {x}, which is part of the key
    speaker_only: bool = False
    no_subject: bool = False  # a thing of its own, which is nobody's


def _attribute(row: dict[str, Any]) -> Attribute:
    return Attribute(**{name: _maker(each) if name in ("value", "shared") else each for name, each in row.items()})


def _maker(named: str | list[str]) -> Make:
    """A function of `values`, or one that draws from a list: of `values`, or given."""
    found = getattr(values, named) if isinstance(named, str) else named
    made: Make = values.one_of(found) if isinstance(found, list) else found
    return made


_MATERIAL = material("attributes")
OWN_NAME = _attribute(_MATERIAL["OWN_NAME"])
ATTRIBUTES: list[tuple[float, Attribute]] = [(weight, _attribute(row)) for weight, row in _MATERIAL["ATTRIBUTES"]]
LIVE, WORK = (attribute for _, attribute in ATTRIBUTES[:2])
# Other words for the same: of two of them, a conversation uses one.
SAME: dict[str, str] = _MATERIAL["SAME"]
