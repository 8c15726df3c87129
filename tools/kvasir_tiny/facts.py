"""One fact of kvasir-tiny's world: sentences to tell it, to ask for it, to answer, and to answer if nobody told it."""

from __future__ import annotations

from collections.abc import Callable
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


def a_value(kind: str, dice: Dice, names: Names) -> str:
    """A fresh value: an open kind is made up, a closed one is picked from its list."""
    if kind == "person":
        return names.person()
    if kind == "place":
        return names.place()
    if kind == "word":
        return names.word()
    if kind == "code":
        return names.digits(4)
    if kind == "phone":
        return names.digits(6)
    if kind == "count":
        return names.digits(2)
    if kind == "time":
        return f"{dice.between(1, 23)}:{dice.below(6)}{dice.below(10)}"
    if kind == "creature":
        return f"the {dice.pick(CLOSED['animal'])[:-1].replace('wolve', 'wolf').replace('foxe', 'fox')}"
    return dice.pick(CLOSED[kind])


def _possession(subject: str, dice: Dice, names: Names, mouth: str) -> Fact:
    noun, kind, wh = dice.pick(POSSESSIONS)
    value = a_value(kind, dice, names)
    return possession(subject, noun, kind, wh, value, mouth)


def possession(subject: str, noun: str, kind: str, wh: str, value: str, mouth: str) -> Fact:
    """`<subject>'s <noun> is <value>`; the subject "" is the person who asks, `mouth` the one who tells."""
    asked, turned = (f"my {noun}", f"your {noun}") if subject == "" else (f"{subject}'s {noun}",) * 2
    mine = f"My {noun}" if mouth == subject else f"{subject}'s {noun}"
    return Fact(
        key=(subject, noun),
        told=f"{mine} is {value}.",
        question=f"{wh} is {asked}?",
        clause=asked if wh == "What" else f"who {asked} is",
        missing=turned if wh == "What" else f"who {turned} is",
        answer=f"{turned[0].upper()}{turned[1:]} is {value}.",
        value=value,
        kind=kind,
    )


def _companion(subject: str, dice: Dice, names: Names, mouth: str) -> Fact:
    noun = dice.pick(COMPANIONS)
    return companion(subject, noun, names.person(), mouth)


def companion(subject: str, noun: str, value: str, mouth: str) -> Fact:
    """`<subject>'s <noun> is called <value>`; the subject "" is the person who asks, `mouth` the one who tells."""
    asked, turned = (f"my {noun}", f"your {noun}") if subject == "" else (f"{subject}'s {noun}",) * 2
    mine = f"My {noun}" if mouth == subject else f"{subject}'s {noun}"
    return Fact(
        key=(subject, noun),
        told=f"{mine} is called {value}.",
        question=f"What is {asked} called?",
        clause=f"what {asked} is called",
        missing=f"what {turned} is called",
        answer=f"{turned[0].upper()}{turned[1:]} is called {value}.",
        value=value,
        kind="person",
    )


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
    draw = dice.random()
    if draw < 0.45:
        return _possession(subject, dice, names, mouth)
    if draw < 0.6:
        return _companion(subject, dice, names, mouth)
    return _action(subject, dice, names, mouth)


def _thing(kind: str, dice: Dice, names: Names, form: str, asked: str, clause: str, key: tuple[str, str]) -> Fact:
    value = a_value(kind, dice, names)
    sentence = form.format(v=value)
    return Fact(key, sentence, asked, clause, clause, sentence, value, kind)


def _the(dice: Dice, nouns: list[str]) -> str:
    return f"{dice.pick(words.ADJECTIVES)} {dice.pick(nouns)}"


def _departure(dice: Dice, names: Names) -> Fact:
    what = f"the {dice.pick(words.CARRIERS)} to {names.place()}"
    return _thing(
        "time",
        dice,
        names,
        f"T{what[1:]} leaves at {{v}}.",
        f"When does {what} leave?",
        f"when {what} leaves",
        (what, "time"),
    )


def _entry_code(dice: Dice, names: Names) -> Fact:
    what = f"the code of the {_the(dice, words.DOORS)}"
    return _thing("code", dice, names, f"T{what[1:]} is {{v}}.", f"What is {what}?", what, (what, ""))


