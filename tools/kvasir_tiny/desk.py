"""Conversations of kvasir-tiny's world as values, and the desk at which one is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tools.kvasir_tiny import tools as tool_forms
from tools.kvasir_tiny import words
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.tools import ToolUse
from tools.kvasir_tiny.words import Dice, Names

Message = dict[str, Any]
FactT = TypeVar("FactT", bound=Fact)
Count = Callable[[str], int]
# Whether training learns to say a message; or which characters of it (first, last + 1) it does not, as they are forced.
Taught = bool | tuple[tuple[int, int], ...]

REMEMBER = "I will remember that."
DISCRETION = "I will keep it to myself."
AGREED = "Agreed."
LISTENING = "I am listening."
READ = "I have read it."
NOBODY = "-"  # the author of a passage
MESSAGE_OVERHEAD = 5  # tokens of a message beside its text: start, role, newline, end, newline


def estimate_tokens(text: str) -> int:
    """About as many tokens as the tokenizer makes of this world's text, for callers that have no tokenizer at hand."""
    return 1 + int(len(text) / 2.75)


@dataclass(frozen=True)
class Question:
    """A question at the end of a conversation, and its one right reply."""

    sort: str  # told, not_told, private, passage, tool, name
    text: str
    answer: str
    told_in: int | None = None  # index of the message that told it
    fact: Fact | None = None
    tool_use: ToolUse | None = None


@dataclass(frozen=True)
class Conversation:
    """A message list as a client would send it, and the questions that may follow."""

    seed: int
    agent: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    questions: list[Question]
    taught: list[Taught] = field(default_factory=list)

    def of_sort(self, sort: str) -> list[Question]:
        return [question for question in self.questions if question.sort == sort]


@dataclass(frozen=True)
class Style:
    """The style of one conversation, drawn once for each, so that training has many ways of talking."""

    room: bool
    with_tools: bool
    ask: float  # share of turns that ask
    chatter: float  # share of turns that tell nothing
    at_once: int  # most facts in one message
    foreign_acks: bool  # replies that another assistant might have given; not learned
    people: int


def draw_style(dice: Dice, target_tokens: int) -> Style:
    return Style(
        room=dice.chance(0.35),
        with_tools=dice.chance(0.5),
        ask=0.2 + 0.5 * dice.random(),
        chatter=0.35 * dice.random() ** 2,
        at_once=dice.pick([1, 1, 2, 3, 5, 8]),
        foreign_acks=dice.chance(0.1),
        people=2 + dice.below(4 + target_tokens // 300),
    )


class Desk:
    """One conversation while it is written: its messages, their tokens, and who and what is in it."""

    new_names: type[Names] = Names

    def __init__(self, seed: int, target: int, count: Count, held_out: bool, style: Style | None) -> None:
        part = "held-out" if held_out else "training"
        self.seed, self.target, self.count = seed, target, count
        self.dice = Dice(f"kvasir-tiny {part} {seed}")
        self.style = style or draw_style(self.dice, target)
        self.names = self.new_names(self.dice, held_out)
        self.tokens = 0
        self.messages: list[Message] = []
        self.taught: list[Taught] = []
        self.known: set[tuple[str, str]] = set()  # keys of all facts, told or kept from the agent
        self.open: list[tuple[Fact, int]] = []  # told, and not asked yet
        self.closed: list[tuple[Fact, int]] = []  # told and asked
        self.private: list[Fact] = []  # told to somebody else
        self.people = [self.names.person() for _ in range(self.style.people)]
        self.speakers = [self.names.person() for _ in range(2 + self.dice.below(3))]
        self.agent = self.names.person()
        self.tool_names = self._draw_tools()

    def _draw_tools(self) -> list[str]:
        if not self.style.with_tools:
            return []
        names = [name for name in tool_forms.SIGNATURES if self.dice.chance(0.6)]
        return names or ["weather"]

    def _system(self) -> None:
        dice = self.dice
        if not self.style.room and dice.chance(0.1):
            self.agent = ""
            if self.tool_names:
                self.tokens += 17 * len(self.tool_names)
            return
        text = f"You are {self.agent}{dice.pick(words.SYSTEM_ROLES)}."
        if self.style.room and dice.chance(0.7):
            text += f" In the room are {', '.join(self.speakers[:-1])} and {self.speakers[-1]}."
        while dice.chance(0.4):
            text += f" {dice.pick(words.SYSTEM_RULES)}"
        self.tokens += 17 * len(self.tool_names)
        self._say("system", text)

    def _untold(self, make: Callable[[], FactT], tries: int = 50) -> FactT:
        """The first fact of these that nobody has heard of; or the last of them."""
        fact = make()
        while fact.key in self.known and (tries := tries - 1):
            fact = make()
        return fact

    def _say(self, role: str, text: str, name: str | None = None, learn: bool = False) -> None:
        message: Message = {"role": role, "content": text}
        if name:
            message["name"] = name
            text = f"{name}: {text}"
        self._add(message, text, learn)

    def _add(self, message: Message, text: str, learn: bool) -> None:
        joined = message["role"] == "user" and self.messages and self.messages[-1]["role"] == "user"
        self.messages.append(message)
        self.taught.append(learn)
        self.tokens += self.count(text) + (1 if joined else MESSAGE_OVERHEAD)

    def _acknowledge(self, text: str) -> None:
        """The one right short reply, or, in some conversations, any other one, which is not learned."""
        if self.style.foreign_acks:
            self._say(
                "assistant",
                self.dice.pick(["Noted.", "Ok.", "Understood.", "Thanks for telling me!", "Good to know.", text]),
            )
        else:
            self._say("assistant", text, learn=True)
