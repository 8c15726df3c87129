"""The composition root of the inference service: its parts, how they are joined, and their life."""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from threading import Thread
from types import ModuleType
from typing import Any

import structlog
from kvasir.address import AddressError
from kvasir.clients import Tls
from kvasir.clients.aio.turn_peer import AioTurnPeer
from kvasir.credentials import DEFAULT_NAMESPACE, CredentialFileError, read_token
from kvasir.errors import KvasirError
from kvasir.inference.v1 import handover_pb2_grpc, inference_pb2_grpc
from kvasir.server.interceptors import settle_garbage
from kvasir.server.operating.audit import Audit, AuditFile
from kvasir.server.operating.awake import Awake
from kvasir.server.operating.logs import configure_logs
from kvasir.server.operating.operator_page import About, OperatorPage, on_loop
from kvasir.server.operating.traces import Traces
from kvasir.server.parts import Parts
from kvasir.server.reloading import Reloading
from kvasir.server.serving import EdgeServer, RefusedToStart, Reports, run
from kvasir.waits import RETRY_S, never_ahead, uptime_s

from inference_svc import BEGAN_S
from inference_svc.config import ConfigError, EngineSettings, read_settings
from inference_svc.edge.agent_service import AGENT_ROLES, AGENT_SERVICE_NAME, PRIVILEGED_OF_AGENTS, add_agent_service
from inference_svc.edge.handover_service import HANDOVER_ROLES, HANDOVER_SERVICE_NAME, HandOverService
from inference_svc.edge.metrics import numbers_of
from inference_svc.edge.paired_door import PairedDoor
from inference_svc.edge.peer_links import Peers
from inference_svc.edge.service import (
    ALLOWED_ROLES,
    PRIVILEGED,
    SERVICE_NAME,
    InferenceService,
    ServiceLimits,
    ServiceParts,
    new_request_id,
)
from inference_svc.edge.telling import Telling
from inference_svc.engine.api import AgentKey
from inference_svc.engine.device.device_errors import DeviceLost
from inference_svc.engine.engine import Engine
from inference_svc.engine_stores import open_stores, reload_store_tokens, until_it_answers
from inference_svc.formats.grammar_trial import GrammarTrial
from inference_svc.formats.reply_formats import ReplyFormats
from inference_svc.handover.giving import TurnGiver
from inference_svc.handover.pairings import PairingsFile
from inference_svc.handover.resume_tokens import ResumeTokens
from inference_svc.machine.claims import ClaimsUnusable
from inference_svc.machine.giving_back import GivingBack
from inference_svc.machine.kv_budget import (
    GIB,
    KvBudget,
    NoRoom,
    claims_of_device,
    held_of,
    total_bytes,
    weights_on_disk,
)
from inference_svc.machine.pressure import is_short_of_memory
from inference_svc.memory.lines.lease_owner import LeaseOwner
from inference_svc.memory.service_stats import ServiceStats, ServiceStatus
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.token_lines import TokenLines
from inference_svc.model.embedding.pooling import Pooling
from inference_svc.model.model_host import ModelHost
from inference_svc.model_opening import ModelsParts, open_served
from inference_svc.served_model import ServedModel
from inference_svc.service_status import status_of, wellness_of
from inference_svc.start_phases import StartPhases
from inference_svc.turns.admission import Admission
from inference_svc.turns.embedding.embedding_model import EmbeddingModel

_LOG = structlog.get_logger("inference_svc")
_EX_SOFTWARE, _EX_CONFIG = 70, 78
_BEGIN_TRACES = ("InferenceService/Generate", "InferenceService/Warm")
_PROTOCOL = "kvasir.inference.v1"
_RELEASE = version("kvasir")


def serve_by_arguments(arguments: Sequence[str], open_engine: Callable[..., Engine]) -> int:
    try:
        settings = read_settings(arguments)
        configure_logs(settings.log_format, settings.log_level)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        run(serve(settings, open_engine))
    except (ConfigError, RefusedToStart, AddressError, CredentialFileError, ClaimsUnusable, NoRoom) as error:
        print(f"inference_svc: {error}", file=sys.stderr)
        return _EX_CONFIG
    except KvasirError as error:
        print(f"inference_svc: {error.message}", file=sys.stderr)
        return 1
    return 0


