"""What people tell: the lists of everyday life and the makers of values, small and odd ones among them."""

from __future__ import annotations

from collections.abc import Callable

from tools.kvasir_tiny.everyday import spelling
from tools.kvasir_tiny.everyday.spelling import WideNames
from tools.kvasir_tiny.material import material
from tools.kvasir_tiny.words import CLOSED, Dice, listed

_MATERIAL = material("values")

Make = Callable[[Dice, WideNames], str]


RELATIVES = _MATERIAL["RELATIVES"]
KIN = listed("wife;husband;son;daughter;brother;sister;mother;father;aunt;uncle;cousin;friend;boss;neighbour;dog;cat")
JOBS = _MATERIAL["JOBS"]
FAVOURITES = _MATERIAL["FAVOURITES"]
VERBS = _MATERIAL["VERBS"]
STATES = _MATERIAL["STATES"]
NOUNS = _MATERIAL["NOUNS"]
THINGS = _MATERIAL["THINGS"]
OBJECTS = _MATERIAL["OBJECTS"]
EVENTS = _MATERIAL["EVENTS"]
PUBLIC_EVENTS = listed(
    "meeting;party;concert;film;game;wedding;exam;lesson;show;dinner;call;workshop;match;release;launch"
)
COUNTED = _MATERIAL["COUNTED"]
NUMBERS = listed("two;three;four;five;six;seven;eight;nine;ten;eleven;twelve;twenty;thirty;a hundred;no")
WORKPLACES = _MATERIAL["WORKPLACES"]


def job(dice: Dice, names: WideNames) -> str:
    if dice.chance(0.1):
        job = f"{names.word()} {dice.pick(['maker', 'seller', 'teacher', 'engineer', 'doctor', 'driver'])}"
    else:
        job = dice.pick(JOBS)
    draw = dice.random()
    if draw < 0.15:
        job = f"{dice.pick(['night', 'senior', 'junior', 'young', 'retired', 'assistant', 'head', 'part-time'])} {job}"
    return f"{'an' if job[0] in 'aeiou' and not job.startswith(('uni', 'us')) else 'a'} {job}"


def workplace(dice: Dice, names: WideNames) -> str:
    if dice.chance(0.5):
        return dice.pick(WORKPLACES)
    return f"{dice.pick(['at', 'for', 'with'])} {names.place() if dice.chance(0.6) else spelling.title(dice, names)}"


def name(_: Dice, names: WideNames) -> str:
    return names.full_name()


def place(dice: Dice, names: WideNames) -> str:
    if dice.chance(0.06):
        return dice.pick(["a small village", "the north", "a big city", "the mountains", "an old mill", "a flat"])
    return names.place()


def place_name(_: Dice, names: WideNames) -> str:
    return names.place()


def date(dice: Dice, _: WideNames) -> str:
    return spelling.date(dice)


def thing(dice: Dice, names: WideNames) -> str:
    return dice.among(
        (0.07, lambda: spelling.phrase(dice, names, 9)),
        (0.5, lambda: spelling.phrase(dice, names)),
        (0.62, lambda: spelling.title(dice, names)),
        (0.74, lambda: dice.pick(CLOSED[dice.pick(list(CLOSED))])),
        (0.87, names.word),
        (1, names.full_name),
    )()


def anything(dice: Dice, names: WideNames) -> str:
    return dice.among((0.25, spelling.number), (0.5, spelling.code), (1, thing))(dice, names)


def person_or_thing(dice: Dice, names: WideNames) -> str:
    return names.person() if dice.chance(0.4) else thing(dice, names)


def when(dice: Dice, _: WideNames) -> str:
    draw = dice.random()
    day, month = dice.pick(CLOSED["day"]), dice.pick(CLOSED["month"])
    if draw < 0.3:
        return f"on {day}"
    if draw < 0.45:
        return dice.pick(["tomorrow", "tonight", "next week", "this weekend", "next month", "next year", "in an hour"])
    if draw < 0.6:
        return f"at {spelling.clock_time(dice)}"
    if draw < 0.7:
        return f"on {spelling.date(dice)}"
    if draw < 0.8:
        return f"in {month}"
    return dice.pick(
        [
            f"on {day} at {spelling.clock_time(dice)}",
            f"next {day}",
            f"on {day} morning",
            f"in {dice.between(2, 9)} days",
        ]
    )


_MAKING = listed("bake;buy;paint;repair;sell;clean;build;bring")
_DOING = listed("go swimming;see the dentist;stay at home;start a new job;move house;run a race")


def deed(dice: Dice, names: WideNames) -> str:
    return dice.pick(
        [
            f"visit {names.person()}",
            f"travel to {names.place()}",
            f"fly to {names.place()}",
            f"meet {names.person()} at {dice.pick(CLOSED['spot'])}",
            f"call {names.person()}",
            f"{dice.pick(_MAKING)} {spelling.phrase(dice, names, 2)}",
            dice.pick(_DOING),
            f"have {dice.pick(['lunch', 'dinner', 'coffee', 'breakfast'])} with {names.person()}",
        ]
    )


def where(dice: Dice, names: WideNames) -> str:
    spot = dice.pick(
        ["drawer", "kitchen", "car", "blue box", "cellar", "garden", "office", "bag", "fridge", "attic", "desk"]
    )
    draw = dice.random()
    if draw < 0.6:
        return f"{dice.pick(['in', 'under', 'behind', 'on', 'near'])} the {spot}"
    return f"in {names.place()}" if draw < 0.8 else f"with {names.person()}"


def noun(dice: Dice, names: WideNames) -> str:
    draw = dice.random()
    if draw < 0.7:
        return dice.pick(NOUNS)
    word = dice.pick(spelling.COMMON_WORDS)
    return f"{word} {dice.pick(['number', 'code', 'name', 'size', 'word', 'colour'])}" if draw < 0.85 else names.word()


def one_of(items: list[str]) -> Make:
    return lambda dice, _: dice.pick(items)


def count(dice: Dice, _: WideNames) -> str:
    return dice.pick(NUMBERS) if dice.chance(0.6) else str(dice.between(2, 99))


def age(dice: Dice, _: WideNames) -> str:
    return str(dice.between(3, 101))


def year(dice: Dice, _: WideNames) -> str:
    return str(dice.between(1920, 2024))
