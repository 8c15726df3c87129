"""Which turns a person waits for, at one moment. Pure."""

from collections.abc import Collection
from functools import cached_property
from typing import Generic

from inference_svc.engine.api import AgentKey, Priority
from inference_svc.engine.scheduling.company import Namespace
from inference_svc.engine.scheduling.schedulable import NOT_BEGUN, Rules, TurnT


class Urgency(Generic[TurnT]):
    def __init__(self, turns: Collection[TurnT], awaited: Collection[TurnT], rules: Rules, now: float) -> None:
        """`awaited`: running turns that an interactive turn waits for."""
        self._awaited = awaited
        self._rules = rules
        self._turns = turns
        self._now = now

    @cached_property
    def _agents(self) -> set[AgentKey]:
        """Agents of which an interactive turn waits: their earlier turns are urgent too."""
        return {
            turn.agent_key
            for turn in self._turns
            if turn.status in NOT_BEGUN and turn.priority is Priority.INTERACTIVE and turn.agent_key is not None
        }

    def is_pressing(self, turn: TurnT) -> bool:
        """Whether a person waits for the turn."""
        return turn.priority is Priority.INTERACTIVE or turn.agent_key in self._agents or turn in self._awaited

    def is_urgent(self, turn: TurnT, pressing: Collection[Namespace] = ()) -> bool:
        """`pressing`: namespaces that have a turn for which a person waits. Age does not count against such others."""
        is_aged = self._now - turn.schedule.waits_since_s >= self._rules.ageing_s
        return self.is_pressing(turn) or (is_aged and not {*pressing} - {turn.namespace})
