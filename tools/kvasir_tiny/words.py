"""The material of kvasir-tiny's world: closed lists of things, small talk with its replies, new names on demand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

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


def words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split(";")


ONSETS = words("b d f g h j k l m n p r s t v w z br ch dr gr kl pr sh st th tr")
VOWELS = words("a e i o u a e i o u ai ea ou")
CODAS = ["", "", "", "", "n", "r", "l", "s", "k", "m", "t", "x"]
# A few names that people type, so that the model has met them; evaluation never uses them.
FAMILIAR_PEOPLE = words(
    "Ada Marco Lena Paul Maria John Sara Ivan Noor Chen Elena David Anna Omar Julia Peter Aisha Tom Nina Carlos "
    "Mia Leo Grace Hugo Emma Lucas Sofia Max Olga Karim Priya Kenji Bob Alice Eve Charlie Dana Frank Diego Ines "
    "Jonas Clara Viktor Zoe"
)
FAMILIAR_PLACES = words(
    "Porto Paris Rome Lima Oslo Cairo Berlin Madrid Vienna Kyoto Tokyo Boston Dublin London Lisbon Prague Athens "
    "Seoul Delhi Nairobi Toronto Chicago Warsaw Havana Geneva Bergen Turin Bologna Hamburg Ghent"
)


def is_held_out(word: str) -> bool:
    """Whether a made-up word or number belongs to evaluation: one in five, by a checksum of its letters."""
    return sum(position * ord(letter) for position, letter in enumerate(word.lower(), 1)) % 5 == 0


class Names:
    """Makes names that no other line of this conversation uses, from the training or the held-out part."""

    def __init__(self, dice: Dice, held_out: bool) -> None:
        self._dice = dice
        self._held_out = held_out
        self._used: set[str] = set()

    def word(self) -> str:
        """A new lower-case word, such as a password."""
        while True:
            word = self._syllables()
            if is_held_out(word) == self._held_out and word not in self._used:
                self._used.add(word)
                return word

    def person(self) -> str:
        return self._familiar(FAMILIAR_PEOPLE) or self.word().capitalize()

    def place(self) -> str:
        return self._familiar(FAMILIAR_PLACES) or self.word().capitalize()

    def digits(self, count: int) -> str:
        while True:
            number = str(10 ** (count - 1) + self._dice.below(9 * 10 ** (count - 1)))
            if count < 3 or is_held_out(number) == self._held_out:
                return number

    def _syllables(self) -> str:
        dice = self._dice
        length = 2 if dice.chance(0.7) else 3
        start = dice.pick(VOWELS) if dice.chance(0.1) else ""
        return start + "".join(dice.pick(ONSETS) + dice.pick(VOWELS) for _ in range(length)) + dice.pick(CODAS)

    def _familiar(self, names: Sequence[str]) -> str | None:
        if self._held_out or not self._dice.chance(0.12):
            return None
        name = self._dice.pick(names)
        if name in self._used:
            return None
        self._used.add(name)
        return name


CLOSED: dict[str, list[str]] = {
    "colour": words("red green blue yellow purple orange white black brown grey silver golden pink"),
    "food": words("bread cheese soup rice fish honey butter porridge cake pasta salad yoghurt jam pie"),
    "drink": words("tea coffee milk water cider lemonade cocoa juice beer wine"),
    "animal": words("foxes owls bears wolves swans otters hares whales spiders snakes frogs ravens bees"),
    "sky": words("rainy sunny cloudy windy foggy snowy stormy"),
    "season": words("spring summer autumn winter"),
    "job": _phrases(
        "a baker;a pilot;a painter;a doctor;a farmer;a teacher;a carpenter;a sailor;a cook;a judge;a tailor;a nurse;"
        "a gardener;an actor;an engineer;a writer;a miner;a potter"
    ),
    "subject": words("history chemistry music law geology medicine botany painting physics poetry astronomy"),
    "instrument": _phrases("the drum;the flute;the violin;the harp;the piano;the trumpet;the guitar;the cello"),
    "collection": words("coins stamps shells maps clocks bottles feathers stones masks buttons"),
    "vehicle": _phrases("a van;a bus;a truck;a bicycle;a tractor;a taxi;a motorbike;an old car"),
    "day": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "month": words("January February March April May June July August September October November December"),
    "spot": _phrases("the harbour;the station;the market;the bridge;the library;the mill;the church;the bank;the inn"),
    "hidden": _phrases("a lamp;a map;a ring;a letter;a knife;a rope;a coin;a book;a key;a mirror;a photograph;a watch"),
    "choice": _phrases("cooperate;betray;stay silent;wait"),
}

ADJECTIVES = words(
    "north south east west old new small large upper lower inner outer iron wooden broken quiet first second"
)
DOORS = words("gate door safe vault cellar garage lift store archive cabinet workshop tower")
BOXES = words("box drawer chest basket bag case jar cupboard barrel crate")
GOODS = words("lamp chair table coat kettle carpet clock saddle violin ladder stove mirror")
CARRIERS = words("train bus ship ferry coach boat plane")
ROOMS = words("hall kitchen office attic library stable bedroom corridor porch workshop")
EVENTS = words("dinner party meeting wedding trip fair concert picnic breakfast festival")

SYSTEM_ROLES = [
    "",
    ", a helpful assistant",
    ", a careful assistant",
    ", a patient listener",
    ", a code reviewer",
    ", an investigator",
    ", a librarian",
    ", a companion",
]
SYSTEM_RULES = [
    "Remember what you are told.",
    "Answer briefly.",
    "Say so when you were not told something.",
    "Keep secrets.",
    "Be kind.",
    "Use your tools when you need them.",
    "Do not guess.",
    "Answer in one sentence.",
]

# What a person says in passing, and the one reply that belongs to it: a reply drawn by chance would teach only noise.
SMALL_TALK = [
    ("Hello.", "Hello."),
    ("Hello!", "Hello."),
    ("Hi there.", "Hello."),
    ("Good morning.", "Good morning."),
    ("Good evening.", "Good evening."),
    ("How are you?", "I am well, thank you."),
    ("How are you today?", "I am well, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks for your help.", "You are welcome."),
    ("It is raining again.", "Rain is good for the garden."),
    ("The sun is out at last.", "Enjoy the sunshine."),
    ("I am tired today.", "Then rest a little."),
    ("I slept badly.", "Then rest a little."),
    ("I am hungry.", "Then eat something good."),
    ("I am cold.", "Then put on a coat."),
    ("What a long day.", "It will be over soon."),
    ("I had a good day.", "I am glad to hear it."),
    ("I am happy today.", "I am glad to hear it."),
    ("I am a little sad.", "I am sorry to hear it."),
    ("I missed my train.", "I am sorry to hear it."),
    ("I lost my umbrella.", "I am sorry to hear it."),
    ("Can you help me?", "Yes, I can help you."),
    ("Are you there?", "Yes, I am here."),
    ("Are you listening?", "Yes, I am listening."),
    ("Tell me a joke.", "I know no jokes."),
    ("Tell me a story.", "I know no stories."),
    ("What can you do?", "I remember what I am told."),
    ("Who are you?", "I am an assistant who remembers."),
    ("Let us go on.", "Let us go on."),
    ("Wait a moment.", "I will wait."),
    ("One moment, please.", "I will wait."),
    ("I am back.", "Welcome back."),
    ("That is all for now.", "Until later."),
    ("Goodbye.", "Goodbye."),
    ("See you tomorrow.", "Goodbye."),
    ("Never mind.", "As you wish."),
    ("Do you like music?", "I like listening."),
    ("The coffee is cold.", "Then make some more."),
    ("The soup is too hot.", "Then wait a little."),
    ("The window is open.", "Then close it."),
]
NARRATIVE_REPLY = "I see."
NARRATIVES = [
    "I walked along the river for an hour.",
    "The market was full of people this morning.",
    "We cooked too much and gave the rest away.",
    "The bus was late, as it is every week.",
    "I read half of a long book about the sea.",
    "The children next door were singing all day.",
    "Somebody left a bicycle in front of the house.",
    "The garden needs water, and the roof needs work.",
    "I spoke with {person} for a while about nothing much.",
    "Yesterday I saw {person} near {spot}.",
    "{person} sends you greetings.",
    "A letter from {place} came today, but I have not opened it.",
    "There was a long report about {place} in the paper.",
    "The road to {place} is closed for repairs.",
    "I cleaned the windows and swept the floor.",
    "The old clock stopped again last night.",
    "It was foggy, so we stayed at home and played cards.",
    "My neighbour is building a wall, very slowly.",
    "The shop on the corner has closed for good.",
    "We talked about {person} and laughed a lot.",
    "I forgot to buy {food} again.",
    "There was {food} for lunch, and it was not bad.",
    "The harvest was poor, but the {food} was fine.",
    "A dog barked all night, and nobody slept.",
    "I want to learn how to swim before the summer.",
    "The meeting took three hours and decided nothing.",
    "{person} called, but the line was bad.",
    "The lights went out twice during the storm.",
    "I have been thinking about moving, but not yet.",
    "Everybody says that {place} is lovely in {season}.",
]
