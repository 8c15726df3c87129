"""The inference service on the wire: checks requests, streams turns, ends them when their reader goes away."""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import version
from typing import Any

from kvasir.credentials import ADMIN
from kvasir.errors import Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.interceptors import current_principal

from inference_svc import choices, messages
from inference_svc.engine import Engine
from inference_svc.remote_cache import RemoteCache
from inference_svc.reply_formats import ReplyFormats
from inference_svc.service_stats import NamespaceCounters
from inference_svc.turn_flow import TurnService

SERVICE_NAME = "kvasir.inference.v1.InferenceService"
_CALLERS = frozenset({"client", "admin", "engine"})
ALLOWED_ROLES: Mapping[str, frozenset[str]] = {
    f"/{SERVICE_NAME}/{rpc}": _CALLERS for rpc in ("Generate", "ListModels", "GetModel", "GetCapabilities")
}


def new_request_id() -> str:
    return secrets.token_hex(8)


def new_seed() -> int:
    return secrets.randbits(63)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):  # type: ignore[misc]
    """One engine behind gRPC."""

    def __init__(
        self,
        engine: Engine,
        turns: TurnService,
        stores: Mapping[str, RemoteCache],
        formats: ReplyFormats,
        *,
        max_prompt_bytes: int,
        memory_budget_bytes: int,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._turns = turns
        self._stores = stores
        self._formats = formats
        self._max_prompt_bytes = max_prompt_bytes
        self._memory_budget_bytes = memory_budget_bytes
        self._is_stopping = is_stopping

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: Any,
    ) -> AsyncIterator[pb.GenerateResponse]:
        if self._is_stopping():
            raise Unavailable("the engine is shutting down", reason="SHUTTING_DOWN", retry_after_s=1.0)
        model = self._engine.model
        checked = messages.turn_request(
            request,
            namespace=current_principal().namespace,
            model=model,
            max_prompt_bytes=self._max_prompt_bytes,
            new_request_id=new_request_id,
            new_seed=new_seed,
        )
        await self._formats.check(checked.sampling.constraint, self._engine.grammars)
        running = choices.begin(self._turns, checked)
        try:
            async for choice, event in running.events():
                yield messages.response(event, checked.request_id, model.name, choice)
        finally:
            # A cancel, a deadline and a disconnect all end here, while the turn runs; at its end this does nothing.
            running.cancel()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[messages.model_message(self._engine.model)])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        messages.check_model_name(request.model, self._engine.model)
        return pb.GetModelResponse(model=messages.model_message(self._engine.model))

    async def GetCapabilities(
        self,
        request: pb.GetCapabilitiesRequest,
        context: Any,
    ) -> pb.GetCapabilitiesResponse:
        store = self._stores.get(current_principal().namespace)
        return pb.GetCapabilitiesResponse(
            version=version("kvasir"),
            device=self._engine.device,
            blas=self._engine.blas,
            store_is_reachable=store is not None and await store.answers(),
            max_prompt_bytes=self._max_prompt_bytes,
            kv_memory_bytes=self._memory_budget_bytes,
            kv_memory_used_bytes=self._engine.memory_used_bytes,
            misses=self._misses(),
        )

    def _misses(self) -> dict[str, int]:
        """By reason: of the caller's namespace, or of all for an admin."""
        caller, counters = current_principal(), self._turns.stats.namespaces()
        seen = counters.values() if ADMIN in caller.roles else [counters.get(caller.namespace, NamespaceCounters())]
        return {reason.value: count for reason, count in sum((each.misses for each in seen), Counter()).items()}
