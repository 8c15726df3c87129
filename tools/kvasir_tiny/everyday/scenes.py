"""Scenes as an orchestrator plays them: an agent hears others by name, and is told or asked in the same block."""

from __future__ import annotations

from dataclasses import replace

from tools.kvasir_tiny import facts, words
from tools.kvasir_tiny.desk import AGREED, DISCRETION, LISTENING, READ, REMEMBER, Count, Style
from tools.kvasir_tiny.everyday import spelling
from tools.kvasir_tiny.everyday.daily_life import DailyWriter
from tools.kvasir_tiny.facts import Fact

ROLES = words.words(
    "Warden Planner Coder Reviewer Inspector Analyst Judge Captain Teacher Doctor Nurse Guard Witness Lawyer Clerk "
    "Scout Pilot Cook Baker Editor Writer Tester Manager Detective Mayor Chief Reader Keeper Driver Sailor"
)
SECRETS = ["Here is a secret: ", "This is a secret: ", "Tell nobody: ", "Keep this to yourself: "]
NOTES = ["Report:\n", "Notes:\n", "Notes:\n", "Read this and remember it.\n\n"]


class SceneWriter(DailyWriter):
    """Writes what one agent of a scene hears, is told and is asked. Every fact is in the third person."""

    def __init__(self, seed: int, target: int, count: Count, style: Style) -> None:
        style = replace(style, room=True, with_tools=False, foreign_acks=False)
        super().__init__(seed, target, count, False, style, 0.0)
        cast: list[str] = []
        while len(cast) < 3 + self.dice.below(3):
            name = self._draw_name()
            if name not in cast:
                cast.append(name)
        self.agent, *self.speakers = cast
        self.people = cast + self.people[: self.dice.below(3)]

    def _draw_name(self) -> str:
        dice = self.dice
        draw = dice.random()
        if draw < 0.25:
            return dice.pick(ROLES)
        return dice.pick(spelling.GIVEN) if draw < 0.65 else self.names.person()

    def _system(self) -> None:
        dice = self.dice
        text = f"You are {self.agent}{dice.pick(words.SYSTEM_ROLES)}."
        while dice.chance(0.5):
            text += f" {dice.pick(words.SYSTEM_RULES)}"
        self._say("system", text)

    def _turn(self) -> None:
        self._hear()
        draw = self.dice.random()
        if draw < 0.35:
            self._be_told()
        elif draw < 0.48:
            self._teach(*self.dice.pick(words.SMALL_TALK))
        else:
            self._be_asked()

    def _ask_turn(self) -> None:
        self._hear()
        self._be_asked()

    # -- hearing

    def _hear(self) -> None:
        for _ in range(self.dice.pick([0, 0, 1, 1, 2, 3])):
            self._say("user", self._line(), name=self.dice.pick(self.speakers))

    def _line(self) -> str:
        """What an agent answers somebody: a fact, that it was not told one, or small talk."""
        dice = self.dice
        draw = dice.random()
        if draw < 0.4:
            return self._learned().told
        if draw < 0.5 and (self.open or self.closed):
            return dice.pick(self.open or self.closed)[0].answer
        if draw < 0.75:
            return self._unknown().not_told
        return dice.pick(
            [REMEMBER, LISTENING, READ, DISCRETION, AGREED, "Hello.", "Let us go on.", "Goodbye.", "I see."]
        )

    def _learned(self) -> Fact:
        fact = self._fact()
        self.known.add(fact.key)
        self.open.append((fact, len(self.messages)))
        return fact

    def _fact(self) -> Fact:
        fact = self._untold(self._any_fact)
        return facts.about_thing(self.dice, self.names) if fact.key in self.known else fact

    def _any_fact(self) -> Fact:
        if self.dice.chance(0.76):
            return self._about(self.dice.pick(self.people))
        return facts.about_thing(self.dice, self.names)

    def _about(self, who: str) -> Fact:
        dice = self.dice
        draw = dice.random()
        if draw < 0.6:
            return facts.about_person(who, dice, self.names)
        if draw < 0.8:
            return facts.choice(who, dice.between(1, 3), dice, self.names)
        return facts.sighting(who, dice, self.names) if draw < 0.9 else facts.appointment(who, dice, self.names)

    # -- being told

    def _be_told(self) -> None:
        dice = self.dice
        draw = dice.random()
        if draw < 0.12:
            self._kept_from_me()
        elif draw < 0.45:
            told = [self._learned() for _ in range(1 + dice.below(3))]
            decided = all(fact.told.startswith(("We decided", "For the")) for fact in told)
            self._teach(self._sentences(told), AGREED if decided else REMEMBER)
        elif draw < 0.72:
            told = [self._learned() for _ in range(1 + dice.below(2))]
            self._teach(dice.pick(SECRETS) + " ".join(fact.told for fact in told), DISCRETION)
        else:
            self._teach(dice.pick(NOTES) + self._notes(), READ)

    def _notes(self) -> str:
        dice = self.dice
        if dice.chance(0.5):
            return dice.pick([" ", "\n"]).join(self._learned().told for _ in range(1 + dice.below(4)))
        cast = [*self.speakers, self.agent] if dice.chance(0.3) else self.speakers
        return "\n".join(f"{dice.pick(cast)}: {self._line()}" for _ in range(1 + dice.below(6)))

    # -- being asked

    def _be_asked(self) -> None:
        draw = self.dice.random()
        if draw < 0.06:
            self._teach("What is your name?", f"My name is {self.agent}.")
        elif draw < 0.53 and (self.open or self.closed):
            fact = self._old_fact()
            self._teach(self._wording(fact), fact.answer)
        else:
            fact = self._unknown()
            self._teach(self._wording(fact), fact.not_told)

    def _unknown(self) -> Fact:
        """Something that the agent was not told; mostly next to what it was: another person, another round."""
        dice = self.dice
        draw = dice.random()
        if draw < 0.15 and self.private:
            return dice.pick(self.private)
        known = self.open + self.closed
        values = [fact.value for fact, _ in known if fact.kind == "person"]
        if draw < 0.3 and values:
            fact = self._about(dice.pick(values))
            if fact.key not in self.known:
                return fact
        if draw < 0.75 and known:
            who, what = dice.pick(known)[0].key
            for _ in range(40):
                fact = self._beside(who, what)
                if fact.key not in self.known and what.split(" ")[0] == fact.key[1].split(" ")[0]:
                    return fact
        return self._fact()

    def _beside(self, who: str, what: str) -> Fact:
        dice = self.dice
        other = dice.pick(self.people)
        if what.startswith("round"):
            return facts.choice(other, dice.between(1, 3), dice, self.names)
        if what == "seen":
            return facts.sighting(other, dice, self.names)
        if what == "meet":
            return facts.appointment(other, dice, self.names)
        if who in self.people:
            return facts.about_person(other, dice, self.names)
        return facts.about_thing(dice, self.names)
