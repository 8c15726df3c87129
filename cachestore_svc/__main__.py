"""The cache store's program: `serve`, or a command on its data. Clock, randomness and configuration enter here."""

import asyncio
import contextlib
import io
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
from kvasir.address import AddressError
from kvasir.cachestore.v1 import cachestore_pb2_grpc, pairing_pb2_grpc
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.server.interceptors import settle_garbage
from kvasir.server.operating.audit import Audit, AuditFile
from kvasir.server.operating.awake import Awake
from kvasir.server.operating.durations import RpcCounts
from kvasir.server.operating.logs import configure_logs
from kvasir.server.operating.operator_page import About, OperatorPage, on_loop
from kvasir.server.operating.traces import Traces
from kvasir.server.operating.wellness import Ailment, Wellness
from kvasir.server.parts import Parts
from kvasir.server.reloading import Reloading
from kvasir.server.serving import EdgeServer, RefusedToStart, Reports, give_memory_back, run
from kvasir.server.shared_room import SharedRoom
from kvasir.syncing import synced_write_s
from kvasir.waits import SWITCH_S, uptime_s

from cachestore_svc.commands import beside, care, pairing, seal_keys
from cachestore_svc.commands.command_line import CANNOT_RUN, NO_STORE, OK, parser
from cachestore_svc.config import ConfigError, StoreSettings, read_settings
from cachestore_svc.edge.agent_service import AgentService
from cachestore_svc.edge.metrics import StoreNumbers
from cachestore_svc.edge.moving_service import MovingService
from cachestore_svc.edge.peer_service import PeerService
from cachestore_svc.edge.roles import (
    AGENT_SERVICE_NAME,
    ALLOWED_ROLES,
    MOVING_SERVICE_NAME,
    PEER_SERVICE_NAME,
    PRIVILEGED,
    SERVICE_NAME,
)
from cachestore_svc.edge.service import CacheStoreService, ServiceLimits, StoreParts, add_to_server
from cachestore_svc.facts.records import StoreConfig
from cachestore_svc.index.catalog import HOUSE
from cachestore_svc.moving.arrivals import Receiving
from cachestore_svc.moving.bringing import Bringing
from cachestore_svc.moving.claim_polling import ClaimPolling
from cachestore_svc.moving.handing_over import HandingOver
from cachestore_svc.moving.moves import Moves
from cachestore_svc.moving.outbound import BlobReader
from cachestore_svc.moving.peering.peer_limits import PeerLimits
from cachestore_svc.moving.peering.peers import Peers
from cachestore_svc.moving.repairing import Repairs
from cachestore_svc.moving.transfer import Transfers
from cachestore_svc.pairing.peers_file import read_peers
from cachestore_svc.recovery import recovering
from cachestore_svc.recovery.key_care import KeyCare
from cachestore_svc.recovery.means import Means
from cachestore_svc.recovery.on_server import check_not_in_bucket, check_on_file
from cachestore_svc.recovery.opening import copy_index, holds_store
from cachestore_svc.sealing.sealed_list import add_to_list
from cachestore_svc.store.aio_store import AioStore
from cachestore_svc.store.background_scrub import BackgroundScrub
from cachestore_svc.store.jobs import while_ours
from cachestore_svc.store.reading_ahead import ReadingAhead
from cachestore_svc.store.store import Store
from cachestore_svc.store.threads import StoreThreads
from cachestore_svc.upkeep.expiring import ClockReading

