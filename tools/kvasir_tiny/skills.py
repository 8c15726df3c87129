"""Tasks for kvasir-tiny beyond needles: corrections in a row, long copies out of memory, and tools with two arguments.

They stand for what larger models are given (`inference_svc/model/quality/tasks.jsonl`): it does not add, and edits no
code. A correction says which of several tellings holds; a summary copies eight facts as they were told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tools.kvasir_tiny import tools, world
from tools.kvasir_tiny.desk import Count
from tools.kvasir_tiny.everyday.daily_life import SUMMARY_FACTS, SUMMARY_REQUEST, DailyWriter, draw_style
from tools.kvasir_tiny.everyday.fact import EverydayFact
from tools.kvasir_tiny.words import Dice, Names

EACH = 8
_TOKENS = 200
_CORRECTIONS = 3
_FIRST_SEED = 2 * 10**7


def tasks(count: Count) -> Iterator[dict[str, Any]]:
    """Of each kind in turn, so that an exam that is cut short has some of all."""
    for number in range(EACH):
        yield from (_correction(number, count), _summary(number, count), _arguments(number, count))


def _correction(number: int, count: Count) -> dict[str, Any]:
    """Facts, of which several are told again with another value; one of these is asked for."""
    writer = _writer("corrections", number, count)
    while not (corrected := [fact for fact in writer.corrected if fact in (told for told, _ in writer.open)]):
        writer.correct(_CORRECTIONS)
    fact = writer.dice.pick(corrected).asked(writer.dice)
    return _task("corrections", writer, fact.question, fact.answer)


def _summary(number: int, count: Count) -> dict[str, Any]:
    writer = _writer("summaries", number, count)
    answer = " ".join(fact.told for fact in writer.told_to_me[:SUMMARY_FACTS])
    return _task("summaries", writer, SUMMARY_REQUEST, answer)


def _arguments(number: int, count: Count) -> dict[str, Any]:
    """A call with two arguments, after a conversation with calls."""
    dice = Dice(f"kvasir-tiny skills arguments {number}")
    style = replace(draw_style(dice, _TOKENS), room=False, with_tools=True, ask=0.5, foreign_acks=False)
    names = ["distance", "send", *(name for name in tools.SIGNATURES if dice.chance(0.4))]
    writer = world.Writer(_FIRST_SEED + number, _TOKENS, count, True, style)
    writer.tool_names = sorted(set(names))
    writer.write()
    use = tools.a_use(names[number % 2], dice, Names(dice, held_out=True))
    talk = writer.conversation()
    return {
        "task": "tool_arguments",
        "messages": [*talk.messages, {"role": "user", "content": use.question}],
        "tools": talk.tools,
        "answer": use.call_text,
    }


def _task(name: str, writer: DailyWriter, question: str, answer: str) -> dict[str, Any]:
    return {"task": name, "messages": [*writer.messages, {"role": "user", "content": question}], "answer": answer}


def _writer(kind: str, number: int, count: Count) -> _Corrected:
    """At its desk everything has been told, and corrected."""
    style = replace(
        draw_style(Dice(f"kvasir-tiny skills {kind} {number}"), _TOKENS),
        room=False,
        with_tools=False,
        foreign_acks=False,
        ask=0.1,
        at_once=2,
    )
    writer = _Corrected(_FIRST_SEED + number, _TOKENS, count, True, style, 1.0)
    writer.write()
    writer.tell_at_least(4)
    return writer


class _Corrected(DailyWriter):
    """An everyday conversation in which the newest facts are told again, with other values."""

    def tell_at_least(self, facts: int) -> None:
        while len(self.told_to_me) < facts:
            self._tell_facts()

    def correct(self, times: int) -> None:
        for _ in range(times):
            self._correct()

    @property
    def corrected(self) -> list[EverydayFact]:
        """Facts that were told in place of others, and not taken back."""
        leads = ("No, ", "Sorry, ", "Actually, ", "I was wrong. ", "Correction: ")
        return [
            fact
            for fact, place in self.open
            if isinstance(fact, EverydayFact) and str(self.messages[place]["content"]).startswith(leads)
        ]
