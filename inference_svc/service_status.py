"""Collects the numbers that a service reports at one moment, and whether it is well."""

import asyncio
from collections import Counter
from collections.abc import Collection

from kvasir.server.operating.wellness import Ailment, Wellness, memories_not_stored
from kvasir.server.reloading import Reloading
from kvasir.waits import HANGS_S

from inference_svc.memory.service_stats import EngineFacts, ServiceStats, ServiceStatus
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import ModelHost, ModelState
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


async def wellness_of(host: ModelHost[ServedModel], stores: Collection[RemoteCache], reloading: Reloading) -> Wellness:
    """Calls the stores again. On the event loop."""
    answers = await asyncio.gather(*(store.connection.is_there() for store in stores))
    ailments = [*ailments_of_model(host), *_ailments_of_memories(host.served)]
    if not all(answers):
        away = f"the cache store does not answer for {answers.count(False)} of {len(answers)} namespaces"
        ailments.append(Ailment("STORE_UNREACHABLE", f"{away}: memories are neither read nor stored"))
    return Wellness(ailments, {"model": host.loaded, "model_sleeps": host.sleeps, **reloading.facts})


def _ailments_of_memories(served: ServedModel | None) -> list[Ailment]:
    failed = sum(each.failed for each in served.owed.values()) if served is not None else 0
    return [memories_not_stored(failed)] if failed else []


def ailments_of_model(host: ModelHost[ServedModel]) -> list[Ailment]:
    served = host.served
    if served is not None and served.engine.silent_s > HANGS_S:  # longer than the slowest cell of a prompt takes
        return [Ailment("HANGS", f"the thread that computes gives no sign since {served.engine.silent_s:.0f} s")]
    if served is not None and (failure := served.engine.kernels.failure):
        return [
            Ailment("KERNELS_FAILED", f"replies are right and slow, by MLX's own operations: {failure}", stops=False)
        ]
    if served is not None or host.sleeps:
        return []
    if any(host.state(name) is ModelState.LOADING for name in host.names):
        return [Ailment("MODEL_CHANGING", "a model is being loaded")]
    return [Ailment("MODEL_NOT_LOADED", "no model is loaded")]
