"""First visits, as people try an agent: several facts in a sentence, secrets, titles, greetings, JSON and forced calls.

A checksum of its letters keeps each sentence that tells, greets or asks for JSON to one part: one in five is never said
in training, and the examination says these alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.kvasir_tiny.desk import REMEMBER, Conversation, Count, Style
from tools.kvasir_tiny.everyday import structured, talk, things
from tools.kvasir_tiny.everyday.daily_life import SUMMARY_FACTS, DailyWriter
from tools.kvasir_tiny.everyday.fact import EverydayFact
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import is_held_out
from tools.kvasir_tiny.world import lower

_MATERIAL = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
FACTS: dict[str, dict[str, Any]] = _MATERIAL["facts"]
NOUNS: dict[str, list[str]] = {**_MATERIAL["nouns"], "office": _MATERIAL["office"]}
FRAMES: list[str] = _MATERIAL["frames"]
SUMMARIES: list[str] = _MATERIAL["summaries"]
NOTHING: str = _MATERIAL["nothing"]
_ALONE = [name for name in FACTS if name not in ("who live", "who age", "event with", "trip when", "born")]
_OFTEN = ["secret", "thing", "number", "bare", "many", "meet", "official", "kin", "pet", "name"]
_NEVER_CORRECTED = {"number", "bare", "many count"}
_SLOT, _NOUN = re.compile(r"\{([a-z ]+)\}"), re.compile(r"<(\w+)>")
_TURNED = [(r"\byour\b", "my"), (r"\byou are\b", "I am"), (r"\byou were\b", "I was"), (r"\byou\b", "I")]


def _plain(text: str) -> str:
    return text.lower().strip(" .?!")


_SMALL_TALK = {_plain(said) for said, _ in talk.PAIRS}  # which everyday talk says in training


@dataclass(frozen=True)
class VisitFact(Fact):
    """A fact of this module's material: the name of its form, and the nouns in it."""

    nouns: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_exact(self) -> bool:
        """Whether every character of the value counts."""
        return FACTS[self.kind]["kind"] in ("secret", "long_number")


