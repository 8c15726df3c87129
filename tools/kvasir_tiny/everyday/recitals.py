"""Short visits with summaries: the longest replies, each put together from several sentences."""

from __future__ import annotations

from tools.kvasir_tiny.everyday import talk
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
                self._ask_turn()

    def _summary_turn(self) -> None:
        draw = self.dice.random()
        if draw < 0.75:
            self._teach(talk.typed(self.dice.pick(SUMMARIES), self.dice), self.summary())
        elif draw < 0.9 and self.told_to_me:
            self._summary()
        else:
            self._summarize()
