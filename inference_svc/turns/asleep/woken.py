"""Agents that were woken before a turn came, and whether their turns found them awake."""

from collections.abc import Callable
from dataclasses import dataclass, field

from inference_svc.engine.api import AgentKey
from inference_svc.memory.outcomes import Wake
from inference_svc.turns.asleep.returns import Returns


@dataclass(frozen=True, slots=True)
class WokenAgents:
    """On the event loop."""

    returns: Returns
    now_s: Callable[[], float]  # Unix time
    ready: dict[AgentKey, float] = field(default_factory=dict)  # since when, on the clock of turns' arrival

    def came(self, key: AgentKey, arrived_s: float, *, is_hot: bool, is_asleep: bool) -> Wake | None:
        """Note a turn of the agent. None: the agent was not asleep."""
        self.returns.came(key, self.now_s())
        ready_s = self.ready.pop(key, None)
        if is_asleep:
            return Wake.WAITED
        if ready_s is None or not is_hot:
            return None
        return Wake.HIDDEN if ready_s <= arrived_s else Wake.WAITED