async def serve(settings: EngineSettings, open_engine: Callable[..., Engine]) -> None:
    """Load, be ready, serve until a signal comes, let turns and publications end, store hot memories, and exit."""
    phases = StartPhases("import", BEGAN_S, time.monotonic)
    neighbour = _neighbour() if settings.neighbour else None
    async with Parts() as parts:
        budget = _kv_budget(settings, parts)
        open_engine = budget.opener(_ending_the_process(open_engine))
        audit = parts.closing(_audit(settings))
        owner = LeaseOwner(settings.state_dir, lambda: f"engine-{secrets.token_hex(8)}")
        parts.callback(owner.close)
        traces = parts.closing(Traces(settings.traces_to, "engine", _BEGIN_TRACES))
        pairings = PairingsFile(settings.peers_file)
        server = _server(settings, neighbour, traces, audit, pairings)
        stores = open_stores(settings)
        parts.push_async_callback(_close_all, stores)
        stats, admission = ServiceStats(time.monotonic()), Admission(settings.admission, time.monotonic)
        service = _Service(settings, server, stores, stats, admission, _peers(settings, parts, pairings), owner.name)
        opener = service.model_opener(open_engine, phases.begin)
        host = ModelHost(settings.models, opener, budget.model_is_gone)
        reloading = service.reloading(audit, host)
        if settings.metrics_listen:
            page = service.page(audit, host, reloading)
            parts.push_async_callback(asyncio.to_thread, page.serve(settings.metrics_listen))
        parts.closing(host)
        settle_garbage()  # before a model comes, which may go again
        answering = service.until_stores_answer()
        parts.callback(answering.cancel)
        await host.load(host.names[0])
        beside = await _embedding_model(settings, phases, parts)
        # Connected before the first turn, whose budget for the store is better spent on reading.
        phases.begin("store")
        await answering
        service.check_namespaces()
        formats = parts.closing(ReplyFormats(GrammarTrial()))
        service.add_to_server(host, formats, beside, neighbour)
        service.look_after(host, parts)
        phases.end()
        phases.write(settings.state_dir)
        await server.start()
        parts.closing(server)
        parts.running(PairedDoor(pairings, service.peers, server).keep())
        server.set_ready(True)
        _report_ready(server.address, host.serving("").engine, settings, phases)
        await server.run_until_stopped(settings.stop_grace_s)
    _LOG.info("engine.stopped")


