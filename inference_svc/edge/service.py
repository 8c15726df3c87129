"""The inference service on the wire: checks requests, streams turns, ends them when their reader goes away."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from kvasir import errors
from kvasir.call_context import call_name, name_call
from kvasir.credentials import ADMIN, OWNER, Principal
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.names import check_request_id
from kvasir.server.answers import duration, written
from kvasir.server.interceptors import current_principal
from kvasir.waits import LOOK_S, PROGRESS_S

from inference_svc.edge import long_requests, messages, stats_messages
from inference_svc.edge.embed_messages import check_dimensions, embed_response, embedding_model_message, read_embed
from inference_svc.edge.inputs.input_messages import check_known_tokens
from inference_svc.edge.inputs.sampling_messages import with_defaults
from inference_svc.edge.inputs.thinking_messages import with_thinking
from inference_svc.edge.telling import Telling, send
from inference_svc.engine.api import AgentKey
from inference_svc.formats.reply_formats import ReplyFormats
from inference_svc.handover.resume_tokens import ResumeTokens, WaitingReply
from inference_svc.memory.service_stats import ServiceStats, ServiceStatus
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.model.model_host import ModelHost, ModelState
from inference_svc.served_model import ServedModel
from inference_svc.turns.admission import Admission
from inference_svc.turns.embedding.embedding_model import EmbeddingModel
from inference_svc.turns.embedding.turn_embedder import TurnEmbedder
from inference_svc.turns.turn_data import Slept, TurnEvent, TurnRequest, TurnStarted, Warmed

SERVICE_NAME = "kvasir.inference.v1.InferenceService"
CALLERS = frozenset({"client", "admin", "engine"})
_ADMINS = frozenset({ADMIN})
_FORCALLERS = (
    "Generate",
    "ListTurns",
    "CancelTurn",
    "ListHotMemories",
    "Warm",
    "Sleep",
    "CountTokens",
    "Embed",
    "ListModels",
    "GetModel",
    "GetCapabilities",
    "GetStats",
)
_MODEL_STATES = {state: getattr(pb, f"MODEL_STATE_{state.name}") for state in ModelState}
ALLOWED_ROLES: Mapping[str, frozenset[str]] = {
    **{f"/{SERVICE_NAME}/{rpc}": CALLERS for rpc in _FORCALLERS},
    **{f"/{SERVICE_NAME}/{rpc}": _ADMINS for rpc in ("LoadModel", "UnloadModel")},
}
PRIVILEGED = frozenset(method for method, roles in ALLOWED_ROLES.items() if roles == _ADMINS)  # audited


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    max_prompt_bytes: int
    max_request_bytes: int
    max_unread_bytes: int
    reader_stall_s: float


def new_request_id() -> str:
    return secrets.token_hex(8)


def _id_of_call() -> str:
    return call_name() or new_request_id()


def new_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class ServiceParts:
    host: ModelHost[ServedModel]
    stores: Mapping[str, RemoteCache]
    formats: ReplyFormats
    stats: ServiceStats
    status: Callable[[], ServiceStatus]
    resumes: ResumeTokens
    telling: Telling
    admission: Admission
    embedding_model: EmbeddingModel | None
    lease_owner: str


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):  # type: ignore[misc]
    def __init__(
        self,
        parts: ServiceParts,
        limits: ServiceLimits,
        is_stopping: Callable[[], bool],
        service_admins: Collection[str] = (),
    ) -> None:
        """`service_admins`: admins' credentials that act for all namespaces, as the Unix socket's owner does."""
        self._parts = parts
        self._limits = limits
        self._version = version("kvasir")  # searched for in the file system
        self._is_stopping = is_stopping
        self._service_admins = frozenset(service_admins)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        caller = current_principal()
        with self._counting_refusals(caller.namespace):
            name_call(request.request_id)
            if request.resume_token:
                await self._resume(request, caller, context)
            else:
                reply = await self._begun(request, caller)
                await self._parts.telling.tell(reply, context, request.followed_peers)

    async def _begun(self, request: pb.GenerateRequest, caller: Principal) -> WaitingReply:
        self._check_serves()
        new = {"new_request_id": _id_of_call, "new_seed": new_seed}
        checked = await self._checked(request, caller, messages.turn_request, **new)
        name_call(checked.request_id)
        served, tried = await self._parts.host.awake(request.model), None
        while served is not tried:  # models may change while a format is tried, and each has its own tokens
            tried, fitted = served, await fit(checked, served, self._parts.formats)
            served = await self._parts.host.awake(request.model)
        running = served.turns.begin(fitted)
        whose = checked.request_id, caller.namespace, caller.name
        return WaitingReply(running, *whose, served.name, served.engine.token_text.bytes_of)

    async def _checked(
        self, request: Any, caller: Principal, check: Callable[..., TurnRequest], **new: Callable[[], Any]
    ) -> TurnRequest:
        most_bytes = self._limits.max_prompt_bytes
        terms = {"namespace": caller.namespace, "caller": caller.name, "max_prompt_bytes": most_bytes, **new}
        served = self._parts.host.served
        prompting = served.prompting if served is not None else None
        check = partial(check, request, **terms)
        return await long_requests.checked(request, caller, check, self._parts.admission, prompting)

    async def _resume(self, request: pb.GenerateRequest, caller: Principal, context: Any) -> None:
        followed = request.followed_peers
        if request != pb.GenerateRequest(resume_token=request.resume_token, followed_peers=followed):
            raise errors.InvalidArgument.of("resume_token", "expected nothing beside it but followed_peers")
        reply = self._parts.resumes.claim(request.resume_token, caller.namespace, caller.name)
        name_call(reply.request_id)
        await self._parts.telling.tell(reply, context, followed)

    async def Warm(self, request: pb.WarmRequest, context: Any) -> pb.WarmResponse:
        events, model_name = await self._events(request, messages.warm_request)
        [started] = (event for event in events if isinstance(event, TurnStarted))
        [warmed] = (event for event in events if isinstance(event, Warmed))
        return messages.warm_response(started, warmed, model_name)

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        warmed = pb.WarmRequest(model=request.model, agent_id=request.agent_id)
        events, model_name = await self._events(warmed, messages.sleep_request)
        [slept] = (event for event in events if isinstance(event, Slept))
        return written(pb.SleepResponse, slept, model=model_name)

    async def _events(self, request: pb.WarmRequest, check: Callable[..., TurnRequest]) -> tuple[list[TurnEvent], str]:
        """The events of a turn that generates nothing, and the name of the model that served it."""
        caller = current_principal()
        with self._counting_refusals(caller.namespace):
            self._check_serves()
            checked = await self._checked(request, caller, check, new_request_id=_id_of_call)
            name_call(checked.request_id)
            served = await self._parts.host.awake(request.model)
            checked = check_known_tokens(checked, served.engine.vocabulary_size)
            running = served.turns.begin(await with_thinking(checked, served.prompting))
            try:
                return [event async for _, event in running.events()], served.name
            finally:
                running.cancel()

    async def ListTurns(self, request: pb.ListTurnsRequest, context: Any) -> pb.ListTurnsResponse:
        served = self._parts.host.served
        found = served.turns.open_turns(current_principal().namespace) if served is not None else {}
        return pb.ListTurnsResponse(turns=[messages.turn_message(*each) for each in found.items()])

    async def CancelTurn(self, request: pb.CancelTurnRequest, context: Any) -> pb.CancelTurnResponse:
        request_id, served = check_request_id(request.request_id), self._parts.host.served
        if served is None:
            served = self._parts.host.serving("")  # its error names the remedy
        ends = await served.turns.stop(current_principal().namespace, request_id)
        return pb.CancelTurnResponse(finished=[messages.finished(end, choice) for choice, end in sorted(ends.items())])

    async def ListHotMemories(self, request: pb.ListHotMemoriesRequest, context: Any) -> pb.ListHotMemoriesResponse:
        names, served = stats_messages.agent_ids(request), self._parts.host.served
        if served is None:
            return pb.ListHotMemoriesResponse()
        memories, keys = served.engine.memories, [AgentKey(current_principal().namespace, name) for name in names]
        sizes, woken = memories.sizes(), served.woken.ready
        found = [
            stats_messages.hot_memory(key.agent_id, sizes[key], memories.tag_of(key), is_woken_ahead=key in woken)
            for key in keys
            if key in sizes
        ]
        return pb.ListHotMemoriesResponse(memories=found)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:
        caller = current_principal()
        with self._counting_refusals(caller.namespace):
            self._check_serves()
            checked = await self._checked(request, caller, messages.count_request)
            served = await self._parts.host.awake(request.model)
            checked = check_known_tokens(checked, served.engine.vocabulary_size)
            tokens = await served.turns.count_tokens(await with_thinking(checked, served.prompting))
        return pb.CountTokensResponse(tokens=tokens, context_tokens=served.engine.model.context_tokens)

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        caller = current_principal()
        with self._counting_refusals(caller.namespace):
            self._check_serves()
            asked = read_embed(request, self._limits.max_prompt_bytes)
            embedder = await self._embedder(request.model)
            dimensions = check_dimensions(asked, embedder.dimensions)
            with self._parts.admission.turn(caller.namespace, caller.name, asked.input_bytes):
                found = [
                    await embedder.embed(
                        caller.namespace, text, f"inputs[{at}]", truncate=asked.truncate, priority=asked.priority
                    )
                    for at, text in enumerate(asked.texts)
                ]
            return embed_response(embedder.name, found, dimensions)

    async def _embedder(self, name: str) -> EmbeddingModel | TurnEmbedder:
        beside = self._parts.embedding_model
        if beside is not None and name in ("", beside.name):
            return beside
        embedder = (await self._parts.host.awake(name)).embedder
        if not embedder.dimensions:
            raise errors.FailedPrecondition.of("model", "its hidden rows cannot be had", reason="NO_EMBEDDINGS")
        return embedder

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        beside = [] if self._parts.embedding_model is None else [self._parts.embedding_model.name]
        return pb.ListModelsResponse(models=[self._model(name) for name in (*self._parts.host.names, *beside)])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        if self._parts.embedding_model is not None and request.model == self._parts.embedding_model.name:
            return pb.GetModelResponse(model=self._model(request.model))
        name = request.model or self._parts.host.serving("").name
        return pb.GetModelResponse(model=self._model(self._parts.host.check_known(name)))

    async def LoadModel(self, request: pb.LoadModelRequest, context: Any) -> None:
        self._check_acts_for_all("LoadModel")
        self._check_serves()
        began_s, told, told_s = time.monotonic(), None, 0.0
        loading = asyncio.create_task(self._parts.host.load(request.model, drop_unstored=request.drop_unstored))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to hear it
        # At once, then whenever the stage changes: a caller knows that the load has begun, however short it is.
        while not (await asyncio.wait({loading}, timeout=0 if told is None else LOOK_S))[0]:
            now_s, stage = time.monotonic(), self._load_stage()
            if stage != told or now_s >= told_s + PROGRESS_S:
                told, told_s = stage, now_s
                progress = pb.LoadProgress(stage=stage, elapsed=duration(now_s - began_s))
                await send(context, pb.LoadModelResponse(progress=progress), self._limits.reader_stall_s)
        left = stats_messages.memories_left(loading.result())
        done = pb.LoadedModel(model=self._model(request.model), left=left)
        await send(context, pb.LoadModelResponse(done=done), self._limits.reader_stall_s)

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: Any) -> pb.UnloadModelResponse:
        self._check_acts_for_all("UnloadModel")
        self._check_serves()
        left = await self._parts.host.unload(request.model, drop_unstored=request.drop_unstored)
        return pb.UnloadModelResponse(left=stats_messages.memories_left(left))

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Any) -> pb.GetCapabilitiesResponse:
        served = self._parts.host.served
        return pb.GetCapabilitiesResponse(
            version=self._version,
            device=served.engine.device if served is not None else "",
            blas=served.engine.blas if served is not None else "",
            limits=written(pb.Limits, self._limits, self._parts.admission.limits),
            kernels=written(pb.Kernels, served.engine.kernels) if served is not None else None,
            lease_owner=self._parts.lease_owner,
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        status = self._parts.status()  # of now, and not of when a store that hangs has been given up
        store = self._parts.stores.get(current_principal().namespace)
        is_reachable = store is not None and await store.connection.is_there()
        only = None if self._acts_for_all() else current_principal().namespace
        return stats_messages.stats(status, only, store_is_reachable=is_reachable)

    @contextlib.contextmanager
    def _counting_refusals(self, namespace: str) -> Iterator[None]:
        try:
            yield
        except errors.KvasirError as error:
            if not error.is_failure and not isinstance(error, errors.Cancelled | errors.DeadlineExceeded):
                self._parts.stats.of(namespace).refusals[error.reason] += 1
            raise

    def _check_serves(self) -> None:
        check_serves(self._is_stopping)

    def _model(self, name: str) -> pb.Model:
        if self._parts.embedding_model is not None and name == self._parts.embedding_model.name:
            return embedding_model_message(self._parts.embedding_model)
        served = self._parts.host.served
        if served is None or served.name != name:
            return pb.Model(name=name, state=_MODEL_STATES[self._parts.host.state(name)])
        return messages.model_message(served.engine.model, _MODEL_STATES[self._parts.host.state(name)])

    def _load_stage(self) -> pb.LoadStage:
        is_retiring = any(self._parts.host.state(name) is ModelState.RETIRING for name in self._parts.host.names)
        return pb.LOAD_STAGE_RETIRING if is_retiring else pb.LOAD_STAGE_LOADING

    def _acts_for_all(self) -> bool:
        """Whether the caller may change the model and see all namespaces. An admin alone is bound to its namespace."""
        caller = current_principal()
        return caller is OWNER or (ADMIN in caller.roles and caller.name in self._service_admins)

    def _check_acts_for_all(self, rpc: str) -> None:
        if not self._acts_for_all():
            raise errors.PermissionDenied(
                f"{rpc} changes the model of all namespaces: it needs the owner of its Unix socket, or an admin "
                "that --service-admin names",
                metadata={"rpc": rpc},
            )


async def fit(request: TurnRequest, served: ServedModel, formats: ReplyFormats) -> TurnRequest:
    """A checked request, as the model takes it. Raises InvalidArgument for a setting that the model cannot apply."""
    constraint = await formats.compiled(request.namespace, request.sampling.constraint, served.engine.grammars)
    request = replace(request, sampling=replace(request.sampling, constraint=constraint))
    request = with_defaults(request, served.engine.model.sampling_defaults)
    check_known_tokens(request, served.engine.vocabulary_size)
    return await with_thinking(request, served.prompting)


def check_serves(is_stopping: Callable[[], bool]) -> None:
    if is_stopping():
        raise errors.Unavailable("the engine is shutting down", reason="SHUTTING_DOWN", retry_after_s=1.0)