_PROTOCOL = "kvasir.cachestore.v1"
_LOG = structlog.get_logger("cachestore")
_MEANS = Means(time.time, secrets.token_hex)
_SLOW_SYNC = 0.05
_RESUMED = "AgentService/GetSnapshot"
# While one of these runs a Mac stays awake.
_KEEP_AWAKE = (
    *(f"AgentService/{rpc}" for rpc in ("PullAgent", "MoveAgent", "ExportAgent", "ImportAgent")),
    *(f"CacheStoreService/{rpc}" for rpc in ("WriteBlobs", "ReadBlobs", "VerifyBlobs")),
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that the output lacks ends no report
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments[:1] and arguments[0] in pairing.COMMANDS:
        return pairing.main(arguments)
    options = vars(parser().parse_args(arguments))
    command, as_json = options.pop("command"), options.pop("json", False)
    words = {name: options.pop(name, None) for name in ("repair", "read_only", "dry_run", "namespace", "into")}
    asked_of_keys = seal_keys.take_options(options)
    try:
        settings = read_settings(options)
        configure_logs(settings.log_format, settings.log_level)
        if command == "serve":
            give_memory_back(12 << 20)
            run(serve(settings))
            return OK
        if command == "keys":
            key_care = KeyCare(settings.store_config(), _MEANS)
            seal_keys.run_keys(settings, key_care, asked_of_keys, secrets.token_bytes)
            return OK
        return _look_after(settings, command, words, as_json)
    except (ConfigError, RefusedToStart, AddressError, KvasirError) as error:
        print(f"cachestore_svc: {error}", file=sys.stderr)
        return CANNOT_RUN


def _look_after(settings: StoreSettings, command: str, words: Mapping[str, Any], as_json: bool) -> int:
    """A command about the data. Raises KvasirError."""
    if not holds_store(settings.data_dir):
        print(f"cachestore_svc: no store in {settings.data_dir}", file=sys.stderr)
        return NO_STORE
    if command in ("copy-index", "recover") or words["read_only"]:
        check_on_file(settings.data_dir, "its server's own tools copy and restore it (pg_dump, pg_basebackup)")
        check_not_in_bucket(settings.catalog, command)
    if command == "copy-index":
        copy_index(settings.data_dir, words["into"])
        return OK
    if command == "recover":
        return recover(settings, words["namespace"] or [], as_json)
    if words["read_only"]:
        masters = seal_keys.masters_of(settings)

        def open_copy(config: StoreConfig) -> Store:
            return Store.open(config, _MEANS, sweeps=False, masters=masters)

        return care.show_check(beside.check_beside(settings.store_config(), open_copy), as_json)
    # A check must find what there is, not what a start makes of it.
    only_looks = (command == "check" and not words["repair"]) or words["dry_run"]
    with open_store(settings, sweeps=not only_looks) as store:
        if command == "check":
            return care.show_check(store.care.check(repair=words["repair"]), as_json)
        return care.scrub(store, as_json) if command == "scrub" else care.collect(store, words["dry_run"], as_json)


def open_store(settings: StoreSettings, *, sweeps: bool = True) -> Store:
    """What the settings name. Sealed namespaces that the owner's list lacks are added to it, as after a crash."""
    masters = seal_keys.masters_of(settings)
    store = Store.open(settings.store_config(), _MEANS, sweeps=sweeps, masters=masters)
    try:
        if sweeps:
            add_to_list(settings.sealed_file, store.sealed_namespaces)
    except FailedPrecondition as error:
        _LOG.warning("sealed_file.not_written", why=error.message)
    except BaseException:
        store.close()
        raise
    return store


async def _report_syncs(data_dir: Path) -> None:
    """Each commit waits for several of these, which are shared by all that come meanwhile: a slow disk slows lone turns
    more than crowds.
    """
    with contextlib.suppress(OSError):  # a full disk refuses what a turn needs, and reports it
        seconds = await asyncio.to_thread(synced_write_s, data_dir, time.perf_counter)
        (_LOG.warning if seconds > _SLOW_SYNC else _LOG.info)("disk.synced_write", ms=round(1000 * seconds, 1))


async def serve(settings: StoreSettings) -> None:
    async with Parts() as parts:
        audit = parts.closing(
            Audit("store", AuditFile(settings.audit_file) if settings.audit_file else None, PRIVILEGED)
        )
        traces = parts.closing(Traces(settings.traces_to, "store", roots=()))  # it begins no trace: its callers do
        peers = Peers(lambda: read_peers(settings.peers_file))
        edge = _edge(settings, peers, traces, audit)
        peer_service = PeerService(peers, edge)
        reloading = _reloading(edge, peer_service, audit)
        began = time.monotonic()
        store = parts.closing(await asyncio.to_thread(open_store, settings))
        threads = parts.closing(_threads(settings))
        served = AioStore(store, threads)
        repairs = Repairs(served, peers, settings.stall_timeout_s)
        services = make_services(settings, served, peers, repairs, edge.stopping)
        services.add_to(edge)
        edge.add(pairing_pb2_grpc.add_PeerServiceServicer_to_server, peer_service)
        if settings.metrics_listen:
            page = _page(store, threads, edge.rpcs, audit, reloading)
            parts.push_async_callback(asyncio.to_thread, page.serve(settings.metrics_listen))
        # Before a peer can call: it is known by its new name only.
        await services.moves.rename_peers()
        peer_service.reloaded = services.moves.rename_peers
        await edge.start()
        parts.closing(edge)
        await peer_service.settle()
        edge.set_ready(True)
        with contextlib.suppress(OSError):  # a full disk takes no line of its log
            print(f"listening on {edge.address}", flush=True)
        _LOG.info("store.started", address=edge.address, ms=round((time.monotonic() - began) * 1000))
        parts.running(_report_syncs(settings.data_dir))
        if not store.blobs.are_far:
            ahead = ReadingAhead(served, settings.read_ahead_bytes, lambda: edge.rpcs.calls[_RESUMED, "OK"])
            parts.running(ahead.run())
        parts.running(Awake(lambda: any(edge.rpcs.open[rpc] for rpc in _KEEP_AWAKE)).run())
        for name, work in _works(settings, store, served, services, repairs).items():
            parts.running(while_ours(store.has_job, threads, name, work))
        if store.is_shared:  # another store may collect for all, and does not know this one's parts
            parts.running(collect_own_regularly(store, threads, settings.gc_interval_s))
        settle_garbage()
        await edge.run_until_stopped(settings.stop_grace_s)
    _LOG.info("store.stopped")


def _edge(settings: StoreSettings, peers: Peers, traces: Traces, audit: Audit) -> EdgeServer:
    return EdgeServer(
        settings.listening(),
        [SERVICE_NAME, AGENT_SERVICE_NAME, PEER_SERVICE_NAME, MOVING_SERVICE_NAME],
        ALLOWED_ROLES,
        Reports(lambda: secrets.token_hex(8), traces, audit),
        caller_of_certificate=lambda pem, namespace: peers.paired.principal_of(pem, namespace),
    )


def _reloading(edge: EdgeServer, peer_service: PeerService, audit: Audit) -> Reloading:
    reloading = Reloading(audit)
    reloading.add("credentials", edge.reload_credentials)
    reloading.add("peers", peer_service.reload)
    reloading.on_hangup()
    return reloading


@dataclass(frozen=True)
class Services:
    store: CacheStoreService
    agents: AgentService
    moving: MovingService
    moves: Moves
    claims: ClaimPolling

    def add_to(self, edge: EdgeServer) -> None:
        edge.add(add_to_server, self.store)
        edge.add(cachestore_pb2_grpc.add_AgentServiceServicer_to_server, self.agents)
        edge.add(cachestore_pb2_grpc.add_MovingServiceServicer_to_server, self.moving)


def _works(
    settings: StoreSettings, store: Store, served: AioStore, services: Services, repairs: Repairs
) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """The jobs that one of the stores over the same bytes does for all."""
    works = {
        "collection": lambda: collect_regularly(store, served.threads, settings.gc_interval_s),
        "claims": services.claims.run,
        "moves": services.moves.keep,
    }
    if settings.scrub_bytes_per_s:
        speed, rest_s = settings.scrub_bytes_per_s, settings.scrub_every_s
        works["scrub"] = BackgroundScrub(served, repairs.repair, bytes_per_s=speed, every_s=rest_s).run
    return works


def make_services(
    settings: StoreSettings, store: AioStore, peers: Peers, repairs: Repairs, stopping: asyncio.Event
) -> Services:
    reader = BlobReader(store, SharedRoom(settings.read_buffer_bytes))
    limits = PeerLimits(time.monotonic)
    bringing = Bringing(store, peers, limits)
    transfers = Transfers(store, reader, peers, bringing, settings.stall_timeout_s)
    parts = StoreParts(store, reader, transfers, peers, repairs)
    served = ServiceLimits(settings.scrub_bytes_per_s, settings.max_blob_bytes, settings.stall_timeout_s)
    service = CacheStoreService(parts, served, stopping)
    patience_s = settings.move_patience_s
    handing_over = HandingOver(store, peers, limits, patience_s=patience_s, steady=time.monotonic)
    receiving = Receiving(store, transfers.copies, bringing)
    moves = Moves(receiving, peers, handing_over, secrets.token_hex)
    agents = AgentService(store, transfers, moves, peers, stall_timeout_s=settings.stall_timeout_s)
    claims = ClaimPolling(store, peers, handing_over, uptime_s)
    return Services(service, agents, MovingService(handing_over, peers), moves, claims)


def _threads(settings: StoreSettings) -> StoreThreads:
    # A call takes about ten steps of the loop, and each would wait for threads that parse and list.
    sys.setswitchinterval(SWITCH_S)
    is_remote = bool(settings.catalog or settings.blobs)  # then most calls wait for a network
    return StoreThreads() if is_remote else StoreThreads(beside=max(2, os.cpu_count() or 1))


def _page(store: Store, threads: StoreThreads, rpcs: RpcCounts, audit: Audit, reloading: Reloading) -> OperatorPage:
    async def wellness() -> Wellness:
        try:
            ailments = await threads.run(HOUSE, store.statistics.ailments)
            return Wellness(
                ailments, {**reloading.facts, "written": await threads.run(HOUSE, store.statistics.written)}
            )
        except KvasirError as error:
            return Wellness([Ailment(error.reason, error.message)])

    asked = on_loop(asyncio.get_running_loop(), wellness)
    return OperatorPage(About("store", _PROTOCOL), StoreNumbers(store, rpcs, audit).metrics, asked)


async def collect_regularly(store: Store, threads: StoreThreads, interval_s: float) -> None:
    """Expire agents and collect garbage now and then."""
    run = secrets.token_hex(8)

    async def collect() -> None:
        expired = await threads.run(HOUSE, store.care.expire_agents, ClockReading(time.time(), uptime_s(), run))
        report = await threads.run(HOUSE, store.care.collect_garbage)
        _LOG.info("gc.done", **asdict(report), agents_expired=expired)

    await _regularly(interval_s, collect)


async def collect_own_regularly(store: Store, threads: StoreThreads, interval_s: float) -> None:
    """Collect this store's own parts and asides now and then."""
    await _regularly(interval_s, lambda: threads.run(HOUSE, store.care.collect_own))


async def _regularly(interval_s: float, collect: Callable[[], Awaitable[object]]) -> None:
    """A failure is logged and waits for the next time."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await collect()
        except KvasirError as error:
            _LOG.warning("gc.failed", reason=error.reason)
        except Exception:  # noqa: BLE001 - a failing disk's OSError, or a bug of ours: neither may end collection for good
            _LOG.exception("gc.failed")


def recover(settings: StoreSettings, namespaces: Sequence[str], as_json: bool) -> int:
    masters = seal_keys.masters_of(settings)
    report = recovering.recover(settings.store_config(), _MEANS, namespaces, care.progress(time.monotonic), masters)
    # The first start sets blobs aside that are not listed, and checks the new index as any start does.
    open_store(settings).close()
    return care.show_recovered(report, as_json)


if __name__ == "__main__":
    sys.exit(main())
