"""Whether the inference service is well: its model, the thread that computes, and its stores."""

import asyncio
from collections.abc import Collection

from kvasir.server.operating.wellness import Ailment, Wellness, memories_not_stored
from kvasir.server.reloading import Reloading
from kvasir.waits import HANGS_S

from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import ModelHost, ModelState
from inference_svc.served_model import ServedModel


async def wellness_of(host: ModelHost[ServedModel], stores: Collection[RemoteCache], reloading: Reloading) -> Wellness:
    """Asks the stores anew. On the event loop."""
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
