"""Names, words and numbers as people type them, of every sort: a model that has met one sort garbles the others."""

from __future__ import annotations

from collections.abc import Callable

from tools.kvasir_tiny.everyday import people
from tools.kvasir_tiny.material import material
from tools.kvasir_tiny.words import CLOSED, Dice, Names, is_held_out

_MATERIAL = material("spelling")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ACCENTED = "áàâäãåāăąæçćčďđéèêëēęěğíìîïīıłñńňóòôöõøőœřśşšßťúùûüūůűýÿźżžþð"
OTHER_SCRIPTS = _MATERIAL["OTHER_SCRIPTS"]
COMMON_WORDS = _MATERIAL["COMMON_WORDS"]
FAMILIES = [name for name in people.FAMILY_NAMES if not is_held_out(name)]


_BEFORE_NAMES = ["Dr", "Mr", "Mrs", "Ms", "Professor", "Aunt", "Uncle", "Captain"]


def is_for_training(name: str) -> bool:
    """Whether training may see this name or made-up word: no real name of evaluation, none of its made-up words."""
    return not is_held_out(name) and people.folded(name) not in people.HELD_OUT_FOLDED


GIVEN = [name for name in people.GIVEN_NAMES if is_for_training(name)]
PLACES = [name for name in people.TOWNS if is_for_training(name)]


class WideNames(Names):
    """Names of every sort. Held out: the real names of evaluation among made-up ones of its part."""

    def person(self) -> str:
        dice = self._dice
        if self.held_out:
            return self._fresh(people.HELD_OUT_NAMES, 0.7) or super().word().capitalize()
        made: Callable[[], str | None] | None = dice.among(
            (0.3, None),
            (0.62, lambda: self._fresh(GIVEN, 1.0)),
            (0.85, lambda: self._new(lambda: _spliced(dice, GIVEN).capitalize())),
            (1, lambda: self._new(lambda: odd_word(dice).capitalize())),
        )
        return _in_some_case(dice, made() or super().person()) if made else super().person()

    def full_name(self) -> str:
        """A given name, sometimes with more around it."""
        dice, name = self._dice, self.person()
        around: Callable[[str], str] | None = dice.among(
            (0.86, None),
            (0.93, lambda family: f"{name} {family}"),
            (0.95, lambda _: f"{dice.pick(_BEFORE_NAMES)} {name}"),
            (0.97, lambda _: f"{name}{dice.pick(['-', ' '])}{self.person()}"),
            (1, lambda family: f"{name} {dice.pick(['van', 'de', 'von', 'al', 'bin', 'O', 'da'])} {family}"),
        )
        return around(dice.pick(FAMILIES)) if around else name

    def place(self) -> str:
        dice = self._dice
        if self.held_out:
            return super().place()
        made: Callable[[], str | None] = dice.among(
            (0.4, lambda: None),
            (0.65, lambda: self._fresh(PLACES, 1.0)),
            (0.75, lambda: dice.pick(people.LONG_TOWNS)),
            (1, lambda: self._new(lambda: _in_some_case(dice, _spliced(dice, PLACES).capitalize()))),
        )
        return made() or super().place()

    def word(self) -> str:
        dice = self._dice
        if self.held_out or dice.chance(0.5):
            return super().word()
        if dice.chance(0.4):
            return self._fresh(COMMON_WORDS, 1.0) or super().word()
        return self._new(lambda: _spliced(dice, COMMON_WORDS) if dice.chance(0.5) else odd_word(dice))

    def _fresh(self, names: list[str], chance: float) -> str | None:
        """One of `names` that no line of the conversation uses yet."""
        if not self._dice.chance(chance):
            return None
        for _ in range(8):
            name = self._dice.pick(names)
            if name.lower() not in self._used:
                self._used.add(name.lower())
                return name
        return None

    def _new(self, made: Callable[[], str]) -> str:
        """A made-up name of the training part that nobody has."""
        while True:
            name = made()
            if name.lower() not in self._used and is_for_training(name):
                self._used.add(name.lower())
                return name


def _spliced(dice: Dice, names: list[str]) -> str:
    """The beginning of one name and the end of another."""
    first, second = dice.pick(names).lower(), dice.pick(names).lower()
    made = first[: dice.between(1, len(first))] + second[dice.below(len(second)) :]
    return made[: dice.between(4, 14)]


