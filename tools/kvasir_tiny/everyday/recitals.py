"""Talk for a model's weak places: summaries, the longest replies, of several sentences; and facts that it confuses."""

from __future__ import annotations

from tools.kvasir_tiny.everyday import talk
from tools.kvasir_tiny.everyday.daily_life import DailyWriter
from tools.kvasir_tiny.everyday.visits import SUMMARIES, VisitWriter


class RecitalWriter(VisitWriter):
    """A summary behind one to seven new sentences. Only a visit's first summary cannot be copied from another: visits
    are short, so that a row of training has more of these."""

    def recite(self) -> None:
        self.tools, self.extracts = [], False
        self._system()
        while self.tokens < self.target:
            for _ in range(1 + self.dice.below(7)):
                self.tell()
                if self.dice.chance(0.3):
                    self.chat()
            self._summary_turn()
            while self.dice.chance(0.5):
                if self.dice.chance(0.2):
                    fact = self.unknown()
                    self._exchange(self._wording(fact), fact.not_told)
                else:
                    self._ask_turn()

    def _summary_turn(self) -> None:
        draw = self.dice.random()
        if draw < 0.75:
            self._teach(talk.typed(self.dice.pick(SUMMARIES), self.dice), self.summary())
        elif draw < 0.9 and self.told_to_me:
            self._summary()
        else:
            self._summarize()


class ReviewWriter(DailyWriter):
    """Everyday talk with more questions about everyday facts, and about unknown ones."""

    def _ask_turn(self) -> None:
        draw = self.dice.random()
        if self.style.room or draw < 0.5 or not self.open:
            super()._ask_turn()
        elif draw < 0.65:
            unknown = self._unknown_everyday()
            self._exchange(self._wording(unknown), unknown.not_told)
        else:
            fact = self._old_fact()
            self._exchange(self._wording(fact), fact.answer)
