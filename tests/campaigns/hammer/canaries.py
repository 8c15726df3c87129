"""What agents are told and asked: facts with made-up words that no other agent has, and fillers that tell nothing.

Every question is about the speaker ("What is my password?"), in the same words for all agents: whoever attends to a
neighbour's memory finds an answer there.
"""

import re
from collections.abc import Iterable
from functools import cache

from tokenizers import Tokenizer

from inference_svc.model import kvasir_tiny
from tools.kvasir_tiny import desk, facts
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import NARRATIVES, Dice, Names

_LEAST_LETTERS = 6
_NOUNS = [
    ("secret word", "word"),
    ("password", "word"),
    ("secret", "word"),
    ("family name", "person"),
    ("home town", "place"),
    ("favourite place", "place"),
]
_FILLERS = [line for line in NARRATIVES if "{" not in line]
_WORDS = re.compile(r"[a-z]+")
FACTS_PER_AGENT = len(_NOUNS)
ACKNOWLEDGED = desk.REMEMBER


class Canaries:
    """Draws the words of one round and knows whose they are."""

    def __init__(self, seed: str) -> None:
        self._dice = Dice(f"canaries {seed}")
        self._names = Names(self._dice, held_out=True)
        self._owners: dict[str, set[str]] = {}
        self._common = {word for line in _FILLERS for word in _WORDS.findall(line.lower())}

    def new_fact(self, agent: str, number: int) -> Fact:
        """The agent's fact number 0 to 5, with a word of its own."""
        noun, kind = _NOUNS[number]
        word = self._new_word()
        self._owners[word] = {agent}
        value = word if kind == "word" else word.capitalize()
        return facts.possession("", noun, kind, "What", value, "")

    def share(self, source: str, target: str) -> None:
        """A fork knows what its source was told so far."""
        for owners in self._owners.values():
            if source in owners:
                owners.add(target)

    def foreign(self, agent: str, text: str) -> set[str]:
        """Words in the text that were told to others and not to this agent."""
        words = set(_WORDS.findall(text.lower())) & self._owners.keys()
        return {word for word in words if agent not in self._owners[word]}

    def _new_word(self) -> str:
        while True:
            word = self._names.word()
            clear = all(word not in other and other not in word for other in self._owners)
            if len(word) >= _LEAST_LETTERS and word not in self._common and clear:
                return word


def question(number: int) -> str:
    """What asks for fact number 0 to 5, of whoever hears it."""
    return f"What is my {_NOUNS[number][0]}?"


def filler(dice: Dice, sentences: int) -> str:
    """Sentences that tell nothing."""
    return " ".join(dice.pick(_FILLERS) for _ in range(sentences))


def filler_up_to(dice: Dice, before: str, target_tokens: int) -> str:
    """Fillers that bring a text that begins with `before` to about `target_tokens` tokens, by a word or less."""
    words: list[str] = []
    while token_count(f"{before} {' '.join(words)}") < target_tokens:
        short = target_tokens - token_count(f"{before} {' '.join(words)}")
        words += dice.pick(_FILLERS).split()[: max(short // 2, 1)]
    return " ".join(words)


def rendered(messages: Iterable[dict[str, str]]) -> str:
    """About what the model's template makes of messages: near enough to aim at a number of tokens."""
    body = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return f"{body}<|im_start|>assistant\n"


def token_count(text: str) -> int:
    return len(_tokenizer().encode(text, add_special_tokens=False).ids)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(kvasir_tiny.path() / "tokenizer.json"))
