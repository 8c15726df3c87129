"""What was done since the start, counted by namespace: the one object behind GetStats, GetCapabilities and the metrics.

Counters only rise, and outlive a swap of models. They are changed on the event loop alone; the metrics read them from
another thread, which at worst sees one of them a moment later than the next.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from inference_svc.memory.outcomes import MissReason, SnapshotState, Source


@dataclass(slots=True)
class NamespaceCounters:
    """Of one namespace. `waiting_turns` and `running_turns` are of now; all else counts since the start."""

    turns: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # finished, cancelled, failed
    refusals: Counter[str] = field(default_factory=Counter)  # by the refusal's reason
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    sources: Counter[Source] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    publications: Counter[SnapshotState] = field(default_factory=Counter)
    published_bytes: int = 0
    waiting_turns: int = 0
    running_turns: int = 0


@dataclass(slots=True)
class ServiceStats:
    """Counters of all namespaces."""

    started_s: float  # on the clock that is read with it
    _namespaces: dict[str, NamespaceCounters] = field(default_factory=dict)

    def of(self, namespace: str) -> NamespaceCounters:
        """The counters of a namespace, to be changed. Namespaces are those of credentials, so there are few."""
        return self._namespaces.setdefault(namespace, NamespaceCounters())

    def namespaces(self) -> Mapping[str, NamespaceCounters]:
        """Every namespace that asked for anything."""
        return dict(self._namespaces)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the loaded engine says of itself; all zero without one."""

    model: str = ""
    kv_memory_used_bytes: int = 0
    hot_bytes: Mapping[str, int] = field(default_factory=dict)  # by namespace
    hot_memories: int = 0
    computed_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """Everything that is told of a service at one moment."""

    uptime_s: float
    namespaces: Mapping[str, NamespaceCounters]
    engine: EngineFacts
    kv_memory_bytes: int
    prompt_bytes: int
    restoring_bytes: int
    publishing_bytes: int
    model_loads: int
