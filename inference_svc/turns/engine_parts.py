"""The parts that serve the turns of one loaded model."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inference_svc.engine.api import AgentKey
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory
from inference_svc.memory.publishing.copies import Copies
from inference_svc.memory.recall import Recall
from inference_svc.memory.reuse_planning import ReusePlanner
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.memory.store.answers import EventCursor
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.swap_store import SwapLimits
from inference_svc.model.prompting import Prompting
from inference_svc.turns.admission import Admission
from inference_svc.turns.asleep.returns import Returns
from inference_svc.turns.asleep.woken import WokenAgents
from inference_svc.turns.progress import Outbox, ReaderLimits
from inference_svc.turns.turn_data import TurnRequest


@dataclass(frozen=True, slots=True)
class TurnLimits:
    store_budget_s: float  # time without progress that a turn may lose to the store, in total
    store_min_bytes_per_s: float  # A store that sends more slowly than this is slow, and its time counts
    publish_timeout_s: float
    # Time without progress that a preempted turn may lose to the store while its files are read. Where `store_budget_s`
    # is more, that holds.
    swap_read_budget_s: float
    swap_renew_s: float
    reader: ReaderLimits  # how far a reader may fall behind its turn

    def swap(self, piece_files: int) -> SwapLimits:
        read_budget_s = max(self.store_budget_s, self.swap_read_budget_s)
        min_bytes_per_s, renew_s = self.store_min_bytes_per_s, self.swap_renew_s
        return SwapLimits(self.publish_timeout_s, read_budget_s, min_bytes_per_s, renew_s, piece_files)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Made once for each model. All models that the service loads share `admission` and `stats`."""

    engine: Engine
    prompting: Prompting
    recall: Recall
    planner: ReusePlanner
    copies: Copies
    stores: Mapping[str, RemoteCache]  # By namespace; one without a store has hot memory only. More may come later.
    limits: TurnLimits
    admission: Admission
    stats: ServiceStats
    clock: Callable[[], float]  # seconds, monotonic
    woken: WokenAgents = field(default_factory=lambda: WokenAgents(Returns(), time.time))

    def event_cursor(self, request: TurnRequest) -> EventCursor | None:
        """The place in the store's history now, for a turn that extends a line."""
        store = self.stores.get(request.namespace) if request.extends else None
        return store.events.cursor if store is not None else None

    def tag(self, key: AgentKey, memory: AgentMemory) -> None:
        """Attach an agent's memory to its hot KV."""
        if (line := self.recall.line(key)) is not None:
            line.publications.tag(memory)
        else:
            self.engine.memories.tag(key, memory)

    def budget(self) -> Budget:
        return Budget(self.limits.store_budget_s, self.limits.store_min_bytes_per_s, self.clock)

    def outbox(self, choices: int = 1) -> Outbox:
        return Outbox(self.limits.reader, self.clock, choices)
