"""Starts the gateway: `python -m kvasir_gateway --engine ADDRESS`; `kvasir up` does so with its own addresses."""

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import uvicorn
from kvasir.address import AddressError, AddressTaken, check_operators_address, parse_address
from kvasir.clients import Tls
from kvasir.credentials import (
    CredentialFileError,
    read_credentials,
    read_private_text,
    read_token,
    write_private_text,
)
from kvasir.errors import InvalidArgument, KvasirError
from kvasir.server.audit import Audit, AuditFile
from kvasir.server.log_errors import LineWithoutPayload
from kvasir.server.operator_page import About, OperatorPage, asked_of_loop
from kvasir.server.reloading import Reloading
from kvasir.server.serving import give_memory_back, settle_limits
from kvasir.server.traces import Traces
from kvasir.server.wellness import Wellness
from kvasir.volatile import DEFAULT, RULES, rules_of

from kvasir_gateway.answering import Turns
from kvasir_gateway.app import Gateway, GatewayLimits, Surroundings
from kvasir_gateway.conversations import Conversations
from kvasir_gateway.door.connections import Connection, ConnectionLimits, Connections
from kvasir_gateway.door.security import Gate
from kvasir_gateway.engine import EngineLink
from kvasir_gateway.metrics import GatewayNumbers
from kvasir_gateway.models import Aliases
from kvasir_gateway.page.history import History
from kvasir_gateway.page.routes import GatewayPage
from kvasir_gateway.page.sessions import Sessions
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.reading.side_calls import SIDE_RULES, side_rules_of
from kvasir_gateway.reading.tolerance import Tolerance

_log = logging.getLogger("kvasir_gateway")
DEFAULT_LISTEN = "127.0.0.1:8642"
_STOP_GRACE_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a gateway is started with."""

    listen: str
    engine: str
    state_dir: Path
    token_file: Path | None = None
    ca_file: Path | None = None
    credentials_file: Path | None = None
    is_open: bool = False
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    max_body_mib: int = 8
    metrics_listen: str = ""
    traces_to: str = ""
    audit_file: Path | None = None
    peers: Sequence[tuple[str, str]] = ()
    peer_ca_files: Sequence[tuple[str, str]] = ()
    is_strict: bool = False
    volatile: str = ",".join(sorted(DEFAULT))
    any_model: bool = True
    side_calls: str = ",".join(SIDE_RULES)
    aliases: Sequence[tuple[str, str]] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for wrong usage, 3 when an address cannot be had."""
    configure_logs()
    try:
        return asyncio.run(serve(_options(arguments)))
    except AddressTaken as error:
        print(f"kvasir_gateway: {error}", file=sys.stderr)
        return 3
    except (InvalidArgument, AddressError, CredentialFileError) as error:
        print(f"kvasir_gateway: {error}", file=sys.stderr)
        return 2
    except (KvasirError, OSError) as error:
        print(f"kvasir_gateway: {error}", file=sys.stderr)
        return 3


