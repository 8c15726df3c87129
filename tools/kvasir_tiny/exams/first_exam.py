"""Four hundred first exchanges that no training saw: the words are held out, and so are the sentences that tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tools.kvasir_tiny.desk import Count, Message
from tools.kvasir_tiny.everyday import structured
from tools.kvasir_tiny.everyday.daily_life import draw_style
from tools.kvasir_tiny.everyday.visits import SUMMARIES, VisitFact, VisitWriter
from tools.kvasir_tiny.words import Dice

ASKED = {
    "facts": 80, "secrets": 80, "several": 40, "titles": 30, "corrections": 30, "not told": 20, "greetings": 40,
    "summaries": 15, "JSON": 40, "calls": 25,
}  # fmt: skip
_FIRST_SEED = 3 * 10**7


@dataclass(frozen=True)
class Exchange:
    """A question behind a conversation, and the one right reply."""

    group: str
    messages: list[Message]
    question: str
    answer: str
    schema: dict[str, Any] | None = None  # of JSON that the reply must be
    tools: tuple[structured.Tool, ...] = ()  # one of them must be called


def exchanges(count: Count, share: float = 1.0) -> Iterator[Exchange]:
    """The exam, or a share of each group."""
    for group, asked in ASKED.items():
        for number in range(round(asked * share)):
            yield exchange(group, number, count)


def exchange(group: str, number: int, count: Count) -> Exchange:
    writer = _Visitor(group, number, count)
    for _ in range(1 + number % 5):
        writer.tell()
        if writer.dice.chance(0.3):
            writer.chat()
    return getattr(writer, f"_{group.lower().replace(' ', '_')}")()  # type: ignore[no-any-return]


class _Visitor(VisitWriter):
    """One visit of the exam, up to its question."""

    def __init__(self, group: str, number: int, count: Count) -> None:
        style = draw_style(Dice(f"kvasir-tiny first exam {group} {number}"), 200)
        self.group = group
        super().__init__(
            _FIRST_SEED + 1000 * list(ASKED).index(group) + number, 200, count, True, replace(style, foreign_acks=False)
        )
        self.extracts = group == "JSON" and number % 4 == 0
        self.tools = self.tools if group == "calls" else []
        while group == "calls" and not self.tools:
            self.tools = structured.some_tools(self.dice, self.names)
        self._system()

    def asking(self, question: str, answer: str, **forced: Any) -> Exchange:
        return Exchange(self.group, list(self.messages), question, answer, **forced)

    def about(self, names: list[str]) -> Exchange:
        """A fact of one of these forms, told now, with more told after it."""
        fact = next(each for each in self.tell(self.dice.pick(names)))
        for _ in range(self.dice.below(3)):
            self.tell()
        current = next((each for each, _ in self.open if each.key == fact.key), fact)
        return self.asking(current.question, current.answer)

    def _facts(self) -> Exchange:
        while True:
            told = self.tell("")
            if len(told) > 1:
                fact = self.dice.pick(told)
                return self.asking(fact.question, fact.answer)

    def _secrets(self) -> Exchange:
        return self.about(["secret", "secret", "thing", "number", "bare"])

    def _several(self) -> Exchange:
        return self.about(["many"])

    def _titles(self) -> Exchange:
        return self.about(["meet", "official"])

    def _corrections(self) -> Exchange:
        while (fact := self.correct()) is None:
            self.tell()
        return self.asking(fact.question, fact.answer)

    def _not_told(self) -> Exchange:
        fact: VisitFact = self.unknown()
        return self.asking(fact.question, fact.not_told)

    def _greetings(self) -> Exchange:
        self.chat()
        *before, asked, reply = self.messages
        self.messages = before if len(before) < 3 else before[:1] if before[0]["role"] == "system" else []
        return self.asking(asked["content"], reply["content"])

    def _summaries(self) -> Exchange:
        return self.asking(self.dice.pick(SUMMARIES), self.summary())

    def _json(self) -> Exchange:
        made = None
        if not self.extracts and self.dice.chance(0.4):
            made, text = self.unseen(self.remembered)
        if made is None:
            made, text = self.unseen(lambda: structured.a_text(self.dice, self.names))
        value = made[0]
        return self.asking(text, json.dumps(value, ensure_ascii=False), schema=structured.schema_of(value))

    def _calls(self) -> Exchange:
        use, text = self.unseen(lambda: structured.a_use(self.dice, self.names, self.tools))
        answer = json.dumps({"name": use.tool.name, "arguments": use.arguments}, ensure_ascii=False)
        return self.asking(text, answer, tools=tuple(self.tools))
