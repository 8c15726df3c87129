"""How long the streams of a step wait for work beside them, and when background work goes on for whose time no gap of a
stream that a person reads has room. Pure.
"""

import math
from collections.abc import Collection
from typing import Generic

from inference_svc.engine.scheduling.company import Namespace
from inference_svc.engine.scheduling.schedulable import Rules, TurnT
from inference_svc.engine.scheduling.step_costs import StepCosts
from inference_svc.engine.scheduling.urgency import Urgency

_PART = 7  # so many times as long as background work takes that has no room, it stands aside before
_SPREAD = 0.1  # of a pass: the longest ones of a crowd take so much more than was learned


class Gaps(Generic[TurnT]):
    def __init__(self, rules: Rules, costs: StepCosts) -> None:
        self._rules = rules
        self._costs = costs

    def budget_s(self, decoding: Collection[TurnT], whose: Namespace, urgency: Urgency[TurnT]) -> float:
        """Seconds for a namespace's prompts, loads, and background rows beside people's, while these turns decode:
        nearly as long as their shortest gap lasts; infinite if there are none.
        """
        gap_s = min((self._gap_s(turn, whose, urgency) for turn in decoding), default=math.inf)
        step_s = self._costs.step_s or 0.0
        if self._costs.beside.own_s is not None and len({urgency.is_pressing(turn) for turn in decoding}) > 1:
            step_s = self._costs.beside.own_s  # its background rows may stand aside
        return max((gap_s - step_s) * (1 - _SPREAD), min(gap_s, self._rules.stalled_steps * step_s))

    def _gap_s(self, turn: TurnT, whose: Namespace, urgency: Urgency[TurnT]) -> float:
        """How long a decoding turn waits for a namespace's work. A shorter gap than that of the rules slows
        that, so it binds the turn's own namespace alone.
        """
        usual_s = self._rules.longest_gap_s if urgency.is_pressing(turn) else self._rules.background_gap_s
        if turn.longest_gap_s is not None:
            return turn.longest_gap_s if turn.namespace == whose else max(turn.longest_gap_s, usual_s)
        return usual_s


class StandingAside:
    """Of background work of one kind, beside such streams: it has an eighth of the time, and waits `most_s` at most."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since_s = self._took_s = 0.0

    def is_due(self, now: float) -> bool:
        return now - self._since_s >= min(_PART * self._took_s, self._most_s)

    def worked(self, now: float, took_s: float | None = None) -> None:
        """It went on, for so long; None: nobody waited for it, or it is as short as a gap."""
        self._since_s = now
        self._took_s = self._took_s if took_s is None else took_s