def configure_logs() -> None:
    """Send records to stderr, a line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineWithoutPayload("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


async def serve(options: Options) -> int:
    """Serve until SIGINT or SIGTERM. Raises InvalidArgument, AddressError, CredentialFileError and OSError before it
    listens."""
    address = parse_address(options.listen)
    if not address.is_loopback or address.socket_path is not None:
        raise InvalidArgument(
            f"--listen: expected a loopback HOST:PORT, got {options.listen}: put a proxy with TLS before it",
            field="--listen",
        )
    if options.credentials_file is None and not options.is_open:
        raise InvalidArgument(
            "--credentials FILE names the API keys; --no-keys lets every program of this machine act as you",
            field="--credentials",
        )
    if options.metrics_listen:
        check_operators_address(options.metrics_listen)
    token = read_token(options.token_file) if options.token_file is not None else None
    tls = Tls(options.ca_file) if options.ca_file is not None else None
    credentials = read_credentials(options.credentials_file) if options.credentials_file is not None else None
    key = _key(options.state_dir)
    conversations = Conversations(key, new_name=lambda: secrets.token_hex(6), now=lambda: datetime.now(UTC))
    aliases = Aliases.of(options.aliases)
    limits = ConnectionLimits.of(settle_limits())
    give_memory_back(1 << 20)
    traces = Traces(options.traces_to, "gateway")
    engine = EngineLink.connect(options.engine, token=token, tls=tls, peers=_peers(options))
    audit = Audit("http", AuditFile(options.audit_file) if options.audit_file is not None else None)
    gate = Gate(credentials, hosts=options.hosts, origins=options.origins, audit=audit)
    reloading = Reloading(audit)
    if options.credentials_file is not None:
        reloading.add("credentials", partial(_reload_keys, gate, options.credentials_file))
    reloading.on_hangup()
    sessions = Sessions(gate, now=time.time, new_secret=partial(secrets.token_urlsafe, 32))
    history = History(time.time)
    around = Surroundings(
        engine=engine,
        gate=gate,
        turns=Turns(conversations),
        limits=GatewayLimits(max_body_bytes=options.max_body_mib << 20, max_requests=limits.requests),
        numbers=GatewayNumbers(),
        tolerance=Tolerance(
            is_strict=options.is_strict,
            rules=rules_of(options.volatile, "--volatile"),
            any_model=options.any_model,
            seals=ThoughtSeals(key),
            side_rules=side_rules_of(options.side_calls),
        ),
        aliases=aliases,
        page=GatewayPage(engine, sessions, history, now=time.time),
        traces=traces,
        now=time.time,
        clock=time.perf_counter,
        new_request_id=lambda: uuid.uuid4().hex,
    )
    if aliases.by_name and (known := await engine.models()):  # an engine that starts is not asked
        aliases.check(known)
    listener = _listener(address.host, address.port)
    stop_page = None
    sampling = asyncio.create_task(history.follow(engine))
    try:
        if options.metrics_listen:
            wellness = asked_of_loop(asyncio.get_running_loop(), partial(_wellness, engine, reloading))
            page = OperatorPage(About("gateway", "http"), around.numbers.metrics, wellness)
            stop_page = page.serve(options.metrics_listen)
        await _serve(Gateway(around).app(), listener, Connections(limits))
    finally:
        if stop_page is not None:
            await asyncio.to_thread(stop_page)
        sampling.cancel()
        await asyncio.to_thread(traces.close)
        await asyncio.to_thread(audit.close)
        listener.close()
        await engine.close()
        times = around.numbers.written
        told = (times.count, 1000 * times.at_most_s(0.5), 1000 * times.at_most_s(0.99))
        _log.info("gateway.stopped events=%d written_within_ms_p50=%.3g p99=%.3g", *told)
    return 0


def _peers(options: Options) -> dict[str, tuple[str, Tls | None]]:
    """The engines to which turns may move. Raises InvalidArgument."""
    ca_files = dict(options.peer_ca_files)
    if unknown := ca_files.keys() - dict(options.peers).keys():
        raise InvalidArgument(f"--peer-ca-file: {min(unknown)!r} is no --peer", field="--peer-ca-file")
    return {name: (address, Tls(Path(ca_files[name])) if name in ca_files else None) for name, address in options.peers}


def _named(text: str) -> tuple[str, str]:
    """NAME=VALUE. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


async def _wellness(engine: EngineLink, reloading: Reloading) -> Wellness:
    """For operators: the engine's and the store's, and what this process could not read again."""
    found = await engine.wellness()
    return Wellness(found.ailments, {**found.facts, **reloading.facts})


async def _reload_keys(gate: Gate, file: Path) -> int:
    gate.take(await asyncio.to_thread(read_credentials, file))
    return 0


