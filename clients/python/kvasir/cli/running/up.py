"""`kvasir up`: store and engine as one group under one home, until Ctrl-C or SIGTERM.

It makes the home and its credentials, starts the store and then the engine, and writes their addresses for other
commands. A home has one group: the services inherit a lock, which is held until the last of them has ended.
"""

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvasir.address import parse_address
from kvasir.cli.caller import Caller, caller_of
from kvasir.cli.running.home import Endpoint, Home, Running
from kvasir.cli.running.processes import EngineProcess, StoreProcess
from kvasir.cli.running.supervisor import Supervisor, process_exists
from kvasir.credentials import (
    ADMIN,
    CLIENT,
    DEFAULT_NAMESPACE,
    ENGINE,
    PEER,
    Principal,
    write_credentials,
    write_private_text,
)
from kvasir.errors import FailedPrecondition, InvalidArgument, Unavailable

GIB = 1 << 30
# The credentials of a new home: people and their programs, the engine, and another Mac's store that pulls.
_PRINCIPALS = (
    Principal("client", DEFAULT_NAMESPACE, frozenset({CLIENT, ADMIN})),
    Principal("engine", DEFAULT_NAMESPACE, frozenset({ENGINE})),
    Principal("peer", DEFAULT_NAMESPACE, frozenset({PEER})),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to start and their addresses."""

    store: StoreProcess
    engine: EngineProcess


def up(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A directory or name of an mlx-lm model. Left out: the shipped model. Several times, as NAME=PATH: "
            "the first is loaded, and `kvasir models load` swaps them.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT for the engine, which then wants a token. Left out: a Unix socket.", metavar="HOST:PORT"
        ),
    ] = "",
    store_listen: Annotated[
        str, typer.Option(help="HOST:PORT for the store, for other Macs to pull from.", metavar="HOST:PORT")
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate, needed beyond this machine.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, mode 0600.")] = None,
    metrics_listen: Annotated[
        str, typer.Option(help="127.0.0.1:PORT for the engine's Prometheus metrics.", metavar="HOST:PORT")
    ] = "",
    kv_policy: Annotated[
        str,
        typer.Option(
            help="How keys and values are stored: q4 (if left out), q4-rotated, k8v4, q8, fp; or auto, the cheapest "
            "with which the model answers as with exact KV, measured once. `kvasir bench quality` shows their costs."
        ),
    ] = "",
    kv_exact_layers: Annotated[
        str, typer.Option(help='Layers that stay at 16 bits: "last", or indexes with commas between.')
    ] = "",
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="RAM for the KV of all agents, hot and running, in GiB. Left out: 4. See `kvasir doctor`."
        ),
    ] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="The most tokens of an agent's context. Left out, or more: the model's own."),
    ] = None,
    store_quota_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="Disk for each namespace's memories, in GiB. Left out: as much as the disk has."),
    ] = None,
) -> None:
    """Run the store and the engine as one group, until Ctrl-C."""
    caller = caller_of(context)
    home = caller.home
    home.make()
    with locked(home) as descriptor:
        make_credentials(home)
        given = (
            ("--metrics-listen", metrics_listen),
            ("--kv-policy", kv_policy),
            ("--kv-exact-layers", kv_exact_layers),
            ("--memory-gib", memory_gib),
            ("--context-tokens", context_tokens),
        )
        options = [str(part) for option in given if option[1] for part in option]
        quota_bytes = int(store_quota_gib * GIB) if store_quota_gib else None
        plan = plan_of(home, model or [], listen, store_listen, tls_cert, tls_key, options, quota_bytes)
        asyncio.run(_run(caller, plan, descriptor))


def plan_of(
    home: Home,
    models: Sequence[str],
    listen: str,
    store_listen: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    engine_options: Sequence[str] = (),
    store_quota_bytes: int | None = None,
) -> Plan:
    """The plan that the options ask for. Raises InvalidArgument for a malformed address or one in use."""
    for option, address in (("--listen", listen), ("--store-listen", store_listen)):
        if address:
            check_free(address, option)
    credentials = home.credentials_file if listen or store_listen else None
    has_tls = tls_cert is not None and tls_key is not None
    ca_file = tls_cert if has_tls else None
    store_endpoint = Endpoint(home.socket_address("store"))
    engine_endpoint = Endpoint(home.socket_address("engine"))
    if store_listen:
        store_endpoint = Endpoint(from_here(store_listen), home.tokens / "engine.token", ca_file)
    if listen:
        engine_endpoint = Endpoint(from_here(listen), home.tokens / "client.token", ca_file)
    store = StoreProcess(
        data_dir=home.store_data,
        listen=store_listen or store_endpoint.address,
        endpoint=store_endpoint,
        log_file=home.logs / "store.log",
        engine_listen=home.socket_address("engines"),
        credentials_file=credentials,
        peers_file=home.peers_file,
        quota_bytes=store_quota_bytes,
        tls_cert_file=tls_cert if store_listen else None,
        tls_key_file=tls_key if store_listen else None,
    )
    engine = EngineProcess(
        listen=listen or engine_endpoint.address,
        endpoint=engine_endpoint,
        store=Endpoint(home.socket_address("engines"), store_endpoint.token_file),
        log_file=home.logs / "engine.log",
        state_dir=home.engine_state,
        model=models[0] if models else "",
        options=(*(part for model in models[1:] for part in ("--model", model)), *engine_options),
        credentials_file=credentials,
        service_admin=_PRINCIPALS[0].name if credentials else "",
        tls_cert_file=tls_cert if listen else None,
        tls_key_file=tls_key if listen else None,
    )
    return Plan(store, engine)


async def _run(caller: Caller, plan: Plan, descriptor: int) -> None:
    supervisor = Supervisor(
        [plan.store.service(), plan.engine.service()],
        say=caller.say,
        clock=time.monotonic,
        keep_descriptor=descriptor,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)

    def tell_others() -> None:
        caller.home.write_running(
            Running(
                pid=os.getpid(),
                store=plan.store.endpoint.address,
                engine=plan.engine.endpoint.address,
                token_file=str(caller.home.tokens / "client.token"),
                ca_file=str(plan.store.tls_cert_file or plan.engine.tls_cert_file or ""),
                store_pid=supervisor.pid("store"),
                engine_pid=supervisor.pid("engine"),
            )
        )

    def greet() -> None:
        tell_others()
        caller.say(f"engine: {plan.engine.endpoint.address}")
        caller.say(f"store:  {plan.store.endpoint.address}")
        caller.say("Talk to an agent with `kvasir chat ada`. Ctrl-C stops both.")

    caller.say(f"Starting in {caller.home.root}; logs are in {caller.home.logs}")
    try:
        await supervisor.run(greet, tell_others)
    finally:
        caller.home.running_file.unlink(missing_ok=True)
    caller.say("Both have stopped.")


@contextlib.contextmanager
def locked(home: Home) -> Iterator[int]:
    """Hold the home's lock. Raises FailedPrecondition if another group, or its remaining services, hold it."""
    descriptor = os.open(home.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(_who_holds(home), reason="ALREADY_RUNNING") from None
        os.set_inheritable(descriptor, True)
        yield descriptor
    finally:
        os.close(descriptor)


def _who_holds(home: Home) -> str:
    running = home.running()
    if running is None:
        return f"another `kvasir up` is starting in {home.root}"
    if process_exists(running.pid):
        return f"`kvasir up` is already running in {home.root} (pid {running.pid}); use it, or another --home"
    left = " ".join(str(pid) for pid in (running.engine_pid, running.store_pid) if pid and process_exists(pid))
    return f"a `kvasir up` in {home.root} was killed and its services live on; run: kill {left}"


def make_credentials(home: Home) -> None:
    """Write credentials and tokens, once per home."""
    if home.credentials_file.exists():
        return
    tokens = write_credentials(home.credentials_file, _PRINCIPALS, lambda: secrets.token_urlsafe(32))
    for name, token in tokens.items():
        token_file = home.tokens / f"{name}.token"
        token_file.unlink(missing_ok=True)
        write_private_text(token_file, token + "\n")


def from_here(address: str) -> str:
    """How a program on this machine reaches a service that listens at `address`."""
    parsed = parse_address(address)
    return f"localhost:{parsed.port}" if _is_everywhere(parsed.host) else address


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_free(address: str, option: str) -> None:
    """Raise InvalidArgument unless `address` is a host and port that nothing listens on."""
    try:
        parsed = parse_address(address)
    except ValueError as error:
        raise InvalidArgument(f"{option}: {error}", field=option) from None
    if parsed.socket_path is not None:
        raise InvalidArgument(f"{option}: expected HOST:PORT; leave it out for a Unix socket", field=option)
    if parsed.port == 0:
        raise InvalidArgument(f"{option}: name a port, so that others can find it", field=option)
    family = socket.AF_INET6 if ":" in parsed.host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parsed.host, parsed.port))
        except OSError as error:
            raise Unavailable(
                f"{option}: cannot listen on {address}: {error.strerror}; stop what is there or choose another port",
                reason="ADDRESS_IN_USE",
            ) from None
