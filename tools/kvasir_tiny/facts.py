"""One fact of kvasir-tiny's world: sentences to tell it, to ask for it, to answer, and to answer if nobody told it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.kvasir_tiny import words
from tools.kvasir_tiny.material import material
from tools.kvasir_tiny.words import CLOSED, Dice, Names

_MATERIAL = material("facts")


@dataclass(frozen=True)
class Fact:
    """All sentences about one fact, in the words of the people who speak and of the agent who answers."""

    key: tuple[str, str]  # (subject, attribute): told at most once in a conversation
    told: str  # "Velora lives in Tamsik." (or "I live in Tamsik.", from the subject's own mouth)
    question: str  # "Where does Velora live?"
    clause: str  # what may follow "Tell me": "where Velora lives", "my name"
    missing: str  # the same, turned to the one who asks: "where Velora lives", "your name"
    answer: str  # "Velora lives in Tamsik."
    value: str  # "Tamsik", the part of the answer that only the telling can give
    kind: str  # where another value of the same sort comes from

    @property
    def not_told(self) -> str:
        return f"I was not told {self.missing}."

    @property
    def not_in_passage(self) -> str:
        return f"The passage does not say {self.missing}."


# noun, kind of value, question word
POSSESSIONS = _MATERIAL["POSSESSIONS"]
_NOUNS = "dog cat horse parrot boat house sister brother daughter son mother father uncle neighbour cousin"
COMPANIONS = _NOUNS.split()
# what I do, what somebody does, before the value, question word, after the verb in a question, kind of value
ACTIONS = _MATERIAL["ACTIONS"]


_CREATURES = [name[:-1].replace("wolve", "wolf").replace("foxe", "fox") for name in CLOSED["animal"]]
_MADE: Mapping[str, Callable[[Dice, Names], str]] = {
    "person": lambda _, names: names.person(),
    "place": lambda _, names: names.place(),
    "word": lambda _, names: names.word(),
    "code": lambda _, names: names.digits(4),
    "phone": lambda _, names: names.digits(6),
    "count": lambda _, names: names.digits(2),
    "time": lambda dice, _: f"{dice.between(1, 23)}:{dice.below(6)}{dice.below(10)}",
    "creature": lambda dice, _: f"the {dice.pick(_CREATURES)}",
}


def a_value(kind: str, dice: Dice, names: Names) -> str:
    """A fresh value: an open kind is made up, a closed one is picked from its list."""
    return _MADE[kind](dice, names) if kind in _MADE else dice.pick(CLOSED[kind])


def _possession(subject: str, dice: Dice, names: Names, mouth: str) -> Fact:
    noun, kind, wh = dice.pick(POSSESSIONS)
    return possession(subject, noun, kind, wh, a_value(kind, dice, names), mouth)


def possession(subject: str, noun: str, kind: str, wh: str, value: str, mouth: str) -> Fact:
    """`<subject>'s <noun> is <value>`; the subject "" is the person who asks, `mouth` the one who tells."""
    form = ("is", f"{wh} is {{}}?", "{}" if wh == "What" else "who {} is")
    return _owned(subject, noun, kind, value, mouth, form)


def _companion(subject: str, dice: Dice, names: Names, mouth: str) -> Fact:
    noun = dice.pick(COMPANIONS)
    return companion(subject, noun, names.person(), mouth)


def companion(subject: str, noun: str, value: str, mouth: str) -> Fact:
    """`<subject>'s <noun> is called <value>`; the subject "" is the person who asks, `mouth` the one who tells."""
    form = ("is called", "What is {} called?", "what {} is called")
    return _owned(subject, noun, "person", value, mouth, form)


def _owned(subject: str, noun: str, kind: str, value: str, mouth: str, form: tuple[str, str, str]) -> Fact:
    """`form`: the verb, the question, and what may follow "Tell me"."""
    verb, question, clause = form
    asked, turned = (f"my {noun}", f"your {noun}") if subject == "" else (f"{subject}'s {noun}",) * 2
    owner = "My" if mouth == subject else f"{subject}'s"
    told = f"{owner} {noun} {verb} {value}."
    answer = f"{turned[0].upper()}{turned[1:]} {verb} {value}."
    clauses = (clause.format(asked), clause.format(turned))
    return Fact((subject, noun), told, question.format(asked), *clauses, answer, value, kind)


def action(subject: str, verb: tuple[str, str, str, str, str, str], value: str, mouth: str) -> Fact:
    """`<subject> lives in <value>` and its like; the subject "" is the person who asks."""
    base, third, before, wh, after, kind = verb
    first = mouth == subject
    asked, turned = (f"I {base}", f"You {base}") if subject == "" else (f"{subject} {third}",) * 2
    helper = f"do I {base}" if subject == "" else f"does {subject} {base}"
    told = f"I {base}" if first else f"{subject} {third}"
    small = turned if subject else f"you {base}"
    return Fact(
        key=(subject, base),
        told=f"{told}{before} {value}.",
        question=f"{wh[0].upper()}{wh[1:]} {helper}{after}?",
        clause=f"{wh} {asked}{after}",
        missing=f"{wh} {small}{after}",
        answer=f"{turned}{before} {value}.",
        value=value,
        kind=kind,
    )


def _action(subject: str, dice: Dice, names: Names, mouth: str) -> Fact:
    verb = dice.pick(ACTIONS)
    return action(subject, verb, a_value(verb[5], dice, names), mouth)


def own_name(value: str) -> Fact:
    """The name of the person who speaks with the agent."""
    return Fact(
        ("", "name"),
        f"My name is {value}.",
        "What is my name?",
        "my name",
        "your name",
        f"Your name is {value}.",
        value,
        "person",
    )


def about_person(subject: str, dice: Dice, names: Names, mouth: str = "-") -> Fact:
    """A fact about a person, told by `mouth` ("" is the user, "-" somebody whose name does not matter)."""
    return dice.among((0.45, _possession), (0.6, _companion), (1, _action))(subject, dice, names, mouth)


# kind of value, subject, how it is told, how it is asked, what may follow "Tell me", attribute
THINGS: list[list[str]] = _MATERIAL["THINGS"]
_SIGHTING, _CHOICE, _APPOINTMENT = THINGS[8:11]
_SLOT = re.compile(r"\{(\w+)\}")


def _thing(form: list[str], subject: str, dice: Dice, names: Names, number: int = 0) -> Fact:
    kind, _, *texts = form
    value = a_value(kind, dice, names)
    slots = {"s": subject, "S": subject[0].upper() + subject[1:], "n": number, "v": value}
    told, question, clause, attribute = (text.format(**slots) for text in texts)
    return Fact((subject, attribute), told, question, clause, clause, told, value, kind)


def sighting(who: str, dice: Dice, names: Names) -> Fact:
    """Where somebody was seen."""
    return _thing(_SIGHTING, who, dice, names)


def choice(who: str, number: int, dice: Dice, names: Names) -> Fact:
    """What somebody chose in a round of a game."""
    return _thing(_CHOICE, who, dice, names, number)


def appointment(who: str, dice: Dice, names: Names) -> Fact:
    """When somebody is to be met."""
    return _thing(_APPOINTMENT, who, dice, names)


def about_thing(dice: Dice, names: Names) -> Fact:
    """A fact about a place, a number, a piece of code, a decision, with a subject of its own."""
    form = dice.pick(THINGS)
    subject = _SLOT.sub(lambda slot: words.a_word(slot[1], dice) or a_value(slot[1], dice, names), form[1])
    return _thing(form, subject, dice, names, dice.between(1, 30) if form is _CHOICE else 0)