@dataclass(frozen=True, slots=True)
class _Service:
    settings: EngineSettings
    server: EdgeServer
    stores: dict[str, RemoteCache]
    stats: ServiceStats
    admission: Admission
    peers: Peers
    lease_owner: str

    def model_opener(
        self, open_engine: Callable[..., Engine], begin_phase: Callable[[str], None]
    ) -> Callable[[str, str], Awaitable[ServedModel]]:
        settings, clock = self.settings, time.monotonic
        clocks = clock, _now_ms, _SURELY_MS
        shared = ModelsParts(settings, self.stores, self.lease_owner, self.admission, self.stats, *clocks)
        return lambda name, path: open_served(name, path, shared, open_engine, begin_phase)

    def giver_of(self, served: ServedModel) -> TurnGiver:
        peers, clock = self.peers, time.monotonic
        return TurnGiver(
            served.engine, served.lines, peers.store_of, peers.link, _RELEASE, clock, lambda: secrets.token_hex(16)
        )

    def reloading(self, audit: Audit, host: ModelHost[ServedModel]) -> Reloading:
        settings, reloading = self.settings, Reloading(audit)
        reloading.add("credentials", self.server.reload_credentials)
        if settings.peer_token_file:
            reloading.add("peer_tokens", partial(_reload_peer_tokens, settings, self.peers))
        if settings.store_token_file or settings.store_token_dir:
            reloading.add("store_tokens", partial(reload_store_tokens, settings, self.stores, host))
        reloading.on_hangup()
        return reloading

    def status(self, host: ModelHost[ServedModel]) -> ServiceStatus:
        return status_of(host, self.stats, self.admission, time.monotonic())

    def look_after(self, host: ModelHost[ServedModel], parts: Parts) -> None:
        """Give memory back, keep a Mac awake, and hand turns over at the end, by the settings."""
        settings = self.settings
        if settings.keep_alive_s is not None:
            parts.running(host.keep_alive(settings.keep_alive_s))
        giving_back = GivingBack(partial(_of_host, host), settings.keep_hot_s, is_short_of_memory, time.monotonic)
        parts.running(giving_back.run())
        parts.running(Awake(lambda: self.has_work(host)).run())
        if settings.drain_to:
            parts.running(self._drain(host, settings.drain_to))

    async def _drain(self, host: ModelHost[ServedModel], peer: str) -> None:
        await self.server.stopping.wait()
        if (served := host.served) is not None:
            await self.giver_of(served).give_all(served.turns, peer)

    def has_work(self, host: ModelHost[ServedModel]) -> bool:
        return (host.served is not None and not host.served.is_idle) or self.admission.publishing.held_units > 0

    def page(self, audit: Audit, host: ModelHost[ServedModel], reloading: Reloading) -> OperatorPage:
        wellness = on_loop(asyncio.get_running_loop(), lambda: wellness_of(host, self.stores.values(), reloading))
        about = About("engine", _PROTOCOL, lambda: host.served.engine.device if host.served is not None else "")
        return OperatorPage(about, lambda: numbers_of(self.status(host), self.server.rpcs, audit), wellness)

    def until_stores_answer(self) -> "asyncio.Future[list[None]]":
        """Ends when all stores have answered, or have had the time that they get."""
        give_up_at = time.monotonic() + self.settings.store_wait_s
        return asyncio.gather(*(until_it_answers(each, give_up_at, time.monotonic) for each in self.stores.values()))

    def check_namespaces(self) -> None:
        """Raises RefusedToStart for a store whose token is of another namespace."""
        problems = [store.connection.problem for store in self.stores.values()]
        if mixed_up := [each.in_words for each in problems if each is not None and each.is_of_another_namespace]:
            raise RefusedToStart("; ".join(mixed_up))

    def add_to_server(
        self,
        host: ModelHost[ServedModel],
        formats: ReplyFormats,
        beside: EmbeddingModel | None,
        neighbour: ModuleType | None,
    ) -> None:
        """Serve turns, hand-overs and agents, and the neighbour's protocol if it is wanted."""
        settings, server = self.settings, self.server
        resumes = ResumeTokens(lambda: secrets.token_urlsafe(32), uptime_s)
        is_stopping = server.stopping.is_set
        telling = Telling(self.peers, settings.reader_stall_s, is_stopping)
        status = partial(self.status, host)
        stores, stats, admission = self.stores, self.stats, self.admission
        parts = ServiceParts(
            host, stores, formats, stats, status, resumes, telling, admission, beside, self.lease_owner
        )
        prompts, requests = settings.max_prompt_bytes, settings.max_request_bytes
        limits = ServiceLimits(prompts, requests, settings.max_unread_bytes, settings.reader_stall_s)
        handing_over = HandOverService(parts, self.giver_of, prompts)
        inference = InferenceService(parts, limits, is_stopping, settings.service_admin)
        server.add(handover_pb2_grpc.add_HandOverServiceServicer_to_server, handing_over)
        server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference)
        add_agent_service(self.stores, lambda: host.served, server.grpc)
        if neighbour is not None:
            neighbour.add_mlx_engine(
                server.grpc,
                host,
                TokenLines(self.stores, new_name=new_request_id, now_ms=_SURELY_MS),
                max_prompt_bytes=settings.max_prompt_bytes,
                reader_stall_s=settings.reader_stall_s,
                is_stopping=is_stopping,
                clock=time.monotonic,
            )


