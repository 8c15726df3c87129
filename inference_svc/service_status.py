"""Collects the numbers that a service reports at one moment."""

from collections import Counter

from inference_svc.memory.service_stats import EngineFacts, ServiceStats, ServiceStatus
from inference_svc.model.model_host import ModelHost
from inference_svc.served_model import ServedModel
from inference_svc.turns.admission import Admission


def status_of(host: ModelHost[ServedModel], stats: ServiceStats, admission: Admission, now_s: float) -> ServiceStatus:
    """`now_s`: on the clock that gave `stats.started_s`. May be called on any thread: it only reads."""
    return ServiceStatus(
        uptime_s=now_s - stats.started_s,
        namespaces=stats.namespaces(),
        engine=_engine_facts(host.served),
        kv_memory_bytes=admission.limits.kv_memory_bytes,
        prompt_bytes=admission.open_prompt_bytes,
        restoring_bytes=admission.restoring.held_units,
        publishing_bytes=admission.publishing.held_units,
        model_loads=host.loads,
    )


def _engine_facts(served: ServedModel | None) -> EngineFacts:
    if served is None:
        return EngineFacts()
    engine, sizes = served.engine, served.engine.memories.sizes()
    hot_bytes: Counter[str] = Counter()
    for key, size_bytes in sizes.items():
        hot_bytes[key.namespace] += size_bytes
    return EngineFacts(
        model=served.name,
        kv_memory_used_bytes=engine.memory_used_bytes,
        hot_bytes=hot_bytes,
        hot_memories=len(sizes),
        owed=served.owed,
        computed_tokens=engine.computed_tokens,
        preemptions=engine.preemptions,
        kernels_failed=bool(engine.kernels.failure),
    )
