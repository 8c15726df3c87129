"""Three hundred names that no training saw, told in the small world's own English: copying alone is measured."""

from __future__ import annotations

from collections.abc import Iterator

from tools.kvasir_tiny import desk, facts
from tools.kvasir_tiny.desk import REMEMBER, Conversation, Count, Message, Question
from tools.kvasir_tiny.everyday import people
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import Dice
from tools.kvasir_tiny.world import Writer

NAMES = 300
NAMES_EACH = {300: 5, 1500: 15, 4000: 20}  # by length of the conversation, in tokens
_HEADS = [(noun, kind, wh) for noun, kind, wh in facts.POSSESSIONS if kind == "person"]
_TOKENS_OF_A_NAME = 30  # about what telling takes


def conversations(length: int, count: Count, names: int = NAMES) -> Iterator[Conversation]:
    """Conversations of about `length` tokens; each of the first `names` held-out names is told in one of them."""
    each = NAMES_EACH[length]
    drawn = sorted(people.HELD_OUT_NAMES[:NAMES], key=lambda name: Dice(f"{name} {length}").random())[:names]
    for seed, first in enumerate(range(0, len(drawn), each)):
        yield _conversation(seed, length, drawn[first : first + each], count)


def _conversation(seed: int, length: int, names: list[str], count: Count) -> Conversation:
    dice = Dice(f"kvasir-tiny names {length} {seed}")
    told = list(_told(dice, names))
    writer = _Around(seed, length - _TOKENS_OF_A_NAME * len(names), count, {fact.key for fact in told})
    writer.write()
    talk = writer.conversation()
    messages, questions = _with(talk.messages, told)
    return Conversation(seed, talk.agent, messages, talk.tools, questions)


def _told(dice: Dice, names: list[str]) -> Iterator[Fact]:
    """A fact for each name: the speaker's own, then that of somebody or something of theirs."""
    nouns: list[str | tuple[str, str, str]] = [*facts.COMPANIONS, *_HEADS]
    yield facts.own_name(names[0])
    for name in names[1:]:
        noun = nouns.pop(dice.below(len(nouns)))
        if isinstance(noun, str):
            yield facts.companion("", noun, name, "")
        else:
            head, kind, question_word = noun
            yield facts.possession("", head, kind, question_word, name, "")


def _with(messages: list[Message], told: list[Fact]) -> tuple[list[Message], list[Question]]:
    """The conversation with the facts told all over it, and a question about each."""
    ends = [
        index + 1 for index, message in enumerate(messages) if message["role"] == "assistant" and message["content"]
    ]
    places = [ends[number * len(ends) // len(told)] for number in range(len(told))]
    found = list(messages)
    questions: list[Question] = []
    for number in reversed(range(len(told))):
        fact = told[number]
        reply = {"role": "assistant", "content": REMEMBER}
        found[places[number] : places[number]] = [{"role": "user", "content": fact.told}, reply]
        questions.insert(0, Question("name", fact.question, fact.answer, places[number] + 2 * number, fact))
    return found, questions


class _Around(Writer):
    """What else is said: nothing about the facts with `keys`."""

    def __init__(self, seed: int, length: int, count: Count, keys: set[tuple[str, str]]) -> None:
        style = desk.Style(False, False, 0.3, 0.1, 2, False, 4)
        super().__init__(seed, length, count, True, style)
        self.known |= keys

    def _introduction(self) -> None:
        """Nobody else has a name here."""