def _ending_the_process(open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """Engines that end the process where they fail: without its thread, as where its device is lost, an engine serves
    nothing, and its memories wait in the store for the next process. So do models that come later.
    """
    is_first = True

    def opened(path: str, **options: Any) -> Engine:
        nonlocal is_first
        try:
            engine = open_engine(path, **options)
        except DeviceLost as error:
            if not is_first:
                Thread(target=_end_process, args=(error,), daemon=True).start()
            raise
        is_first = False
        _end_process_by(engine.failed)
        return engine

    return opened


def _end_process_by(failed: "Future[None]") -> None:
    failed.add_done_callback(lambda _: _end_process(failed.exception()))


def _end_process(error: BaseException | None) -> None:
    _LOG.error("engine.failed", exc_info=error, why=error.message if isinstance(error, KvasirError) else "")
    time.sleep(RETRY_S)  # the event loop sends callers the ends of their turns
    sys.stderr.flush()
    os._exit(_EX_SOFTWARE)  # an ordinary exit would free the device's memory, which may fail


def _kv_budget(settings: EngineSettings, parts: Parts) -> KvBudget:
    """Raises NoRoom, for memory that is not there is missed only when agents fill it; ClaimsUnusable."""
    claims = claims_of_device()
    parts.callback(claims.close)
    parts.running(claims.keep())
    given = None if settings.memory_gib is None else int(settings.memory_gib * GIB)
    weights = weights_on_disk(settings.models.values())
    total = total_bytes(settings.device_gib)
    return KvBudget(claims, total, given, weights, partial(held_of, total))


def _of_host(host: ModelHost[ServedModel]) -> tuple[Engine, bool, Collection[AgentKey]] | None:
    served = host.served
    return None if served is None else (served.engine, served.is_idle, served.woken.ready.keys())


def _audit(settings: EngineSettings) -> Audit:
    file = AuditFile(settings.audit_file) if settings.audit_file else None
    return Audit("engine", file, {*PRIVILEGED, *PRIVILEGED_OF_AGENTS})


def _server(
    settings: EngineSettings, neighbour: ModuleType | None, traces: Traces, audit: Audit, pairings: PairingsFile
) -> EdgeServer:
    names = [SERVICE_NAME, HANDOVER_SERVICE_NAME, AGENT_SERVICE_NAME]
    return EdgeServer(
        settings.listening,
        [*names, *([neighbour.MLX_ENGINE_NAME] if neighbour else [])],
        {**ALLOWED_ROLES, **HANDOVER_ROLES, **AGENT_ROLES, **(neighbour.MLX_ENGINE_ROLES if neighbour else {})},
        Reports(new_request_id, traces, audit),
        max_message_bytes=settings.max_request_bytes,
        caller_of_certificate=lambda shown, namespace: pairings.book.caller(shown, namespace),
    )


async def _embedding_model(settings: EngineSettings, phases: StartPhases, parts: Parts) -> EmbeddingModel | None:
    if settings.embedding_model is None:
        return None
    phases.begin("embeddings")
    name, path = settings.embedding_model
    pooling = Pooling(settings.embedding_pooling)
    model = parts.closing(await asyncio.to_thread(EmbeddingModel.open, name, path, pooling))
    _end_process_by(model.failed)
    return model


def _neighbour() -> ModuleType:
    try:
        from inference_svc.edge.neighbour import mlx_engine_service
    except ImportError as error:
        raise RefusedToStart(f"--neighbour needs another package: install kvasir[neighbour] ({error})") from None
    return mlx_engine_service


def _report_ready(address: str, engine: Engine, settings: EngineSettings, phases: StartPhases) -> None:
    model = engine.model
    _LOG.info(
        "engine.ready",
        address=address,
        model=model.name,
        device=engine.device,
        blas=engine.blas,
        phases=phases.in_words,
        batch_invariant=settings.batch_invariant or engine.device == "cpu",
        kv_policy=model.policy_name,
        kv_policy_layers=f"{model.policy_applied_layers} of {model.layer_count}",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


_SURELY_MS = never_ahead(_now_ms)


async def _close_all(stores: Mapping[str, RemoteCache]) -> None:
    await asyncio.gather(*(store.connection.close() for store in stores.values()))


def _peers(settings: EngineSettings, parts: Parts, pairings: PairingsFile) -> Peers:
    """Clients of other engines. On a Unix socket the owner needs no token."""
    clients: dict[str, dict[str, AioTurnPeer]] = {}
    peers = parts.closing(Peers(clients, settings.peer_store, pairings))  # first: a later client may fail
    for name, address in settings.peer.items():
        tokens: dict[str, str | None] = {**_peer_tokens(settings, name)}
        if address.startswith("unix:"):
            tokens.setdefault(DEFAULT_NAMESPACE, None)
        ca_file = settings.peer_ca_file.get(name)
        tls = Tls(ca_file) if ca_file is not None else None
        clients[name] = {}
        for namespace, token in tokens.items():
            clients[name][namespace] = AioTurnPeer.connect(address, token=token, tls=tls)
    return peers


def _peer_tokens(settings: EngineSettings, name: str) -> dict[str, str]:
    return {namespace: read_token(path) for namespace, path in settings.peer_tokens(name).items()}


async def _reload_peer_tokens(settings: EngineSettings, peers: Peers) -> int:
    """Read the tokens again; turns on their way go on. Raises CredentialFileError: then all stay."""
    for name, tokens in {name: _peer_tokens(settings, name) for name in settings.peer}.items():
        for namespace, token in tokens.items():
            peers.renew_token(name, namespace, token)
    return 0
