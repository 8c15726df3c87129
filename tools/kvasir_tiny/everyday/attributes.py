"""What may be told of people and things, how it is told and how it is asked.

In a template, {N} is the subject (I, Anna, my sister), {P} the same as an owner (my, Anna's), {v} what only the telling
can give, {x} what question and answer share, {live|lives} one verb in both forms; {be} and {was} are verbs of {N}.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.kvasir_tiny.everyday import spelling, values
from tools.kvasir_tiny.everyday.values import Make


@dataclass(frozen=True)
class Attribute:
    """What may be told of a subject.

    A question is "question // what was not told // answer"; the last two only where they are not the attribute's.
    """

    name: str
    tellings: list[str]
    questions: list[str]
    missing: str
    answer: str
    value: Make
    shared: Make | None = None  # {x}, which is part of the key
    speaker_only: bool = False
    no_subject: bool = False  # a thing of its own, which is nobody's


OWN_NAME = Attribute(
    "name",
    [
        "My name is {v}.",
        "My name is {v}.",
        "I am {v}.",
        "I'm {v}.",
        "Call me {v}.",
        "You can call me {v}.",
        "My name's {v}.",
    ],
    ["What is my name?", "What is my name?", "What is my name?", "Who am I?", "What am I called?", "Tell me my name."],
    "{P} name",
    "{P} name is {v}.",
    values.name,
    speaker_only=True,
)
WORK = Attribute(
    "work",
    [
        "{N} {work|works} as {v}.",
        "{N} {work|works} as {v}.",
        "{N} {be} {v}.",
        "{N} {be} {v}.",
        "{P} job: {v}.",
        "{N} {be} {v} by trade.",
    ],
    [
        "What {do|does} {N} work as?",
        "What is {P} job? // {P} job",
        "What is {P} job? // {P} job",
        "What is {P} job? // {P} job",
        "What {do|does} {N} do for a living? // what {N} {do|does} for a living",
        "What {do|does} {N} do? // what {N} {do|does}",
        "What is {P} profession? // {P} profession",
        "What {do|does} {N} do for work? // what {N} {do|does} for work",
    ],
    "what {N} {work|works} as",
    "{N} {work|works} as {v}.",
    values.job,
)
LIVE = Attribute(
    "live",
    [
        "{N} {live|lives} in {v}.",
        "{N} {live|lives} in {v}.",
        "{N} {be} living in {v}.",
        "{P} home is in {v}.",
        "{N} {live|lives} in {v} now.",
    ],
    [
        "Where {do|does} {N} live?",
        "Where {do|does} {N} live?",
        "Which town {do|does} {N} live in?",
        "Which city {do|does} {N} live in?",
        "Where is {P} home?",
        "In which place {do|does} {N} live?",
    ],
    "where {N} {live|lives}",
    "{N} {live|lives} in {v}.",
    values.place,
)
ATTRIBUTES: list[tuple[float, Attribute]] = [
    (3, LIVE),
    (3, WORK),
    (
        1,
        Attribute(
            "come",
            ["{N} {come|comes} from {v}.", "{N} {be} from {v}.", "{N} {be} originally from {v}."],
            ["Where {do|does} {N} come from?", "Where {be} {N} from?"],
            "where {N} {come|comes} from",
            "{N} {come|comes} from {v}.",
            values.place,
        ),
    ),
    (
        1,
        Attribute(
            "workplace",
            ["{N} {work|works} {v}."],
            ["Where {do|does} {N} work?", "Who {do|does} {N} work for?"],
            "where {N} {work|works}",
            "{N} {work|works} {v}.",
            values.workplace,
        ),
    ),
    (
        6,
        Attribute(
            "{x}",
            [
                "{P} {x} is called {v}.",
                "{P} {x}'s name is {v}.",
                "{P} {x} is named {v}.",
                "{N} {have|has} {a} {x} named {v}.",
                "{N} {have|has} {a} {x} called {v}.",
                "{N} {have|has} {a} {x}, {v}.",
                "{P} {x} is {v}.",
                "The name of {P} {x} is {v}.",
            ],
            [
                "What is {P} {x} called?",
                "What is {P} {x}'s name?",
                "What is {P} {x}'s name?",
                "What is the name of {P} {x}?",
                "Who is {P} {x}?",
                "Who is {v}? // who {v} is // {v} is {P} {x}.",
            ],
            "what {P} {x} is called",
            "{P} {x} is called {v}.",
            values.name,
            values.one_of(values.RELATIVES),
        ),
    ),
    (
        1,
        Attribute(
            "{x}",
            ["{P} {x} is {v}."],
            ["Who is {P} {x}? // who {P} {x} is", "What is {P} {x}'s name? // who {P} {x} is"],
            "who {P} {x} is",
            "{P} {x} is {v}.",
            values.name,
            values.one_of(values.HEADS[:4]),
        ),
    ),
    (
        0.5,
        Attribute(
            "{x}",
            ["{P} {x} is {v}."],
            ["What is {P} {x}?"],
            "{P} {x}",
            "{P} {x} is {v}.",
            values.name,
            values.one_of(values.HEADS[4:]),
        ),
    ),
    (
        1,
        Attribute(
            "age",
            ["{N} {be} {v} years old.", "{N} {be} {v}.", "{P} age is {v}.", "{N} {be} {v} years old now."],
            ["How old {be} {N}?", "How old {be} {N}?", "What is {P} age? // {P} age // {P} age is {v}."],
            "how old {N} {be}",
            "{N} {be} {v} years old.",
            values.age,
        ),
    ),
    (
        0.6,
        Attribute(
            "birthday",
            ["{P} birthday is on {v}.", "{N} {have|has} {P} birthday on {v}."],
            ["When is {P} birthday?", "What day is {P} birthday?"],
            "when {P} birthday is",
            "{P} birthday is on {v}.",
            lambda dice, _: spelling.date(dice),
        ),
    ),
    (
        0.5,
        Attribute(
            "born",
            ["{N} {was} born in {v}."],
            ["When {was} {N} born?", "In which year {was} {N} born?"],
            "when {N} {was} born",
            "{N} {was} born in {v}.",
            values.year,
        ),
    ),
    (
        3,
        Attribute(
            "favourite {x}",
            ["{P} favourite {x} is {v}.", "{P} favorite {x} is {v}.", "The {x} that {N} {like|likes} best is {v}."],
            ["What is {P} favourite {x}?", "What is {P} favorite {x}?", "Which {x} {do|does} {N} like best?"],
            "{P} favourite {x}",
            "{P} favourite {x} is {v}.",
            values.person_or_thing,
            values.one_of(values.FAVOURITES),
        ),
    ),
    (
        3,
        Attribute(
            "{x}",
            ["{N} {x} {v}."],
            ["What {do|does} {N} {x:base}?"],
            "what {N} {x}",
            "{N} {x} {v}.",
            values.thing,
            values.one_of(values.VERBS),
        ),
    ),
    (
        2,
        Attribute(
            "{x}",
            ["{N} {be} {x} {v}."],
            ["What {be} {N} {x}?"],
            "what {N} {be} {x}",
            "{N} {be} {x} {v}.",
            values.thing,
            values.one_of(values.STATES),
        ),
    ),
    (
        1,
        Attribute(
            "count {x}",
            ["{N} {have|has} {v} {x}."],
            ["How many {x} {do|does} {N} have?"],
            "how many {x} {N} {have|has}",
            "{N} {have|has} {v} {x}.",
            values.count,
            values.one_of(values.COUNTED),
        ),
    ),
    (
        4,
        Attribute(
            "{x}",
            ["{P} {x} is {v}.", "{P} {x} is {v}.", "{P} {x}: {v}.", "{P} new {x} is {v}."],
            ["What is {P} {x}?"],
            "{P} {x}",
            "{P} {x} is {v}.",
            values.anything,
            values.noun,
        ),
    ),
    (
        2,
        Attribute(
            "plan {x}",
            [
                "{N} will {v} {x}.",
                "{N} {be} going to {v} {x}.",
                "{N} {want|wants} to {v} {x}.",
                "{N} {plan|plans} to {v} {x}.",
            ],
            [
                "What will {N} do {x}?",
                "What {be} {N} going to do {x}?",
                "What {do|does} {N} want to do {x}?",
                "What is {P} plan {x}?",
            ],
            "what {N} will do {x}",
            "{N} will {v} {x}.",
            values.deed,
            values.when,
        ),
    ),
    (
        1.2,
        Attribute(
            "plan {x}",
            ["{N} {be} going to {v} {x}.", "{N} will go to {v} {x}.", "{N} {travel|travels} to {v} {x}."],
            ["Where {be} {N} going {x}?", "Where will {N} go {x}?", "What will {N} do {x}? // what {N} will do {x}"],
            "where {N} {be} going {x}",
            "{N} {be} going to {v} {x}.",
            values.place,
            values.when,
        ),
    ),
    (
        0.8,
        Attribute(
            "trip {x}",
            ["{N} {be} going to {x} {v}.", "{N} will go to {x} {v}.", "{N} {fly|flies} to {x} {v}."],
            ["When {be} {N} going to {x}?", "When will {N} go to {x}?"],
            "when {N} {be} going to {x}",
            "{N} {be} going to {x} {v}.",
            values.when,
            lambda _, names: names.place(),
        ),
    ),
    (
        1.2,
        Attribute(
            "when {x}",
            ["{P} {x} is {v}.", "{N} {have|has} {P} {x} {v}."],
            ["When is {P} {x}?", "What time is {P} {x}?"],
            "when {P} {x} is",
            "{P} {x} is {v}.",
            values.when,
            values.one_of(values.EVENTS),
        ),
    ),
    (
        0.7,
        Attribute(
            "the when {x}",
            ["The {x} is {v}."],
            ["When is the {x}?", "What time is the {x}?"],
            "when the {x} is",
            "The {x} is {v}.",
            values.when,
            values.one_of(values.PUBLIC_EVENTS),
            no_subject=True,
        ),
    ),
    (
        1.5,
        Attribute(
            "the {x}",
            ["The {x} is {v}.", "The {x} is {v}.", "The {x}: {v}."],
            ["What is the {x}?"],
            "the {x}",
            "The {x} is {v}.",
            values.anything,
            values.one_of(values.THINGS),
            no_subject=True,
        ),
    ),
    (
        0.8,
        Attribute(
            "where {x}",
            ["The {x} {v}.", "Remember that the {x} {v}."],
            ["Where {x:second}?"],
            "where the {x}",
            "The {x} {v}.",
            values.where,
            values.one_of(values.OBJECTS),
            no_subject=True,
        ),
    ),
    (
        1.5,
        Attribute(
            "the {x}",
            ["Remember the {x} {v}.", "Please remember the {x} {v}.", "Remember this {x}: {v}.", "The {x} is {v}."],
            [
                "What was the {x}?",
                "What is the {x}?",
                "Which {x} did I tell you?",
                "What {x} did I tell you?",
                "Which {x} should you remember?",
            ],
            "the {x}",
            "The {x} is {v}.",
            values.anything,
            values.one_of(["word", "number", "name", "phrase", "code", "secret", "sentence", "thing"]),
            no_subject=True,
        ),
    ),
]
# Other words for the same: of two of them, a conversation uses one.
SAME = dict(
    pair.split("=")
    for pair in values.listed(
        "mom=mother;mum=mother;dad=father;grandma=grandmother;grandpa=grandfather;neighbor=neighbour;"
        "flatmate=roommate;email address=email;hometown=home town;pin code=pin;zip code=postcode;user name=username;"
        "studying=study;count kids=count children;planning=plan;writing=write;building=build;scared of=afraid of;"
        "surname=family name;last name=family name;fiancée=fiancé;hate|hates=hate;flight number=flight;"
        "code name=code word;manager=boss"
    )
)
