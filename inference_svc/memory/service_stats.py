"""Counters since the start, by namespace. The event loop alone changes them; metrics read them on another thread."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from kvasir.server.operating.durations import Durations

from inference_svc.memory.outcomes import MissReason, SnapshotState, Source, Wake


@dataclass(frozen=True, slots=True)
class TurnTimes:
    queue: Durations = field(default_factory=Durations)  # until the engine began, or the turn was ended before
    restore: Durations = field(default_factory=Durations)  # of memories that were read from the store
    first_token: Durations = field(default_factory=Durations)  # from the request's arrival
    token_gap: Durations = field(default_factory=Durations)  # from one token of a reply to the next
    commit: Durations = field(default_factory=Durations)  # from the end of a turn until its memory was durable
    last_event: Durations = field(default_factory=Durations)  # from a turn's last token to its last event

    def add_all(self, others: Iterable["TurnTimes"]) -> "TurnTimes":
        taken = list(others)
        for part in fields(self):
            getattr(self, part.name).add_all(getattr(other, part.name) for other in taken)
        return self


@dataclass(slots=True)
class NamespaceCounters:
    """Counters of one namespace since the start; `waiting_turns` and `running_turns` are current numbers."""

    turns: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # finished, cancelled, refused, failed
    refusals: Counter[str] = field(default_factory=Counter)  # of turns and counts, by the refusal's reason
    tokens: Counter[str] = field(default_factory=Counter)  # prefilled, cached, decoded; tried ahead, and right of these
    sources: Counter[Source] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    publications: Counter[SnapshotState] = field(default_factory=Counter)
    made_good: Counter[SnapshotState] = field(default_factory=Counter)  # committed, after they were reported so
    wakes: Counter[Wake] = field(default_factory=Counter)  # of agents that were asleep
    published_bytes: int = 0
    waiting_turns: int = 0
    running_turns: int = 0
    times: TurnTimes = field(default_factory=TurnTimes)


@dataclass(slots=True)
class ServiceStats:
    started_s: float  # on the clock from which the uptime is read
    _namespaces: dict[str, NamespaceCounters] = field(default_factory=dict)

    def of(self, namespace: str) -> NamespaceCounters:
        """The counters of a namespace, for the caller to change. Namespaces come from credentials, so there are few."""
        return self._namespaces.setdefault(namespace, NamespaceCounters())

    def namespaces(self) -> Mapping[str, NamespaceCounters]:
        return dict(self._namespaces)


@dataclass(slots=True)
class OwedCount:
    memories: int = 0
    size_bytes: int = 0  # of what it lacks
    failed: int = 0  # of the memories, whose last try has failed


@dataclass(frozen=True, slots=True)
class EngineFacts:
    model: str = ""
    kv_memory_used_bytes: int = 0
    hot_bytes: Mapping[str, int] = field(default_factory=dict)  # by namespace
    hot_memories: int = 0
    owed: Mapping[str, OwedCount] = field(default_factory=dict)  # by namespace
    computed_tokens: int = 0
    preemptions: int = 0
    kernels_failed: bool = False  # their check at the start: the reference serves


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    uptime_s: float
    namespaces: Mapping[str, NamespaceCounters]
    engine: EngineFacts
    kv_memory_bytes: int
    prompt_bytes: int
    restoring_bytes: int
    publishing_bytes: int
    model_loads: int
