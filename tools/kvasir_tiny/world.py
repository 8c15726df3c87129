"""The generator of kvasir-tiny's world: a seed gives the same conversation everywhere, and evaluation its own names."""

from __future__ import annotations

from tools.kvasir_tiny import desk, words
from tools.kvasir_tiny import facts as fact_forms
from tools.kvasir_tiny import tools as tool_forms
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import CLOSED


def conversation(
    seed: int,
    target_tokens: int,
    *,
    count: desk.Count = desk.estimate_tokens,
    held_out: bool = True,
    style: desk.Style | None = None,
) -> desk.Conversation:
    """About `target_tokens` of conversation (never a turn more), and questions about all that was not asked in it."""
    writer = Writer(seed, target_tokens, count, held_out, style)
    writer.write()
    return writer.conversation()


def training_conversation(
    seed: int, target_tokens: int, count: desk.Count, *, held_out: bool = False
) -> desk.Conversation:
    """A conversation of the training part: at least `target_tokens`, its last part full of questions."""
    writer = Writer(seed, target_tokens, count, held_out, style=None)
    writer.write(examination=0.15)
    return writer.conversation()


_LEADS = words.listed(
    "By the way, {};Please remember that {};You should know that {};I think that {};Remember: {};Note: {}"
)
_PASSAGES = [
    "Passage:\n{t}\n\nQuestion: {q}",
    "Read this passage.\n\n{t}\n\nAnswer from the passage: {q}",
    "Documents:\n{t}\nQuestion: {q}",
]


