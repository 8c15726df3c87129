"""What all lines of one engine share."""

from collections.abc import Callable
from dataclasses import dataclass

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.service_stats import ServiceStats


@dataclass(frozen=True, slots=True)
class PublishingLimits:
    commit_wait_s: float  # how long a turn's final message waits for its commit before it reports PENDING
    timeout_s: float  # after so long without progress a publication fails; the memory stays hot, and is tried again
    head_budget_s: float  # time to request the newest version when a turn began without knowing it


@dataclass(frozen=True, slots=True)
class LineParts:
    engine: Engine
    copies: Copies
    limits: PublishingLimits
    stats: ServiceStats
    owner: str  # the name under which the engine holds leases
    clock: Callable[[], float]  # seconds, monotonic: of patience, which does not end while the machine sleeps
    lease_clock: Callable[[], float]  # seconds, monotonic, sleep included: leases end meanwhile
    now_ms: Callable[[], int]
    on_deleted: Callable[[AgentKey], None] = lambda _: None

    def hot(self, key: AgentKey) -> AgentMemory | None:
        """The agent's hot memory, if the store may get it or has it."""
        tag = self.engine.memories.tag_of(key)
        return tag if isinstance(tag, AgentMemory) else None
