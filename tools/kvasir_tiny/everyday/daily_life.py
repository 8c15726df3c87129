"""Conversations as people have them: everyday facts beside those of the small world, and any name in both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tools.kvasir_tiny import desk
from tools.kvasir_tiny.desk import LISTENING, REMEMBER, Conversation, Count, Question, Style
from tools.kvasir_tiny.everyday import fact as everyday_facts
from tools.kvasir_tiny.everyday import talk, values
from tools.kvasir_tiny.everyday.fact import EverydayFact
from tools.kvasir_tiny.everyday.spelling import WideNames
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import Dice
from tools.kvasir_tiny.world import Writer, lower

SUMMARY_FACTS = 8
# What the engine asks before it drops the oldest messages; a test holds it to the engine's own text.
SUMMARY_REQUEST = (
    "Our conversation is longer than you can keep, and you will soon forget its beginning. Write down, in short "
    "sentences, what you must not forget: names, facts, decisions, and what is still to be done."
)
GREETINGS = ["Hello, ", "Hi, ", "Hi! ", "Hey, ", "Good morning, ", "Hello! ", "hi, "]
SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant.", "You are a friendly assistant.", "Be brief."]


def conversation(seed: int, target_tokens: int, *, count: Count) -> Conversation:
    """An everyday conversation for evaluation, with held-out names alone, and questions about all that was told."""
    dice = Dice(f"kvasir-tiny everyday examination {seed} {target_tokens}")
    style = replace(draw_style(dice, target_tokens), room=False, foreign_acks=False, with_tools=False, ask=0.1)
    writer = DailyWriter(seed, target_tokens, count, True, style, 0.8)
    writer.write()
    return writer.conversation()


def draw_style(dice: Dice, target_tokens: int) -> Style:
    style = desk.draw_style(dice, target_tokens)
    return replace(style, room=dice.chance(0.2), with_tools=dice.chance(0.25), ask=0.3 + 0.4 * dice.random())


class DailyWriter(Writer):
    """Writes one everyday conversation; `daily` is the share of everyday facts in it."""

    new_names = WideNames
    names: WideNames

    def __init__(self, seed: int, target: int, count: Count, held_out: bool, style: Style, daily: float = 0.8) -> None:
        super().__init__(seed, target, count, held_out, style)
        self.daily = daily
        self.told_to_me: list[Fact] = []  # in the order of telling

    # -- the start

    def _system(self) -> None:
        draw = self.dice.random()
        if self.style.room or draw < 0.4:
            super()._system()
            return
        self.agent = ""
        if self.tool_names:
            self.tokens += 17 * len(self.tool_names)
        if draw < 0.65:
            self._say("system", self.dice.pick(SYSTEMS))

    def _introduction(self) -> None:
        dice = self.dice
        facts = [everyday_facts.own_name(dice, self.names)]
        more = [attribute for attribute in (everyday_facts.LIVE, everyday_facts.WORK) if dice.chance(0.3)]
        facts += [everyday_facts.make(attribute, "", dice, self.names) for attribute in more]
        if dice.chance(0.1):
            facts = [fact.in_small_letters() for fact in facts]
        text = " and ".join(fact.told[:-1] for fact in facts) + "."
        if dice.chance(0.4):
            text = f"{dice.pick(GREETINGS)}{lower(text)}"
        self._tell(list(facts), talk.typed(text, dice))

    def _tell(self, facts: list[Fact], text: str, reply: str = REMEMBER) -> None:
        for fact in facts:
            self.known.add(fact.key)
            self.open.append((fact, len(self.messages)))
            self.told_to_me.append(fact)
        self._say("user", text)
        self._acknowledge(reply)

    # -- telling

    def _tell_facts(self) -> None:
        dice = self.dice
        if dice.chance(0.03) and self._correct():
            return
        if not dice.chance(self.daily):
            before = len(self.open)
            super()._tell_facts()
            self.told_to_me += [fact for fact, _ in self.open[before:]]
            return
        facts: list[Fact] = []
        for _ in range(1 + dice.below(self.style.at_once)):
            fact = self._new_everyday()
            self.known.add(fact.key)
            facts.append(fact)
        told = [fact.told for fact in facts]
        self._tell(facts, talk.typed(told[0], dice) if len(told) == 1 else self._sentences(facts))

    def _new_everyday(self) -> EverydayFact:
        fact = self._untold(lambda: self._named_or(0.05, self._subject))
        if fact.key in self.known:
            return everyday_facts.a_fact(self.names.person(), self.dice, self.names)
        is_hasty = fact.subject in {"", "my dog", "my sister", "my wife"} and self.dice.chance(0.07)
        return fact.in_small_letters() if is_hasty else fact

    def _named_or(self, chance: float, subject: Callable[[], str]) -> EverydayFact:
        """The speaker's own name, by this chance; or a fact about a subject."""
        if self.dice.chance(chance):
            return everyday_facts.own_name(self.dice, self.names)
        return everyday_facts.a_fact(subject(), self.dice, self.names)

    def _subject(self) -> str:
        draw = self.dice.random()
        if draw < 0.55:
            return ""
        if draw < 0.7:
            return f"my {self.dice.pick(values.KIN)}"
        return self._somebody()

    def _correct(self) -> bool:
        """The speaker takes back what they said: the newest telling holds."""
        dice = self.dice
        known = [place for place, (fact, _) in enumerate(self.open) if isinstance(fact, EverydayFact)]
        if not known:
            return False
        old = self.open[dice.pick(known)]
        fact = old[0]
        if not isinstance(fact, EverydayFact) or fact.attribute is None:
            return False
        new = everyday_facts.make(fact.attribute, fact.subject, dice, self.names, fact.shared)
        if new.value == fact.value:
            return False
        self.open.remove(old)
        self.told_to_me = [other for other in self.told_to_me if other is not fact]
        lead = dice.pick(["No, ", "Sorry, ", "Actually, ", "I was wrong. ", "Correction: "])
        self._tell([new], lead + (new.told if lead.endswith((". ", ": ")) else lower(new.told)))
        return True

    # -- several speakers

    def _room_turn(self) -> None:
        for _ in range(1 + self.dice.below(3)):
            self._room_line(self.dice.pick(self.speakers))
        if self.dice.chance(0.4):  # asked in the same block
            is_known = bool(self.open or self.closed) and self.dice.chance(0.55)
            fact = self._old_fact() if is_known else self._unknown_fact()
            self._teach(self._wording(fact), fact.answer if is_known else fact.not_told)
        else:
            self._acknowledge(LISTENING)

    def _room_line(self, speaker: str) -> None:
        """Sometimes a speaker is an agent too, who was asked something."""
        if not self.dice.chance(0.2):
            super()._room_line(speaker)
        elif self.dice.chance(0.5):
            self._say("user", self.dice.pick([REMEMBER, LISTENING, "Hello.", "Let us go on.", "I see."]), name=speaker)
        else:
            self._say("user", self._unknown_fact().not_told, name=speaker)

    # -- chatter

    def _chatter_turn(self) -> None:
        dice = self.dice
        draw = dice.random()
        if self.style.room or draw < 0.25:
            super()._chatter_turn()
        elif draw < 0.55:
            text, reply = dice.pick(talk.PAIRS)
            self._teach(talk.typed(text, dice), reply)
        elif draw < 0.8:
            self._teach(talk.typed(talk.elsewhere(dice, self.names), dice), talk.SMALL_WORLD)
        else:
            self._teach(*talk.echo(dice, self.names))

    def _teach(self, text: str, reply: str) -> None:
        self._say("user", text)
        self._say("assistant", reply, learn=True)

    # -- asking

    def _ask_turn(self) -> None:
        dice = self.dice
        draw = dice.random()
        if self.style.room or draw < 0.2:
            super()._ask_turn()
        elif draw < 0.23:
            self._teach(*talk.echo(dice, self.names))
        elif draw < 0.26:
            self._teach(talk.typed(talk.elsewhere(dice, self.names), dice), talk.SMALL_WORLD)
        elif draw < 0.27 and not self.agent:
            self._teach(talk.typed("What is your name?", dice), talk.NAMELESS)
        elif not self.open and dice.chance(0.6):
            self._tell_turn()
        elif draw < 0.285 and self.told_to_me and len(self.messages) > 4:
            self._summary()
        elif draw < 0.42 or not (self.open or self.closed):
            unknown = self._unknown_everyday()
            self._exchange(self._wording(unknown), unknown.not_told)
        else:
            fact = self._old_fact()
            self._exchange(self._wording(fact), fact.answer)

    def _summary(self) -> None:
        """The oldest facts, as they were told: what an engine asks for before it drops them."""
        first = dict.fromkeys(fact.told for fact in self.told_to_me[:SUMMARY_FACTS])
        self._teach(SUMMARY_REQUEST, " ".join(first))

    def _old_fact(self) -> Fact:
        fact = super()._old_fact()
        return fact.asked(self.dice) if isinstance(fact, EverydayFact) else fact

    def _unknown_everyday(self) -> EverydayFact:
        def subject() -> str:
            return self._subject() if self.dice.chance(0.85) else self.names.person()

        return self._untold(lambda: self._named_or(0.08, subject)).asked(self.dice)

    def _wording(self, fact: Fact) -> str:
        if not isinstance(fact, EverydayFact):
            return super()._wording(fact)
        dice = self.dice
        if dice.chance(0.12) and fact.question[-1] == "?":
            lead = dice.pick(["Do you know {}?", "Do you remember {}?", "Tell me {}.", "Can you tell me {}?"])
            return lead.format(fact.clause)
        return talk.typed(fact.question, dice)

    # -- what may be asked afterwards

    def _questions(self) -> list[Question]:
        """Every open fact with its plain question, and some that nobody told."""
        found = []
        for fact, at in self.open:
            asked = fact.asked(self.dice) if isinstance(fact, EverydayFact) else fact
            found.append(Question("told", asked.question, asked.answer, at, asked))
        for _ in range(4 if self.style.ask < 0.2 else 0):
            unknown = self._unknown_everyday()
            found.append(Question("not_told", unknown.question, unknown.not_told, fact=unknown))
        return found
