"""Values of first visits: passwords, long numbers, titled names, several names; of training's part or the exam's."""

from __future__ import annotations

from collections.abc import Callable

from tools.kvasir_tiny.everyday import people, spelling, values
from tools.kvasir_tiny.everyday.spelling import LETTERS, WideNames
from tools.kvasir_tiny.words import CLOSED, Dice, is_held_out, listed

_MARKS = "!@#$%^&*-_+=:/~|;<>()[]{}"
_LETTERS_AND_DIGITS = LETTERS + LETTERS.upper() + "0123456789"
_LEET = str.maketrans("aeo", "430")
_TITLES = listed("Dr.;Dr.;Dr;Mr.;Mrs.;Ms.;Prof.;Professor;Mr;Mrs;Miss;Prof. Dr.;Sir;Captain;Father;Sister;Judge")
_COUNTS = ("", "one", "two", "three", "four")
_FAMILIES = [[name for name in people.FAMILY_NAMES if is_held_out(name) == part] for part in (False, True)]
_EMOJI = "😀😂🙂😍😎🤖👍🎉🚀🐶🐱🍕🌍❤️⭐☀️🔑📚"


def made(kind: str, dice: Dice, names: WideNames) -> str:
    """A value of `kind`; open ones are of the part of `names`."""
    make = _KINDS.get(kind)
    if make is None:
        value: str = getattr(values, kind)(dice, names)
        return value
    for _ in range(60):
        value = make(dice, names)
        if kind not in _OPEN or is_held_out(value) == names.held_out:
            break
    return value


def several(dice: Dice, names: WideNames) -> tuple[str, str]:
    """How many, and their names: "three", "Tom, Ann and Leo"."""
    found = [names.person() for _ in range(dice.pick([2, 2, 2, 3, 3, 4]))]
    return _COUNTS[len(found)], f"{', '.join(found[:-1])} and {found[-1]}"


def secret(dice: Dice, names: WideNames) -> str:
    ways = ((0.4, password), (0.72, long_number), (0.88, spelling.code), (0.95, spelling.number), (1, _with_emoji))
    return dice.among(*ways)(dice, names)


def _with_emoji(dice: Dice, names: WideNames) -> str:
    return f"{names.word()} {dice.pick(_EMOJI)}"


def password(dice: Dice, names: WideNames) -> str:
    """As people and managers of passwords make them; none ends as a sentence does."""
    prefixes, mixed = ["sk", "pk", "key", "ghp", "v1", "id"], _LETTERS_AND_DIGITS + "0123456789" + _MARKS
    made: Callable[[str, str], str] = dice.among(
        (0.15, lambda word, mark: f"{word}{dice.below(1000)}{mark}{_letters(dice, dice.between(1, 4))}"),
        (0.3, lambda word, mark: f"{word.capitalize()}{mark}{dice.below(10000)}{dice.pick(['', mark, 'x'])}"),
        (0.42, lambda word, mark: f"{word}-{names.word().capitalize()}{mark}{dice.below(100)}"),
        (0.5, lambda word, mark: f"{word.translate(_LEET)}{mark}{dice.below(10)}"),
        (0.6, lambda *_: f"{_letters(dice, 4)}-{_letters(dice, 4)}-{_letters(dice, 4)}"),
        (0.7, lambda *_: f"{dice.pick(prefixes)}{dice.pick('-_')}{_letters(dice, dice.between(6, 14))}"),
        (1, lambda *_: f"{_letters(dice, dice.between(5, 14), mixed)}{dice.pick(LETTERS)}"),
    )
    return made(names.word(), dice.pick(_MARKS))


def _letters(dice: Dice, count: int, letters: str = _LETTERS_AND_DIGITS) -> str:
    return "".join(dice.pick(letters) for _ in range(count))


def long_number(dice: Dice, names: WideNames) -> str:
    prefixes = ["INV", "A", "NO", "X", "DE", "PR"]
    return dice.among(
        (0.75, lambda: ("0" if dice.chance(0.1) else "") + names.digits(dice.between(3, 12))),
        (0.85, lambda: " ".join(names.digits(4) for _ in range(dice.between(2, 4)))),
        (0.93, lambda: f"{dice.between(1, 999)},{dice.between(100, 999)},{dice.between(100, 999)}"),
        (1, lambda: f"{dice.pick(prefixes)}{dice.pick(['-', '', ' '])}{names.digits(dice.between(4, 9))}"),
    )()


def titled(dice: Dice, names: WideNames) -> str:
    """A title, and a family name or another."""
    name = dice.pick(_FAMILIES[names.held_out]) if dice.chance(0.5) else names.person()
    return f"{dice.pick(_TITLES)} {name}"


def _named(dice: Dice, names: WideNames) -> str:
    return titled(dice, names) if dice.chance(0.06) else names.full_name()


def _thing(dice: Dice, names: WideNames) -> str:
    if names.held_out:
        return names.word() if dice.chance(0.5) else f"{dice.pick(['the', 'a', 'old'])} {names.word()}"
    return values.person_or_thing(dice, names)


def _phrase(dice: Dice, names: WideNames) -> str:
    return f"{names.word()} {names.word()}" if names.held_out else spelling.phrase(dice, names, 5)


_KINDS: dict[str, Callable[[Dice, WideNames], str]] = {
    "person_name": _named,
    "titled": titled,
    "several": lambda dice, names: several(dice, names)[1],
    "secret": secret,
    "long_number": long_number,
    "thing": _thing,
    "things": lambda dice, names: _thing(dice, names) + (f" and {_thing(dice, names)}" if dice.chance(0.3) else ""),
    "small_count": lambda dice, _: dice.pick(values.NUMBERS[:8]) if dice.chance(0.7) else str(dice.between(2, 12)),
    "title": lambda dice, names: f"The {names.word().capitalize()}" if names.held_out else spelling.title(dice, names),
    "weekday": lambda dice, _: dice.pick(CLOSED["day"]),
    "clock": lambda dice, _: spelling.clock_time(dice),
    "email": lambda dice, names: (
        f"{names.word()}{dice.pick(['', '.x', '7'])}@{names.word()}.{dice.pick(['com', 'org', 'de', 'io'])}"
    ),
    "phone": lambda dice, names: dice.pick(["", "+49 ", "0"]) + names.digits(dice.between(6, 9)),
    "number": lambda dice, names: names.digits(dice.between(1, 4)),
    "small": lambda dice, _: str(dice.between(1, 60)),
    "price": lambda dice, names: f"{names.digits(dice.between(1, 3))}.{dice.pick(['5', '25', '99', '49', '95', '75'])}",
    "word": lambda _, names: names.word(),
    "phrase": _phrase,
    "event": lambda dice, names: (f"{names.word()} " if dice.chance(0.3) else "") + dice.pick(values.PUBLIC_EVENTS),
    "file": lambda dice, names: (
        f"{dice.pick(['', 'src/', 'docs/', './'])}{names.word()}.{dice.pick(['py', 'txt', 'md', 'json'])}"
    ),
    "symbol": lambda dice, _: "".join(dice.pick(LETTERS.upper()) for _ in range(dice.between(3, 4))),
    "tongue": lambda dice, _: dice.pick(
        ["German", "French", "Spanish", "Italian", "Polish", "Greek", "Dutch", "Czech"]
    ),
}
_OPEN = {"titled", "secret", "long_number", "thing", "things", "title", "email", "phone", "phrase", "file", "symbol"}
