"""AgentService at the engine's address: checks the caller's role, and calls the store with the engine's credential."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import message_factory
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients.made_requests import MadeRequests
from kvasir.credentials import ADMIN, CLIENT, ENGINE
from kvasir.errors import FailedPrecondition, PermissionDenied, Unauthenticated, Unavailable
from kvasir.server.interceptors import current_principal
from kvasir.waits import PATIENCE_S

from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.served_model import ServedModel

_SERVICE = cachestore_pb2.DESCRIPTOR.services_by_name["AgentService"]
AGENT_SERVICE_NAME = _SERVICE.full_name
_PEOPLE = frozenset({CLIENT, ADMIN})
_READERS = frozenset({CLIENT, ADMIN, ENGINE})
_READS = frozenset({"ListAgents", "GetAgent", "ListSnapshots", "GetSnapshot", "GetUsage"})
AGENT_ROLES: Mapping[str, frozenset[str]] = {
    f"/{AGENT_SERVICE_NAME}/{method.name}": _READERS if method.name in _READS else _PEOPLE
    for method in _SERVICE.methods
}
# Audited here, because the store knows this engine only.
PRIVILEGED_OF_AGENTS = frozenset(method for method, roles in AGENT_ROLES.items() if roles == _PEOPLE)


_OF_ITS_TIME = 0.8  # A caller waits for the newest turn for most of its own time, at most


def add_agent_service(stores: Mapping[str, RemoteCache], served: Callable[[], ServedModel | None], server: Any) -> None:
    """Serve every RPC of the contract's AgentService. `stores`: by namespace."""
    service = AgentForwarding(stores, served)
    handlers = {method.name: service.handler(method) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(AGENT_SERVICE_NAME, handlers),))


class AgentForwarding:
    def __init__(self, stores: Mapping[str, RemoteCache], served: Callable[[], ServedModel | None]) -> None:
        self._stores = stores
        self._served = served

    def handler(self, method: Any) -> Any:
        async def one(request: Any, context: Any) -> Any:
            made = MadeRequests()
            requests = made.aio_of(request) if method.client_streaming else request
            try:
                await self._until_stored(request, context)
                with made.told():
                    answer = await self._store().connection.client.call_rpc(
                        method.name, requests, context.time_remaining()
                    )
                self._add_context(answer)
                return answer
            except (Unauthenticated, PermissionDenied) as error:
                raise _refused(error) from None

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._until_stored(request, context)
            responses = self._store().connection.client.stream_rpc(method.name, request, context.time_remaining())
            try:
                async with aclosing(responses):
                    async for response in responses:
                        yield response
            except (Unauthenticated, PermissionDenied) as error:
                raise _refused(error) from None

        read = message_factory.GetMessageClass(method.input_type).FromString
        write = message_factory.GetMessageClass(method.output_type).SerializeToString
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(many, read, write)
        make = grpc.stream_unary_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
        return make(one, read, write)

    def _add_context(self, answer: Any) -> None:
        """Add to the loaded model's lines how long they can become."""
        served, agents = self._served(), list[Any]()
        model = served.engine.model if served is not None else None
        if isinstance(answer, cachestore_pb2.GetAgentResponse):
            agents = [answer.agent]
        elif isinstance(answer, cachestore_pb2.ListAgentsResponse):
            agents = list(answer.agents)
        for line in (line for agent in agents for line in agent.lines):
            if model is not None and line.kv_identity_hash == model.kv_identity_hash:
                line.context_tokens = model.context_tokens

    async def _until_stored(self, request: Any, context: Any) -> None:
        """A copy of an agent's newest version has its newest turn, too. Raises Unavailable (MEMORY_NOT_STORED)."""
        served, left_s = self._served(), context.time_remaining()
        lines = served.lines.get(current_principal().namespace) if served is not None else None
        if lines is not None and (agent_id := _copied_whole(request)):
            patience_s = PATIENCE_S if left_s is None else min(PATIENCE_S, _OF_ITS_TIME * left_s)
            await lines.line(agent_id).publications.until_stored(patience_s)

    def _store(self) -> RemoteCache:
        store = self._stores.get(current_principal().namespace)
        if store is None:
            raise FailedPrecondition(
                "this engine has no store for the caller's namespace, so its agents have no versions; a new namespace "
                "wants `kvasir reload`",
                reason="NO_STORE",
            )
        return store


def _copied_whole(request: Any) -> str:
    """The agent whose newest version is to become another agent, an archive or a peer's copy; else nothing."""
    match request:
        case cachestore_pb2.ForkAgentRequest() if not request.HasField("version"):
            return request.source_agent_id
        case cachestore_pb2.ExportAgentRequest() if not request.HasField("version"):
            return request.agent_id
        case cachestore_pb2.PullAgentRequest() if request.to_peer and not request.only_bytes:
            return request.agent_id
    return ""


def _refused(error: Unauthenticated | PermissionDenied) -> Unavailable:
    """The caller's role was checked already: a refusal of the store means the engine's own credential."""
    return Unavailable(f"the store refuses this engine: {error.message}", retry_after_s=5.0)
