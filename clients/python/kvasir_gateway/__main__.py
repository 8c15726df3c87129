"""Starts the gateway: `python -m kvasir_gateway --engine ADDRESS`; `kvasir up` does so with its own addresses."""

import argparse
import asyncio
import contextlib
import logging
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from kvasir.address import AddressError, AddressTaken, accepts, parse_address
from kvasir.clients import Tls
from kvasir.credentials import (
    GATEWAY_KEY,
    CredentialFileError,
    gateway_mark,
    read_credentials,
    read_private_text,
    read_token,
    write_private_text,
)
from kvasir.errors import InvalidArgument, KvasirError
from kvasir.options.finding import ConfigError, add_options, read
from kvasir.options.gateway import GatewayTable
from kvasir.server.interceptors import settle_garbage
from kvasir.server.operating.audit import Audit, AuditFile
from kvasir.server.operating.log_errors import JsonWithoutPayload, LineWithoutPayload
from kvasir.server.operating.operator_page import About, OperatorPage, on_loop
from kvasir.server.operating.traces import Traces
from kvasir.server.operating.wellness import Wellness
from kvasir.server.parts import Parts
from kvasir.server.reloading import Reloading
from kvasir.server.serving import give_memory_back, settle_limits
from kvasir.volatile import rules_of
from kvasir.waits import LOOK_S, uptime_s

from kvasir_gateway.answering import Turns
from kvasir_gateway.app import Gateway, GatewayLimits, Surroundings
from kvasir_gateway.conversations import Conversations
from kvasir_gateway.door.connections import ConnectionLimits, Connections
from kvasir_gateway.door.listening import listener_at, serve_app
from kvasir_gateway.door.security import Gate
from kvasir_gateway.engine import EngineLink
from kvasir_gateway.fleet.fleet_link import FleetLink
from kvasir_gateway.metrics import GatewayNumbers
from kvasir_gateway.models import Aliases
from kvasir_gateway.page.look import Sources
from kvasir_gateway.page.numbers.history import History
from kvasir_gateway.page.operating.part import Operating
from kvasir_gateway.page.routes import GatewayPage
from kvasir_gateway.page.sessions import Sessions
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.reading.side_calls import side_rules_of
from kvasir_gateway.reading.tolerance import Tolerance

_log = logging.getLogger("kvasir_gateway")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for wrong usage, 3 when an address cannot be had."""
    try:
        settings = _settings(arguments)
        configure_logs(settings.log_format, settings.log_level)
        asyncio.run(serve(settings))
    except AddressTaken as error:
        print(f"kvasir_gateway: {error}", file=sys.stderr)
        return 3
    except (InvalidArgument, AddressError, ConfigError, CredentialFileError) as error:
        print(f"kvasir_gateway: {error}", file=sys.stderr)
        return 2
    except (KvasirError, OSError) as error:
        print(f"kvasir_gateway: {error}", file=sys.stderr)
        return 3
    return 0


def _settings(arguments: Sequence[str] | None) -> GatewayTable:
    """By the command line, then the environment. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m kvasir_gateway", description=__doc__)
    add_options(parser, GatewayTable)
    return read(GatewayTable, vars(parser.parse_args(arguments)))