class VisitWriter(DailyWriter):
    def __init__(self, seed: int, target: int, count: Count, held_out: bool, style: Style) -> None:
        super().__init__(seed, target, count, held_out, replace(style, room=False, with_tools=False), 0.5)
        self.held_out = held_out
        self.tools = structured.some_tools(self.dice, self.names) if self.dice.chance(0.25) else []
        self.extracts = not self.tools and self.dice.chance(0.08)

    def conversation(self) -> Conversation:
        return replace(super().conversation(), tools=[tool.schema() for tool in self.tools])

    def _system(self) -> None:
        if self.extracts:
            self._say("system", self.dice.pick(structured.SYSTEMS))
        elif self.dice.chance(0.5):
            super()._system()
        else:
            self.agent = ""
        self.tokens += sum(self.count(tool.line) + 1 for tool in self.tools)

    # -- sentences of one part

    def unseen(self, make: Callable[[], tuple[Any, str]]) -> tuple[Any, str]:
        """What `make` makes, with a text of the writer's own part of all sentences."""
        while True:
            made, text = make()
            if is_held_out(text) == self.held_out and not (self.held_out and _plain(text) in _SMALL_TALK):
                return made, text

    # -- turns

    def _introduction(self) -> None:
        if not self.extracts and self.dice.chance(0.5):
            self.chat()

    def _turn(self) -> None:
        draw = self.dice.random()
        if self.extracts or draw < 0.1:
            self._extract()
        elif self.tools and draw < 0.35:
            self._use_tool()
        elif draw < 0.45:
            self.chat()
        elif draw < 0.55:
            super()._turn()
        elif draw < 0.75:
            self._ask_turn()
        else:
            self.tell()

    def _ask_turn(self) -> None:
        draw = self.dice.random()
        if self.extracts or draw < 0.06:
            self._extract()
        elif draw < 0.1 and (memory := self.unseen(self.remembered))[0]:
            self.answer(memory[1], *memory[0][1:])
        elif self.tools and draw < 0.2:
            self._use_tool()
        elif draw < 0.23:
            self._summarize()
        elif draw < 0.26:
            self.chat()
        elif draw < 0.29:
            self._tell_and_ask()
        elif draw < 0.38:
            fact = self.unknown()
            self._exchange(self._wording(fact), fact.not_told)
        elif not self.open:
            self.tell()
        elif draw < 0.48:
            fact = self._old_fact()
            text, given = structured.a_fact(self.dice, fact, fact.nouns if isinstance(fact, VisitFact) else {})
            self.answer(self._wording(fact), text, given)
        else:
            super()._ask_turn()

    # -- telling

    def tell(self, name: str | None = None) -> list[VisitFact]:
        """A sentence of one or several facts, or one that takes an earlier fact back."""
        dice = self.dice
        if name is None and dice.chance(0.15) and self.correct():
            return []
        facts, text = self.unseen(lambda: self._telling(name or ("" if dice.chance(0.45) else dice.pick(_OFTEN))))
        if name is None and dice.chance(0.15):
            self.known |= {fact.key for fact in facts}
            more, text = self.unseen(lambda: self._after(text))
            facts += more
        is_exact = any(fact.is_exact for fact in facts)
        self._tell(facts, text if is_exact or self.held_out else talk.typed(text, dice), REMEMBER)
        return list(facts)

    def _tell_and_ask(self) -> None:
        """A sentence, and a question about it in the same message."""
        facts, text = self.unseen(lambda: self._telling(""))
        fact = self.dice.pick(facts)
        self._tell(facts, f"{text}{'' if text[-1] in '.!' else '.'} {fact.question}")
        self.messages[-1]["content"], self.taught[-1] = fact.answer, True

    def _telling(self, name: str) -> tuple[list[VisitFact], str]:
        """`name`: of a fact that is told alone; "" for a frame of several."""
        dice = self.dice
        for _ in range(200):
            if not name and dice.chance(0.8):
                frame = dice.pick(FRAMES)
            else:
                one = name or dice.pick(_ALONE)
                frame = dice.pick(FACTS[one]["told"]).replace("{v}", f"{{{one}}}")
            facts, text = self._filled(frame)
            if not any(fact.key in self.known for fact in facts):
                return facts, text
        return self._telling("who live")

    def _after(self, first: str) -> tuple[list[VisitFact], str]:
        facts, text = self._telling("")
        return facts, f"{first}{'' if first[-1] in '.!' else '.'} {text}"

    def _filled(self, frame: str, nouns: dict[str, str] | None = None) -> tuple[list[VisitFact], str]:
        nouns = nouns or self._nouns()
        facts: list[VisitFact] = []
        text = _NOUN.sub(lambda found: nouns[found[1]], frame)
        slots = list(dict.fromkeys(_SLOT.findall(frame)))
        if "many" in slots and "many count" not in slots:
            slots.append("many count")
        values: dict[str, str] = {}
        if "many" in slots:
            values["many count"], values["many"] = things.several(self.dice, self.names)
        for slot in slots:
            value = values.get(slot) or things.made(FACTS[slot]["kind"], self.dice, self.names)
            facts.append(self.fact(slot, nouns, value))
            text = text.replace(f"{{{slot}}}", value)
        told = text[0].upper() + text[1:] if frame[0] != "{" and frame[0].isupper() else text
        whole = told if told[-1] in ".!" else f"{told}."
        return [replace(fact, told=whole) for fact in facts], told

    def _nouns(self) -> dict[str, str]:
        nouns = {name: self.dice.pick(listed) for name, listed in NOUNS.items()}
        nouns["they"] = "she" if nouns["kin"] in _MATERIAL["she"] else "he"
        nouns["titled"] = things.made("titled", self.dice, self.names)
        nouns["who"] = self.dice.pick(self.people) if self.dice.chance(0.5) else self.names.person()
        return nouns

    def fact(self, name: str, nouns: dict[str, str], value: str) -> VisitFact:
        row = FACTS[name]

        def said(text: str) -> str:
            return _NOUN.sub(lambda found: nouns[found[1]], text).replace("{v}", value)

        question, answer, missing = ([*(part.strip() for part in self.dice.pick(row["asks"]).split("//")), "", ""])[:3]
        question, answer, missing = said(question), said(answer or row["answer"]), said(missing or row["missing"])
        clause = missing
        for yours, mine in _TURNED:
            clause = re.sub(yours, mine, clause)
        subject, attribute = row.get("key", ["", name])
        key = (said(subject), said(attribute))
        return VisitFact(key, "", question, clause, missing, answer, value, name, nouns)

    def correct(self) -> VisitFact | None:
        """A fact that was told is told again with another value, which holds."""
        known = [fact for fact, _ in self.open if isinstance(fact, VisitFact) and fact.kind not in _NEVER_CORRECTED]
        if not known:
            return None
        old = self.dice.pick(known)

        def again() -> tuple[list[VisitFact], str]:
            frame = self.dice.pick(FACTS[old.kind]["told"]).replace("{v}", f"{{{old.kind}}}")
            facts, told = self._filled(frame, old.nouns)
            lead = self.dice.pick(_MATERIAL["corrections"])
            return facts, lead.replace("{t}", lower(told)).replace("{T}", told)

        new, text = self.unseen(again)
        keys = {fact.key for fact in new}
        fact: VisitFact = next(fact for fact in new if fact.key == old.key)
        if fact.value == old.value:
            return None
        self.open = [each for each in self.open if each[0].key not in keys]
        self.closed = [each for each in self.closed if each[0].key not in keys]
        self.told_to_me = [fact for fact in self.told_to_me if fact.key not in keys]
        self._tell(new, text)
        return fact

    # -- asking

    def unknown(self) -> VisitFact:
        def one() -> VisitFact:
            return self.fact(self.dice.pick(_OFTEN if self.dice.chance(0.5) else _ALONE), self._nouns(), "")

        return self._untold(one, 100)

    def _wording(self, fact: Fact) -> str:
        if not isinstance(fact, VisitFact):
            return super()._wording(fact)
        if self.dice.chance(0.1) and not self.held_out:
            lead = self.dice.pick(["Tell me {}.", "Do you remember {}?", "Do you know {}?", "Can you tell me {}?"])
            return lead.format(fact.clause)
        return fact.question if self.held_out else talk.typed(fact.question, self.dice)

    def summary(self) -> str:
        """What the agent was told first, turned to the one who told it."""
        told = {fact.key: known_as(fact) for fact in self.told_to_me}
        return " ".join(list(told.values())[:SUMMARY_FACTS]) or NOTHING

    def _summarize(self) -> None:
        """All that was told, or what was told of one relative."""
        kin = [fact for fact in self.told_to_me if isinstance(fact, VisitFact) and fact.kind.startswith("kin")]
        if not kin or self.dice.chance(0.6):
            self._teach(talk.typed(self.dice.pick(SUMMARIES), self.dice), self.summary())
            return
        who = self.dice.pick(kin).nouns["kin"]
        about = [fact.answer.removeprefix("Yes. ") for fact in kin if fact.nouns["kin"] == who]
        question = self.dice.pick(
            ["What do you know about my {}?", "Tell me about my {}.", "What did I tell you about my {}?"]
        )
        self._teach(talk.typed(question.replace("{}", who), self.dice), " ".join(about[:4]))

    # -- small talk, JSON, tools

    def chat(self) -> None:
        reply, text = self.unseen(lambda: chatted(self))
        self._teach(text, reply)

    def _extract(self) -> None:
        (_, reply, given), text = self.unseen(lambda: structured.a_text(self.dice, self.names))
        self.answer(text, reply, given)

    def remembered(self) -> tuple[tuple[dict[str, Any], str, structured.Spans] | None, str]:
        """Some of what was told as an object, its JSON, what of that is given; and the request."""
        told = [(fact, fact.nouns) for fact in self.told_to_me if isinstance(fact, VisitFact)]
        told = [each for each in told if structured.can_be_a_field(each[0])]
        if not told:
            return None, self.dice.pick(SUMMARIES) + self.names.word()
        some = {self.dice.pick(told)[0].key: None for _ in range(1 + self.dice.below(4))}
        text, *rest = structured.a_memory(self.dice, [each for each in told if each[0].key in some])
        return tuple(rest), text

    def _use_tool(self) -> None:
        use, text = self.unseen(lambda: structured.a_use(self.dice, self.names, self.tools))
        self.answer(text, use.reply, use.given)
        if self.dice.chance(0.6):
            result = structured.a_result(self.dice, self.names)
            self._add({"role": "tool", "content": result}, result, learn=False)
            self._say("assistant", result, learn=True)

    def answer(self, question: str, reply: str, given: structured.Spans) -> None:
        """A reply of which the characters in `given` are forced, and not learned."""
        self._say("user", question)
        self._say("assistant", reply, learn=True)
        self.taught[-1] = given or True


