"""Puts together what is told of a service at one moment."""

from collections import Counter
from collections.abc import Callable

from inference_svc.memory.service_stats import EngineFacts, ServiceStats, Standing
from inference_svc.model.model_host import ModelHost
from inference_svc.served_model import ServedModel
from inference_svc.turns.admission import Admission


class Observer:
    """Of one service. May be asked on any thread: it only reads."""

    def __init__(
        self,
        host: ModelHost[ServedModel],
        stats: ServiceStats,
        admission: Admission,
        kv_memory_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._stats = stats
        self._admission = admission
        self._kv_memory_bytes = kv_memory_bytes
        self._clock = clock

    def standing(self) -> Standing:
        return Standing(
            uptime_s=self._clock() - self._stats.started_s,
            namespaces=self._stats.namespaces(),
            engine=self._engine(),
            kv_memory_bytes=self._kv_memory_bytes,
            prompt_bytes=self._admission.open_prompt_bytes,
            restoring_bytes=self._admission.restoring.held_units,
            publishing_bytes=self._admission.publishing.held_units,
            model_loads=self._host.loads,
        )

    def _engine(self) -> EngineFacts:
        served = self._host.served
        if served is None:
            return EngineFacts()
        engine, sizes = served.engine, served.engine.hot_sizes()
        hot_bytes: Counter[str] = Counter()
        for key, size_bytes in sizes.items():
            hot_bytes[key.namespace] += size_bytes
        return EngineFacts(
            model=served.name,
            kv_memory_used_bytes=engine.memory_used_bytes,
            hot_bytes=hot_bytes,
            hot_memories=len(sizes),
            computed_tokens=engine.computed_tokens,
            preemptions=engine.preemptions,
        )