def odd_word(dice: Dice) -> str:
    """Letters in no order that a language knows; some accented, some of another script."""
    draw = dice.random()
    if draw < 0.12:
        script = dice.pick(OTHER_SCRIPTS)
        return "".join(dice.pick(script) for _ in range(dice.between(2, 6)))
    accents = 0.0 if draw < 0.7 else 0.25
    return "".join(dice.pick(ACCENTED if dice.chance(accents) else LETTERS) for _ in range(dice.between(2, 10)))


def _in_some_case(dice: Dice, name: str) -> str:
    draw = dice.random()
    if draw < 0.86:
        return name
    if draw < 0.93:
        return name.lower()
    if draw < 0.96:
        return name.upper() if len(name.upper()) == len(name) else name
    return "".join(letter.upper() if dice.chance(0.35) and len(letter.upper()) == 1 else letter for letter in name)


# -- other values


def number(dice: Dice, names: Names) -> str:
    """A number in one of the ways that people write them."""
    units = ["km", "kg", "metres", "hours", "euros", "dollars", "minutes", "cm"]
    return dice.among(
        (0.3, lambda: names.digits(dice.between(1, 10))),
        (0.4, lambda: f"{names.digits(3)}-{names.digits(4)}"),
        (0.48, lambda: f"+{names.digits(2)} {names.digits(3)} {names.digits(4)}"),
        (0.58, lambda: f"{dice.below(100)}{dice.pick('.,')}{dice.below(10)}{dice.below(10)}"),
        (0.66, lambda: f"{dice.pick('$€£')}{dice.between(1, 999)}"),
        (0.74, lambda: f"{dice.between(1, 100)}%"),
        (0.84, lambda: clock_time(dice)),
        (0.92, lambda: f"{dice.between(1, 31)}.{dice.between(1, 12)}.{dice.between(1920, 2039)}"),
        (1, lambda: f"{dice.between(1, 99)} {dice.pick(units)}"),
    )()


def code(dice: Dice, names: Names) -> str:
    """Letters and digits: a password, a flight, an address."""
    draw = dice.random()
    if draw < 0.3:
        letters = LETTERS + LETTERS.upper() + "0123456789" * 2
        return "".join(dice.pick(letters) for _ in range(dice.between(4, 12)))
    if draw < 0.55:
        letters = "".join(dice.pick(LETTERS.upper()) for _ in range(dice.between(1, 3)))
        return f"{letters}{dice.pick(['-', ' ', ''])}{names.digits(dice.between(2, 5))}"
    if draw < 0.75:
        host = f"{names.word()}.{dice.pick(['com', 'org', 'net', 'de', 'fr', 'io', 'co.uk', 'example'])}"
        return f"{names.word()}@{host}" if dice.chance(0.7) else f"www.{host}"
    if draw < 0.9:
        return f"{names.word()}{dice.pick(['', '-', '_', '.'])}{names.digits(dice.between(1, 4))}"
    return f"{names.word()}-{names.word()}-{names.word()}"


def clock_time(dice: Dice) -> str:
    hour, minute = dice.between(1, 23), f"{dice.below(6)}{dice.below(10)}"
    if dice.chance(0.25):
        return f"{dice.between(1, 12)} {dice.pick(['am', 'pm'])}"
    return f"{hour}:{minute}"


def date(dice: Dice) -> str:
    day, month = dice.between(1, 31), dice.pick(CLOSED["month"])
    return dice.pick(
        [f"{day} {month}", f"{month} {day}", f"{day} {month} {dice.between(1920, 2039)}", f"the {day}th of {month}"]
    )


def phrase(dice: Dice, names: Names, most: int = 4) -> str:
    """A few common words, now and then with a made-up one among them."""
    chosen = [dice.pick(COMMON_WORDS) for _ in range(dice.between(1, most))]
    if dice.chance(0.15):
        chosen[dice.below(len(chosen))] = names.word()
    if dice.chance(0.3):
        chosen.insert(0, dice.pick(["a", "the", "my", "some", "two", "old", "no"]))
    return " ".join(chosen)


def title(dice: Dice, names: Names) -> str:
    """The name of a book, a song, a shop."""
    chosen = [word.capitalize() for word in phrase(dice, names, 3).split()]
    if dice.chance(0.3):
        chosen.insert(0, "The")
    if dice.chance(0.2):
        chosen += [dice.pick(["of", "and", "in"]), names.person()]
    return " ".join(chosen)
