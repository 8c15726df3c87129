"""One everyday fact, about the speaker or somebody they know: told in one of several ways, asked in one of several."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from tools.kvasir_tiny.everyday import values
from tools.kvasir_tiny.everyday.spelling import WideNames
from tools.kvasir_tiny.everyday.values import Make
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.material import material
from tools.kvasir_tiny.words import Dice


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


_SLOT = re.compile(r"\{([^{}]+)\}")

_WEIGHTS = sum(weight for weight, _ in ATTRIBUTES)


@dataclass(frozen=True)
class EverydayFact(Fact):
    """A fact that answers several questions."""

    attribute: Attribute | None = field(default=None, compare=False)
    subject: str = ""
    shared: str = ""

    def in_small_letters(self) -> EverydayFact:
        """The same fact, told by somebody who uses no capitals."""
        return replace(self, told=self.told.lower(), value=self.value.lower(), shared=self.shared.lower())

    @property
    def turned(self) -> str:
        """The fact as the agent repeats it."""
        answer = self.attribute.answer if self.attribute else ""
        return _Voice(self.subject, self.shared, self.value, turned=True).sentence(answer)

    def asked(self, dice: Dice) -> EverydayFact:
        """The same fact with one of its questions, and the answer to that."""
        if self.attribute is None:
            raise ValueError("a fact of no attribute has no questions")
        mine, yours = (_Voice(self.subject, self.shared, self.value, turned) for turned in (False, True))
        question, missing, answer = ([*dice.pick(self.attribute.questions).split(" // "), "", ""])[:3]
        missing = missing or self.attribute.missing
        return replace(
            self,
            question=mine.says(question),
            clause=mine.says(missing),
            missing=yours.says(missing),
            answer=yours.sentence(answer or self.attribute.answer),
        )


def own_name(dice: Dice, names: WideNames) -> EverydayFact:
    return make(OWN_NAME, "", dice, names)


def a_fact(subject: str, dice: Dice, names: WideNames) -> EverydayFact:
    """A fact about the speaker (""), about a person by name, or about somebody's relative ("my sister")."""
    draw = dice.random() * _WEIGHTS
    found = ATTRIBUTES[-1][1]
    for weight, attribute in ATTRIBUTES:
        draw -= weight
        if draw < 0:
            found = attribute
            break
    return make(found, subject, dice, names)


def make(attribute: Attribute, subject: str, dice: Dice, names: WideNames, shared: str | None = None) -> EverydayFact:
    """A fact with a fresh value, told; `asked` brings the question."""
    if attribute.no_subject or attribute.speaker_only:
        subject = ""
    if shared is None:
        shared = attribute.shared(dice, names) if attribute.shared else ""
    value = attribute.value(dice, names)
    if dice.chance(0.05) and attribute.value is not values.when:
        value = value.lower()
    name = attribute.name.replace("{x}", shared)
    return EverydayFact(
        key=("" if attribute.no_subject else subject, SAME.get(name, name.split("|")[0])),
        told=_Voice(subject, shared, value).sentence(dice.pick(attribute.tellings)),
        question="",
        clause="",
        missing="",
        answer="",
        value=value,
        kind="everyday",
        attribute=attribute,
        subject=subject,
        shared=shared,
    )


class _Voice:
    """Fills templates: as the one who tells and asks says it, or turned, as the agent answers."""

    def __init__(self, subject: str, shared: str, value: str, turned: bool = False) -> None:
        self._shared, self._value = shared, value
        self._is_plain = subject == ""
        if subject.startswith("my ") and turned:
            subject = f"your {subject[3:]}"
        you = "you" if turned else "I"
        owner = "your" if turned else "my"
        self._words = {
            "N": subject or you,
            "P": f"{subject}'s" if subject else owner,
            "be": "is" if subject else ("are" if turned else "am"),
            "was": "was" if subject or not turned else "were",
            "v": value,
            "a": "an" if shared[:1] in set("aeiou") else "a",
        }

    def says(self, template: str) -> str:
        return _SLOT.sub(self._filled, template)

    def sentence(self, template: str) -> str:
        """With a capital at its start, except that a value keeps its own."""
        text = self.says(template)
        return text if template.startswith("{v}") else text[0].upper() + text[1:]

    def _filled(self, found: re.Match[str]) -> str:
        slot = found[1]
        if slot.startswith("x"):
            base, _, other = self._shared.partition("|")
            if slot == "x:base":
                return base
            if slot == "x:second":
                return other
            # "like|likes" is a verb of the subject; "key is|is the key" has its first form here
            return base if not other or self._is_plain else other
        if "|" in slot:
            return slot.split("|")[0 if self._is_plain else 1]
        return self._words[slot]
