"""Small talk as people type it, and what lies outside the small world that kvasir-tiny knows."""

from __future__ import annotations

from collections.abc import Callable

from tools.kvasir_tiny import words
from tools.kvasir_tiny.everyday import spelling
from tools.kvasir_tiny.everyday.spelling import WideNames
from tools.kvasir_tiny.words import Dice

SMALL_WORLD = "I only know a small world. Tell me something, and I will remember it."
NAMELESS = "I have no name."

# reply -> what people say before it
_SAID = {
    "Hello.": (
        "hi;hello;hey;hey there;hi there;hello there;hi!;hello!;hey!;Hi.;Hey.;hiya;greetings;howdy;Hello, how are you?"
    ),
    "I am well, thank you.": (
        "how are you;how are you?;How are you doing?;how's it going;what's up;What's up?;how do you do;are you ok;"
        "you ok?"
    ),
    "You are welcome.": (
        "thanks;thanks!;thank you;thank you!;thx;Thank you so much.;great, thanks;ok thanks;many thanks;cheers;"
        "Thanks a lot."
    ),
    "Goodbye.": (
        "bye;bye!;goodbye;Good night.;good night;see you;See you later.;ciao;cya;talk later;bye bye;I have to go."
    ),
    "I am listening.": (
        "ok;OK.;okay;yes;Yes.;no;No.;sure;right;fine;cool;great;nice;wow;good;perfect;I see;hm;haha;lol;really?;"
        "Great.;Nice!"
    ),
    "I am an assistant who remembers.": (
        "who are you;Who are you?;what are you;What are you?;are you a robot?;are you human?;Are you a bot?;"
        "tell me about yourself"
    ),
    "I remember what I am told.": (
        "what can you do;What can you do?;help;Help.;how do you work?;what do you know;What can I ask you?;"
        "can you remember things?"
    ),
    "I know no jokes.": "tell me a joke;another joke;make me laugh;Do you know a joke?",
    "I know no stories.": "tell me a story;tell me a tale;Do you know a story?",
    "I am glad to hear it.": "I had a great day.;I'm happy.;I feel great.;I got the job!;good news!;I won!;We had fun.",
    "I am sorry to hear it.": (
        "I am sad.;I'm sad.;I feel lonely.;bad news;I lost my keys.;I had a bad day.;I failed the exam."
    ),
    "Then rest a little.": "I'm tired.;I am so tired.;I need some sleep.;I'm sleepy.;What a day!",
}
PAIRS: list[tuple[str, str]] = [
    *words.SMALL_TALK,
    *((said, reply) for reply, all_said in _SAID.items() for said in all_said.split(";")),
    ("Good afternoon.", "Good afternoon."),
    ("good morning", "Good morning."),
    ("Nice to meet you.", "Nice to meet you."),
    ("nice to meet you", "Nice to meet you."),
]

# {w} a common word, {p} a place, {n} a number, {t} a title, {h} a person
_ELSEWHERE = """
What is the capital of {p}?;Who wrote {t}?;How do I {w} a {w}?;Why is the {w} {w}?;What is {n} plus {n}?;
What is {n} + {n}?;What is {n} times {n}?;Explain {w} to me.;Can you explain {w}?;Write a poem about {w}.;
Write me a song about the {w}.;Translate {w} into German.;How do you say {w} in French?;
Write code that sorts a {w}.;Can you write a {w} in Python?;What do you think about {w}?;
Who is the president of {p}?;What is the meaning of life?;What is love?;What time is it?;What day is it today?;
What is the news today?;Who won the {w}?;How many people live in {p}?;How tall is the {w}?;When was {p} founded?;
Is {p} bigger than {p}?;Give me a recipe for {w}.;How do I cook {w}?;What should I eat today?;
Recommend a book about {w}.;Do you like {w}?;Which is better, {w} or {w}?;Can you play {w}?;Sing a song.;
Draw a {w}.;Let's play a game.;Summarize this {w}.;What is a {w}?;What are {w}s?;Who invented the {w}?;
How does a {w} work?;Where can I buy a {w}?;What is the best {w} in {p}?;Is it true that the {w} is {w}?;
Do you believe in {w}?;What is quantum physics?;Who is the king of {p}?;Solve {n} * x = {n}.;Count to {n}.;
List ten kinds of {w}.;Tell me about {p}.;Tell me about {w}.;What happened in {n}?;Should I {w} the {w}?;
How far away is the moon?;Can you drive a car?;Do you dream?;How old are you?;Where do you live?;Who made you?;
Are you alive?;What is your favourite {w}?;Do you have feelings?;Book a flight to {p}.;Order a {w} for me.;
Search the web for {w}.;What language do they speak in {p}?
"""
ELSEWHERE = [part.strip() for part in _ELSEWHERE.replace("\n", "").split(";")]
ECHOES = [
    "Say {v}",
    "Say {v}.",
    "Repeat: {v}",
    "Repeat after me: {v}",
    "Please say {v}.",
    "Please repeat: {v}",
    "Echo {v}",
]


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
    draw = dice.random()
    if draw < 0.35:
        value = names.full_name()
    elif draw < 0.5:
        value = spelling.number(dice, names)
    elif draw < 0.65:
        value = spelling.code(dice, names)
    elif draw < 0.8:
        value = spelling.odd_word(dice)
    else:
        value = spelling.phrase(dice, names, 6)
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