def known_as(fact: Fact) -> str:
    """The plain answer, whatever question was drawn."""
    if isinstance(fact, EverydayFact):
        return fact.turned
    return fact.answer.removeprefix("Yes. ")


def chatted(writer: VisitWriter) -> tuple[str, str]:
    """A reply, and a greeting, a first question or a request, in English, French or German, before it."""
    dice = writer.dice
    if dice.chance(0.2):
        return talk.SMALL_WORLD, _worded(writer, dice.pick(_MATERIAL["requests"]))
    if dice.chance(0.5):
        hello, asked = dice.pick(list(_MATERIAL["talk"]["hello"].items())), None
        if dice.chance(0.85):
            asked = dice.pick(list(_MATERIAL["talk"]["asked"].items()))
        text = _joined(dice, hello[0], asked[0] if asked else "")
        return f"{hello[1]} {asked[1]}" if asked else hello[1], text
    tongue = dice.pick(_MATERIAL["tongues"])
    if dice.chance(0.5):
        return tongue["other"], _worded(writer, dice.pick(tongue["said"])) + dice.pick([".", "", "?", "!", " ?"])
    hello = dice.pick(tongue["hello"]) if dice.chance(0.7) else ""
    asked = dice.pick(tongue["asked"]) if not hello or dice.chance(0.7) else ""
    return tongue["reply"], _joined(dice, hello, asked)


def _worded(writer: VisitWriter, text: str) -> str:
    for slot, make in (("{n}", writer.names.person), ("{p}", writer.names.place), ("{w}", writer.names.word)):
        while slot in text:
            text = text.replace(slot, make(), 1)
    return text


def _joined(dice: Any, hello: str, asked: str) -> str:
    """The two as people join them, in any case and with any marks."""
    if not hello or not asked:
        text = (hello or asked) + dice.pick(["", "!", ".", "?", "!!", "..."] if hello else ["?", "", " ?", "!"])
    else:
        sep = dice.pick([", ", "! ", ". ", " ", " - ", "!\n", ", "])
        if sep[0] in "!." and dice.chance(0.8):
            asked = asked[0].upper() + asked[1:]
        text = hello + sep + asked + dice.pick(["?", "?", "", " ?", "??", "."])
    draw = dice.random()
    return text.lower() if draw < 0.2 else (text[0].upper() + text[1:] if draw < 0.8 else text)
