"""The material of kvasir-tiny's world: closed lists of things, small talk with its replies, new names on demand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from tools.kvasir_tiny.everyday.people import HELD_OUT_FOLDED
from tools.kvasir_tiny.material import material

_MATERIAL = material("words")

T = TypeVar("T")


class Dice(random.Random):
    """A seeded source of choices, built on `random()` alone so that every Python version draws the same bytes."""

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def between(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def chance(self, p: float) -> bool:
        return self.random() < p

    def among(self, *ways: tuple[float, T]) -> T:
        """The first way whose bound is above a number of [0, 1) that is drawn now; the last bound is 1."""
        draw = self.random()
        return next(way for bound, way in ways if draw < bound)


def words(text: str) -> list[str]:
    return text.split()


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


ONSETS = words("b d f g h j k l m n p r s t v w z br ch dr gr kl pr sh st th tr")
VOWELS = words("a e i o u a e i o u ai ea ou")
CODAS = ["", "", "", "", "n", "r", "l", "s", "k", "m", "t", "x"]
# A few names that people type, so that the model has met them; evaluation never uses them.
FAMILIAR_PEOPLE = _MATERIAL["FAMILIAR_PEOPLE"]
FAMILIAR_PLACES = _MATERIAL["FAMILIAR_PLACES"]


def is_held_out(word: str) -> bool:
    """Whether a made-up word or number belongs to evaluation: one in five, by a checksum of its letters."""
    return sum(position * ord(letter) for position, letter in enumerate(word.lower(), 1)) % 5 == 0


class Names:
    """Makes names that no other line of this conversation uses, from the training or the held-out part."""

    def __init__(self, dice: Dice, held_out: bool) -> None:
        self._dice = dice
        self.held_out = held_out
        self._used: set[str] = set()

    def word(self) -> str:
        """A new lower-case word, such as a password."""
        while True:
            word = self._syllables()
            if not self.held_out and word in HELD_OUT_FOLDED:
                continue
            if is_held_out(word) == self.held_out and word not in self._used:
                self._used.add(word)
                return word

    def person(self) -> str:
        return self._familiar(FAMILIAR_PEOPLE) or self.word().capitalize()

    def place(self) -> str:
        return self._familiar(FAMILIAR_PLACES) or self.word().capitalize()

    def digits(self, count: int) -> str:
        while True:
            number = str(10 ** (count - 1) + self._dice.below(9 * 10 ** (count - 1)))
            if count < 3 or is_held_out(number) == self.held_out:
                return number

    def _syllables(self) -> str:
        dice = self._dice
        length = 2 if dice.chance(0.7) else 3
        start = dice.pick(VOWELS) if dice.chance(0.1) else ""
        return start + "".join(dice.pick(ONSETS) + dice.pick(VOWELS) for _ in range(length)) + dice.pick(CODAS)

    def _familiar(self, names: Sequence[str]) -> str | None:
        if self.held_out or not self._dice.chance(0.12):
            return None
        name = self._dice.pick(names)
        if name in self._used:
            return None
        self._used.add(name)
        return name


CLOSED: dict[str, list[str]] = _MATERIAL["CLOSED"]

# What a subject's name is made of.
_PARTS = {
    "adjective": words(
        "north south east west old new small large upper lower inner outer iron wooden broken quiet first second"
    ),
    "door": words("gate door safe vault cellar garage lift store archive cabinet workshop tower"),
    "box": words("box drawer chest basket bag case jar cupboard barrel crate"),
    "goods": words("lamp chair table coat kettle carpet clock saddle violin ladder stove mirror"),
    "carrier": words("train bus ship ferry coach boat plane"),
    "room": words("hall kitchen office attic library stable bedroom corridor porch workshop"),
    "event": words("dinner party meeting wedding trip fair concert picnic breakfast festival"),
}


def a_word(kind: str, dice: Dice) -> str:
    """Empty for a kind that is no part of a subject's name."""
    return dice.pick(_PARTS[kind]) if kind in _PARTS else ""


SYSTEM_ROLES = _MATERIAL["SYSTEM_ROLES"]
SYSTEM_RULES = _MATERIAL["SYSTEM_RULES"]

# What a person says in passing, and the one reply that belongs to it: a reply drawn by chance would teach only noise.
SMALL_TALK = _MATERIAL["SMALL_TALK"]
NARRATIVE_REPLY = "I see."
NARRATIVES = _MATERIAL["NARRATIVES"]
