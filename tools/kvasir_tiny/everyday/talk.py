"""Small talk as people type it, and what lies outside the small world that kvasir-tiny knows."""

from __future__ import annotations

from collections.abc import Callable

from tools.kvasir_tiny import words
from tools.kvasir_tiny.everyday import spelling
from tools.kvasir_tiny.everyday.spelling import WideNames
from tools.kvasir_tiny.material import material
from tools.kvasir_tiny.words import Dice

_MATERIAL = material("talk")

SMALL_WORLD = "I only know a small world. Tell me something, and I will remember it."
NAMELESS = "I have no name."

# reply -> what people say before it
_SAID = _MATERIAL["_SAID"]
PAIRS: list[tuple[str, str]] = [
    *words.SMALL_TALK,
    *((said, reply) for reply, all_said in _SAID.items() for said in all_said.split(";")),
    ("Good afternoon.", "Good afternoon."),
    ("good morning", "Good morning."),
    ("Nice to meet you.", "Nice to meet you."),
    ("nice to meet you", "Nice to meet you."),
]

# {w} a common word, {p} a place, {n} a number, {t} a title, {h} a person
_ELSEWHERE = _MATERIAL["_ELSEWHERE"]
ELSEWHERE = [part.strip() for part in _ELSEWHERE.replace("\n", "").split(";")]
ECHOES = _MATERIAL["ECHOES"]


def elsewhere(dice: Dice, names: WideNames) -> str:
    """A question about the large world."""
    text = dice.pick(ELSEWHERE)
    made_by: dict[str, Callable[[], str]] = {
        "{w}": lambda: dice.pick(spelling.COMMON_WORDS) if dice.chance(0.8) else names.word(),
        "{p}": names.place,
        "{n}": lambda: str(dice.between(1, 9999)),
        "{t}": lambda: spelling.title(dice, names),
    }
    for slot, made in made_by.items():
        while slot in text:
            text = text.replace(slot, made(), 1)
    return text


def echo(dice: Dice, names: WideNames) -> tuple[str, str]:
    """Something to say after somebody, and what is to be said."""
    value = dice.among(
        (0.35, names.full_name),
        (0.5, lambda: spelling.number(dice, names)),
        (0.65, lambda: spelling.code(dice, names)),
        (0.8, lambda: spelling.odd_word(dice)),
        (1, lambda: spelling.phrase(dice, names, 6)),
    )()
    return dice.pick(ECHOES).replace("{v}", value), value


def typed(text: str, dice: Dice) -> str:
    """Mostly the text itself; sometimes as it is typed in a hurry. Names keep their letters."""
    draw = dice.random()
    if draw < 0.7 or not text:
        return text
    if draw < 0.76:
        return text.rstrip(".?")
    if draw < 0.8:
        return text.replace("What is", "What's", 1).replace("I am ", "I'm ", 1).replace("Who is", "Who's", 1)
    if draw < 0.83:
        return text[:-1] + dice.pick(["!", "??", " ?", "...", "?!"]) if text[-1] in ".?" else text
    first, _, rest = text.partition(" ")
    if first.lower() in _SMALL and first != "I":
        text = f"{first.lower()} {rest}" if rest else first.lower()
    if draw < 0.93:
        text = text.rstrip(".?")
    if draw < 0.96:
        text = text.replace(" I ", " i ").replace("I ", "i ", 1) if text.startswith("I ") or " I " in text else text
        text = text.replace("what is", "whats", 1) if dice.chance(0.3) else text.replace("what is", "what's", 1)
    return text


_SMALL = set(
    words.words(
        "what who where when which how do does did is are am tell can please my the our in for remember what's who's "
        "call you your repeat say on"
    )
)