def configure_logs(log_format: str = "console", level: str = "info") -> None:
    """Send records to stderr, a line each."""
    handler = logging.StreamHandler()
    line = LineWithoutPayload("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonWithoutPayload() if log_format == "json" else line)
    logging.basicConfig(level=level.upper(), handlers=[handler])


async def serve(settings: GatewayTable) -> None:
    """Serve until SIGINT or SIGTERM. Raises InvalidArgument, AddressError, CredentialFileError and OSError before it
    listens."""
    limits = ConnectionLimits.of(settle_limits())
    give_memory_back(1 << 20)
    async with Parts() as parts:
        numbers = GatewayNumbers()
        engine = parts.closing(_engine(settings))
        audit = parts.closing(Audit("http", AuditFile(settings.audit_file) if settings.audit_file else None))
        traces = parts.closing(Traces(settings.traces_to, "gateway"))
        credentials = read_credentials(settings.credentials) if settings.credentials is not None else None
        gate = Gate(credentials, hosts=settings.host, origins=settings.origin, audit=audit)
        reloading = _reloading(settings, gate, audit)
        history = History(time.time)
        sources = Sources(time.time, time.perf_counter, lambda: uuid.uuid4().hex)
        operating = parts.closing(Operating(settings.home, settings.service_admin, sources.now))
        sessions = Sessions(gate, clock=uptime_s, new_secret=partial(secrets.token_urlsafe, 32))
        key = _key(settings.state_dir)
        aliases = Aliases(settings.alias)
        conversations = Conversations(key, new_name=partial(secrets.token_hex, 6), now=partial(datetime.now, UTC))
        around = Surroundings(
            engine=engine,
            gate=gate,
            turns=Turns(conversations, history.ended),
            limits=GatewayLimits(max_body_bytes=settings.max_body_mib << 20, max_requests=limits.requests),
            numbers=numbers,
            tolerance=_tolerance(settings, key),
            aliases=aliases,
            page=GatewayPage(engine, sessions, history, numbers, operating, sources),
            traces=traces,
            now=sources.now,
            clock=sources.clock,
            new_request_id=sources.new_id,
            mark=gateway_mark(settings.state_dir, settings.home),
        )
        app = Gateway(around).app()  # before the engine is there, of which nobody waits for it then
        for address in settings.engine:
            await until_it_listens(address, settings.engine_wait_s, time.monotonic)
        await _check(aliases, engine)
        listener = parts.enter_context(contextlib.closing(listener_at(settings.listen)))
        parts.callback(_log_end, numbers)
        parts.running(history.follow(engine))
        if isinstance(engine, FleetLink):
            parts.running(engine.watch())
        if settings.metrics_listen:
            wellness = on_loop(asyncio.get_running_loop(), partial(_wellness, engine, reloading))
            page = OperatorPage(About("gateway", "http"), numbers.metrics, wellness)
            parts.push_async_callback(asyncio.to_thread, page.serve(settings.metrics_listen))
        settle_garbage()
        await serve_app(app, listener, parts.closing(Connections(limits)))


def _log_end(numbers: GatewayNumbers) -> None:
    times = numbers.written
    told = (times.count, 1000 * times.at_most_s(0.5), 1000 * times.at_most_s(0.99))
    _log.info("gateway.stopped events=%d written_within_ms_p50=%.3g p99=%.3g", *told)


def _engine(settings: GatewayTable) -> EngineLink:
    """The engines, and those to which their turns may move. Raises InvalidArgument and CredentialFileError."""
    files = settings.peer_ca_file
    links = [
        EngineLink.connect(
            address,
            token=read_token(settings.token_file) if settings.token_file is not None else None,
            tls=Tls(settings.ca_file) if settings.ca_file is not None else None,
            peers={name: (where, Tls(files[name]) if name in files else None) for name, where in settings.peer.items()},
        )
        for address in settings.engine
    ]
    return FleetLink.to(links, settings.engine)


async def until_it_listens(address: str, most_s: float, clock: Callable[[], float]) -> None:
    """Wait for an engine that was never there: a first call would delay the next ones. A socket shows one that was."""
    path, give_up_at = parse_address(address).socket_path, clock() + most_s
    if path is not None and path.exists():
        return
    while True:
        if clock() >= give_up_at or await asyncio.to_thread(accepts, address):
            return
        await asyncio.sleep(LOOK_S)


async def _check(aliases: Aliases, engine: EngineLink) -> None:
    """Raises InvalidArgument for those of no model."""
    if aliases.by_name and (known := await engine.models()):  # an engine that starts is not called
        aliases.check(known)


def _tolerance(settings: GatewayTable, key: bytes) -> Tolerance:
    usual = not (settings.strict or settings.host)
    return Tolerance(
        is_strict=settings.strict,
        rules=rules_of(settings.volatile, "--volatile"),
        any_model=usual if settings.any_model is None else settings.any_model,
        seals=ThoughtSeals(key),
        side_rules=side_rules_of(settings.side_calls),
    )


def _reloading(settings: GatewayTable, gate: Gate, audit: Audit) -> Reloading:
    reloading = Reloading(audit)
    if (file := settings.credentials) is not None:

        async def read() -> int:
            gate.take(await asyncio.to_thread(read_credentials, file))
            return 0

        reloading.add("credentials", read)
    reloading.on_hangup()
    return reloading


async def _wellness(engine: EngineLink, reloading: Reloading) -> Wellness:
    """For operators: the engine's and the store's, and what this process could not read again."""
    found = await engine.wellness()
    return Wellness(found.ailments, {**found.facts, **reloading.facts})


def _key(state_dir: Path) -> bytes:
    """The key of conversations' digests and of thoughts, made once. Raises CredentialFileError."""
    path = state_dir / GATEWAY_KEY
    with contextlib.suppress(FileExistsError):
        write_private_text(path, secrets.token_hex(32))
    text = read_private_text(path).strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise CredentialFileError(f"{path}: expected 64 hex digits; remove it, and a new key is made")
    return key


if __name__ == "__main__":
    sys.exit(main())