class _Server(uvicorn.Server):
    """uvicorn, without its own handling of signals, which would end the process by them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: object, listener: socket.socket, connections: Connections) -> None:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_STOP_GRACE_S,
        http=partial(Connection, connections=connections),  # type: ignore[arg-type]
    )
    server = _Server(config)
    host, port = listener.getsockname()[:2]
    with contextlib.suppress(OSError):  # a full disk takes no line of its log
        print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    await server.serve([listener])


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _key(state_dir: Path) -> bytes:
    """The key of conversations' digests and of thoughts: made once, kept for as long as both. Raises
    CredentialFileError.
    """
    path = state_dir / "conversations.key"
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


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m kvasir_gateway", description=__doc__)
    parser.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help="a loopback address")
    parser.add_argument("--engine", required=True, metavar="ADDRESS", help="unix:/path or host:port")
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="where the key of conversations' names and thoughts is kept"
    )
    parser.add_argument("--token-file", type=Path, help="the gateway's own token, for an engine that wants one")
    parser.add_argument("--ca-file", type=Path, help="PEM: the engine's certificate, or its authority's")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=ADDRESS",
        help="an engine to which turns may move, by the engine's name for it; callers' keys must hold there. They are "
        "shown to it as they are: it must be as trusted as --engine. Name --engine itself too, as its peers name it, "
        "and a turn that comes back is followed. An agent that moved to another store (the engine's --peer-store) "
        "stays there: its next request here is refused (AGENT_MOVED)",
    )
    parser.add_argument(
        "--peer-ca-file", action="append", default=[], type=_named, metavar="NAME=PATH", help="PEM, as --ca-file"
    )
    keys = parser.add_mutually_exclusive_group(required=True)
    keys.add_argument("--credentials", type=Path, metavar="FILE", help="whose tokens are API keys: as the engine's")
    keys.add_argument("--no-keys", action="store_true", help="callers need no key and act as the gateway does")
    parser.add_argument("--host", action="append", default=[], help="a name of this server, beside loopback addresses")
    parser.add_argument(
        "--origin", action="append", default=[], help="a site whose pages may call, as https://a.example"
    )
    parser.add_argument("--max-body-mib", type=int, default=8)
    parser.add_argument(
        "--metrics-listen", default="", metavar="HOST:PORT", help="Prometheus metrics and /healthz, on loopback"
    )
    parser.add_argument(
        "--traces-to", default="", metavar="URL", help="http://127.0.0.1:4317, where OpenTelemetry gets spans"
    )
    parser.add_argument("--audit-file", type=Path, help="where one JSON line tells each key that was refused")
    parser.add_argument(
        "--strict", action="store_true", help="refuse by name what is else ignored, and a max_tokens that does not fit"
    )
    parser.add_argument(
        "--any-model",
        action=argparse.BooleanOptionalAction,
        help="the loaded model answers for names that are no model's, and the answer names it; left out: yes, unless "
        "--strict is given, or --host",
    )
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=MODEL",
        help="a name that clients may use for one of the engine's models; the answer names the model. Several times",
    )
    parser.add_argument(
        "--volatile",
        default=",".join(sorted(DEFAULT)),
        metavar="RULE,…|none",
        help="what of a prompt does not change from request to request; an agent's label kvasir.volatile and a "
        f"request's header go before it; default: {', '.join(sorted(DEFAULT))}. "
        + ". ".join(f"{name}: {applies_to}" for name, applies_to in RULES.items()),
    )
    parser.add_argument(
        "--side-calls",
        default=",".join(SIDE_RULES),
        metavar="RULE,…|none",
        help="which requests beside a conversation leave no memory, when they name no agent; default: all. "
        + ". ".join(f"{rule.name}: {rule.applies_to}" for rule in SIDE_RULES.values()),
    )
    given = parser.parse_args(arguments)
    return Options(
        listen=given.listen,
        engine=given.engine,
        state_dir=given.state_dir,
        token_file=given.token_file,
        ca_file=given.ca_file,
        credentials_file=given.credentials,
        is_open=given.no_keys,
        hosts=given.host,
        origins=given.origin,
        max_body_mib=given.max_body_mib,
        metrics_listen=given.metrics_listen,
        traces_to=given.traces_to,
        audit_file=given.audit_file,
        peers=given.peer,
        peer_ca_files=given.peer_ca_file,
        is_strict=given.strict,
        volatile=given.volatile,
        side_calls=given.side_calls,
        aliases=given.alias,
        any_model=not (given.strict or given.host) if given.any_model is None else given.any_model,
    )


if __name__ == "__main__":
    sys.exit(main())