def _place_password(dice: Dice, names: Names) -> Fact:
    what = f"the password of {names.place()}"
    return _thing("word", dice, names, f"T{what[1:]} is {{v}}.", f"What is {what}?", what, (what, ""))


def _price(dice: Dice, names: Names) -> Fact:
    what = f"the price of the {_the(dice, words.GOODS)}"
    return _thing("code", dice, names, f"T{what[1:]} is {{v}}.", f"What is {what}?", what, (what, ""))


def _leader(dice: Dice, names: Names) -> Fact:
    what = f"project {names.place()}"
    return _thing(
        "person",
        dice,
        names,
        f"P{what[1:]} is led by {{v}}.",
        f"Who leads {what}?",
        f"who leads {what}",
        (what, "leader"),
    )


def _content(dice: Dice, names: Names) -> Fact:
    what = f"the {_the(dice, words.BOXES)}"
    return _thing(
        "hidden", dice, names, f"T{what[1:]} holds {{v}}.", f"What does {what} hold?", f"what {what} holds", (what, "")
    )


def _bug(dice: Dice, names: Names) -> Fact:
    what = f"the bug in {names.word()}.py"
    return _thing(
        "code",
        dice,
        names,
        f"T{what[1:]} is on line {{v}}.",
        f"On which line is {what}?",
        f"on which line {what} is",
        (what, ""),
    )


def _approval(dice: Dice, names: Names) -> Fact:
    what = f"the change to {names.word()}.py"
    return _thing(
        "person",
        dice,
        names,
        f"T{what[1:]} was approved by {{v}}.",
        f"Who approved {what}?",
        f"who approved {what}",
        (what, ""),
    )


def _sighting(dice: Dice, names: Names) -> Fact:
    return sighting(names.person(), dice, names)


def sighting(who: str, dice: Dice, names: Names) -> Fact:
    """Where somebody was seen."""
    return _thing(
        "spot",
        dice,
        names,
        f"{who} was seen at {{v}}.",
        f"Where was {who} seen?",
        f"where {who} was seen",
        (who, "seen"),
    )


def _round(dice: Dice, names: Names) -> Fact:
    return choice(names.person(), dice.between(1, 30), dice, names)


def choice(who: str, number: int, dice: Dice, names: Names) -> Fact:
    """What somebody chose in a round of a game."""
    return _thing(
        "choice",
        dice,
        names,
        f"In round {number}, {who} chose to {{v}}.",
        f"What did {who} choose in round {number}?",
        f"what {who} chose in round {number}",
        (who, f"round {number}"),
    )


def _appointment(dice: Dice, names: Names) -> Fact:
    return appointment(names.person(), dice, names)


def appointment(who: str, dice: Dice, names: Names) -> Fact:
    """When somebody is to be met."""
    return _thing(
        "day",
        dice,
        names,
        f"We decided to meet {who} on {{v}}.",
        f"When did we decide to meet {who}?",
        f"when we decided to meet {who}",
        (who, "meet"),
    )


def _paint(dice: Dice, names: Names) -> Fact:
    what = _the(dice, words.ROOMS)
    return _thing(
        "colour",
        dice,
        names,
        f"We decided to paint the {what} {{v}}.",
        f"What colour did we choose for the {what}?",
        f"what colour we chose for the {what}",
        (what, "paint"),
    )


def _menu(dice: Dice, names: Names) -> Fact:
    what = _the(dice, words.EVENTS)
    return _thing(
        "food",
        dice,
        names,
        f"For the {what}, we chose {{v}}.",
        f"What did we choose for the {what}?",
        f"what we chose for the {what}",
        (what, "menu"),
    )


THINGS: list[Callable[[Dice, Names], Fact]] = [
    *[_departure, _entry_code, _place_password, _price, _leader, _content, _bug],
    *[_approval, _sighting, _round, _appointment, _paint, _menu],
]


def about_thing(dice: Dice, names: Names) -> Fact:
    """A fact about a place, a number, a piece of code, a decision, with a subject of its own."""
    return dice.pick(THINGS)(dice, names)