class Writer(desk.Desk):
    """Writes one conversation, turn by turn, and remembers what the agent in it was told."""

    def conversation(self) -> desk.Conversation:
        tools = [tool_forms.schema(name) for name in self.tool_names]
        return desk.Conversation(self.seed, self.agent, self.messages, tools, self._questions(), self.taught)

    # -- the whole

    def write(self, examination: float = 0.0) -> None:
        self._system()
        if not self.style.room and self.dice.chance(0.4):
            self._introduction()
        while self.tokens < self.target * (1 - examination):
            self._turn()
        while self.tokens < self.target:
            self._ask_turn()

    def _turn(self) -> None:
        draw = self.dice.random()
        style = self.style
        if draw < style.ask:
            self._ask_turn()
        elif draw < style.ask + style.chatter:
            self._chatter_turn()
        elif style.room:
            self._room_turn()
        else:
            self._tell_turn()

    # -- telling

    def _tell_turn(self) -> None:
        draw = self.dice.random()
        if draw < 0.06:
            self._passage_to_keep()
        elif draw < 0.12:
            self._kept_from_me()
        else:
            self._tell_facts()

    def _tell_facts(self) -> None:
        dice = self.dice
        told = [self._new_fact("") for _ in range(1 + dice.below(self.style.at_once))]
        if dice.chance(0.15):
            secret = dice.pick(["Here is a secret: ", "This is a secret: ", "Tell nobody: ", "Keep this to yourself: "])
            text, reply = secret + " ".join(fact.told for fact in told), desk.DISCRETION
        else:
            text, reply = self._sentences(told), desk.REMEMBER
            if all(fact.told.startswith(("We decided", "For the")) for fact in told):
                reply = desk.AGREED
        for fact in told:
            self.open.append((fact, len(self.messages)))
        self._say("user", text)
        self._acknowledge(reply)

    def _introduction(self) -> None:
        """The speaking person gives their name."""
        dice = self.dice
        told = [fact_forms.own_name(self.names.person())]
        if dice.chance(0.6):
            verb = fact_forms.ACTIONS[dice.below(3)]
            told.append(fact_forms.action("", verb, fact_forms.a_value(verb[5], dice, self.names), ""))
        text = " and ".join(fact.told[:-1] for fact in told) + "."
        if dice.chance(0.4):
            text = f"{dice.pick(['Hello, ', 'Hi, ', 'Good morning, '])}{lower(text)}"
        for fact in told:
            self.known.add(fact.key)
            self.open.append((fact, len(self.messages)))
        self._say("user", text)
        self._acknowledge(desk.REMEMBER)

    def _new_fact(self, mouth: str) -> Fact:
        """A fact with a key of its own: about the speaker, about a person of the pool, or about a thing."""
        fact = self._untold(lambda: self._any_fact_of(mouth))
        if fact.key in self.known:  # everything about everybody was said: a new person
            fact = fact_forms.about_person(self.names.person(), self.dice, self.names)
        self.known.add(fact.key)
        return fact

    def _any_fact_of(self, mouth: str) -> Fact:
        draw = self.dice.random()
        if mouth == "" and draw < 0.06:
            return fact_forms.own_name(self.names.person())
        if draw < 0.25 and mouth != desk.NOBODY:
            return fact_forms.about_person(mouth, self.dice, self.names, mouth)
        if draw < 0.65:
            return fact_forms.about_person(self._somebody(), self.dice, self.names)
        return fact_forms.about_thing(self.dice, self.names)

    def _somebody(self) -> str:
        if self.dice.chance(0.15):
            self.people.append(self.names.person())
            return self.people[-1]
        return self.dice.pick(self.people)

    def _sentences(self, told: list[Fact]) -> str:
        """Statements in a row, some with a lead, some pairs joined."""
        parts: list[str] = []
        for fact in told:
            if parts and self.dice.chance(0.2) and parts[-1].endswith("."):
                parts[-1] = f"{parts[-1][:-1]} and {lower(fact.told)}"
            else:
                parts.append(self._lead(fact.told))
        return " ".join(parts)

    def _lead(self, sentence: str) -> str:
        draw = self.dice.random()
        if draw < 0.6:
            return sentence
        lead = self.dice.pick(_LEADS)
        return lead.format(sentence if lead.endswith(": {}") else lower(sentence))

    def _kept_from_me(self) -> None:
        """Somebody else is told a fact: the agent hears of it, but not the fact."""
        fact = self._new_fact("")
        if fact.key[1] == "name":
            return
        self.private.append(fact)
        other = self._somebody()
        text = self.dice.pick(
            ["I told {o} {c}.", "Only {o} knows {c}.", "{o} knows {c}, and nobody else.", "I wrote to {o} about {c}."]
        )
        self._say("user", text.format(o=other, c=fact.clause))
        self._acknowledge(words.NARRATIVE_REPLY)

    # -- several speakers

    def _room_turn(self) -> None:
        for _ in range(1 + self.dice.below(4)):
            self._room_line(self.dice.pick(self.speakers))
        self._acknowledge(desk.LISTENING)

    def _room_line(self, speaker: str) -> None:
        dice = self.dice
        draw = dice.random()
        if draw < 0.25:
            self._whisper(speaker)
        elif draw < 0.25 + self.style.chatter / 2:
            self._say("user", self._narrative(), name=speaker)
        else:
            told = [self._new_fact(speaker) for _ in range(1 + dice.below(min(2, self.style.at_once)))]
            for fact in told:
                self.open.append((fact, len(self.messages)))
            self._say("user", self._sentences(told), name=speaker)

    def _whisper(self, speaker: str) -> None:
        """`speaker` tells one other person a fact: this agent sees that, or hears of it, or nothing at all."""
        dice = self.dice
        fact = self._new_fact(speaker)
        other = dice.pick([name for name in self.speakers if name != speaker] or self.people)
        self.private.append(fact)
        draw = dice.random()
        mine = fact.clause.replace(f"{speaker}'s ", "my ")
        if draw < 0.3:
            self._say("user", f"({speaker} whispers to {other}.)")
        elif draw < 0.5:
            self._say("user", f"({speaker} tells {other} {fact.clause}.)")
        elif draw < 0.7:
            self._say("user", f"I told {other} {mine}.", name=speaker)
        elif draw < 0.85:
            self._say("user", f"{speaker} told me {fact.clause}, and nobody else.", name=other)

    # -- chatter

    def _chatter_turn(self) -> None:
        speaker = self.dice.pick(self.speakers) if self.style.room else None
        if self.dice.chance(0.5):
            text, reply = self.dice.pick(words.SMALL_TALK)
            self._say("user", text, name=speaker)
            self._say("assistant", reply, learn=True)
            return
        text = " ".join(self._narrative() for _ in range(1 + self.dice.below(6)))
        self._say("user", text, name=speaker)
        self._acknowledge(words.NARRATIVE_REPLY)

    def _narrative(self) -> str:
        dice = self.dice
        line = dice.pick(words.NARRATIVES)
        if "{" not in line:
            return line
        person = dice.pick(self.people) if dice.chance(0.6) else self.names.person()
        line = line.replace("{person}", person).replace("{food}", dice.pick(CLOSED["food"]))
        line = line.replace("{season}", dice.pick(CLOSED["season"])).replace("{spot}", dice.pick(CLOSED["spot"]))
        return line.replace("{place}", self.names.place()) if "{place}" in line else line

    # -- asking

    def _ask_turn(self) -> None:
        draw = self.dice.random()
        if draw < 0.56 and (self.open or self.closed):
            fact = self._old_fact()
            self._exchange(self._wording(fact), fact.answer)
        elif draw < 0.68:
            fact = self._unknown_fact()
            self._exchange(self._wording(fact), fact.not_told)
        elif draw < 0.77 and self.private:
            fact = self.dice.pick(self.private)
            self._exchange(self._wording(fact), fact.not_told)
        elif draw < 0.79 and self.agent:
            self._exchange("What is your name?", f"My name is {self.agent}.")
        elif draw < 0.86:
            self._passage_turn()
        elif draw < (0.97 if self.tool_names else 0.88):
            self._tool_turn()
        elif not self.open:
            self._tell_turn() if not self.style.room else self._room_turn()

    def _exchange(self, question: str, answer: str) -> None:
        speaker = self.dice.pick(self.speakers) if self.style.room and self.dice.chance(0.6) else None
        self._say("user", question, name=speaker)
        self._say("assistant", answer, learn=True)

    def _old_fact(self) -> Fact:
        """A fact to ask: mostly one not asked before, often the oldest of them."""
        dice = self.dice
        if not self.open or (self.closed and dice.chance(0.05)):
            return dice.pick(self.closed)[0]
        place = 0 if dice.chance(0.2) else dice.below(len(self.open))
        told = self.open.pop(place)
        self.closed.append(told)
        return told[0]

    def _unknown_fact(self) -> Fact:
        """A fact that nobody told, mostly about somebody whom the agent knows."""
        dice, subjects = self.dice, self.speakers if self.style.room else [""]

        def a_fact() -> Fact:
            draw = dice.random()
            if draw < 0.05 and not self.style.room:
                return fact_forms.own_name("x")
            if draw >= 0.8:
                return fact_forms.about_thing(dice, self.names)
            pool = subjects if draw < 0.3 else self.people
            who = dice.pick(pool) if draw < 0.7 else self.names.person()
            return fact_forms.about_person(who, dice, self.names)

        fact = self._untold(a_fact)
        return fact_forms.about_person(self.names.person(), dice, self.names) if fact.key in self.known else fact

    def _wording(self, fact: Fact) -> str:
        draw = self.dice.random()
        if draw < 0.6:
            return fact.question
        if draw < 0.64:  # as people type
            return fact.question[0].lower() + fact.question[1:-1]
        if draw < 0.68:
            return fact.question.replace("What is", "What's", 1)
        lead = self.dice.pick(
            ["Tell me {}.", "Do you remember {}?", "Do you know {}?", "Can you tell me {}?", "Please tell me {}."]
        )
        return lead.format(fact.clause)

    # -- passages

    def _passage(self, size: int) -> tuple[str, list[Fact]]:
        """Facts among sentences without facts, as one text or as numbered documents."""
        dice = self.dice
        told = [self._new_fact(desk.NOBODY) for _ in range(size)]
        sentences = [fact.told for fact in told]
        for _ in range(dice.below(size + 1)):
            sentences.insert(dice.below(len(sentences) + 1), self._narrative())
        if dice.chance(0.3):
            return "\n".join(f"[{number}] {sentence}" for number, sentence in enumerate(sentences, 1)), told
        break_at = dice.between(2, 5)
        lines = [" ".join(sentences[i : i + break_at]) for i in range(0, len(sentences), break_at)]
        return "\n".join(lines), told

    def _passage_turn(self) -> None:
        question = self._passage_question()
        self._exchange(question.text, question.answer)
        if question.fact and question.answer == question.fact.answer:
            self.closed.append((question.fact, len(self.messages) - 2))

    def _passage_question(self) -> desk.Question:
        dice = self.dice
        text, told = self._passage(2 + dice.below(9))
        fact = dice.pick(told)
        answer = fact.answer
        if dice.chance(0.2):
            fact = (
                self._unknown_fact()
                if dice.chance(0.3)
                else fact_forms.about_person(dice.pick(self.people), dice, self.names)
            )
            if fact.key in self.known or not fact.key[0]:
                fact = fact_forms.about_thing(dice, self.names)
            answer = fact.not_in_passage
        form = dice.pick(_PASSAGES)
        return desk.Question("passage", form.format(t=text, q=fact.question), answer, fact=fact)

    def _passage_to_keep(self) -> None:
        text, told = self._passage(3 + self.dice.below(10))
        for fact in told:
            self.open.append((fact, len(self.messages)))
        self._say("user", self.dice.pick(["Read this and remember it.\n\n", "Notes:\n", "Report:\n"]) + text)
        self._acknowledge(desk.READ)

    # -- tools

    def _tool_turn(self) -> None:
        if not self.tool_names or self.dice.chance(0.15):
            missing = [name for name in tool_forms.SIGNATURES if name not in self.tool_names]
            if missing:
                self._exchange(
                    tool_forms.a_use(self.dice.pick(missing), self.dice, self.names).question, tool_forms.NO_TOOL
                )
            return
        use = tool_forms.a_use(self.dice.pick(self.tool_names), self.dice, self.names)
        self._say("user", use.question)
        self._add(use.call_message, use.call_text, learn=True)
        self._add(use.result_message, use.result_message["content"], learn=False)
        self._say("assistant", use.reply, learn=True)

    # -- what may be asked afterwards

    def _questions(self) -> list[desk.Question]:
        questions = [desk.Question("told", self._wording(fact), fact.answer, at, fact) for fact, at in self.open]
        questions += [self._question("not_told", self._unknown_fact()) for _ in range(12)]
        questions += [self._question("private", fact) for fact in self.private]
        questions += [self._passage_question() for _ in range(4)]
        for _ in range(4 if self.tool_names else 0):
            use = tool_forms.a_use(self.dice.pick(self.tool_names), self.dice, self.names)
            questions.append(desk.Question("tool", use.question, use.call_text, tool_use=use))
        if self.agent:
            questions.append(desk.Question("name", "What is your name?", f"My name is {self.agent}."))
        return questions

    def _question(self, sort: str, fact: Fact) -> desk.Question:
        return desk.Question(sort, self._wording(fact), fact.not_told, fact=fact)


def lower(sentence: str) -> str:
    """The sentence as it goes on after "that": only a word that is no name loses its capital."""
    first = sentence.split(" ", 1)[0]
    if first in {"My", "The", "We", "In", "For", "Project"}:
        return sentence[0].lower() + sentence[1:]
    return sentence
