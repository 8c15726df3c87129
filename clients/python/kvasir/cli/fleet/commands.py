"""`kvasir gateway` and `kvasir fleet …`: one door to several engines of a store, and what each of them has."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from kvasir.address import accepts
from kvasir.cli.caller import Caller, command
from kvasir.cli.failures import UNREACHABLE, WrongUsage
from kvasir.cli.fleet.balancers import Balancer, envoy, nginx
from kvasir.cli.rows import fields_of, size
from kvasir.cli.running.checks import check_installed
from kvasir.cli.running.health import STORE_SERVICE, health
from kvasir.cli.running.home import Endpoint
from kvasir.cli.running.program import MODULE
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.tables import table
from kvasir.clients import InferenceClient
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.options.gateway import DEFAULT_LISTEN
from kvasir.waits import ANSWER_S

app = typer.Typer(no_args_is_help=True, help="Several engines of one store.")

EnginesOption = Annotated[
    list[str] | None, option("An engine; repeatable. Default: the home's.", "--engine", metavar="ADDRESS")
]
_PAGE = 500  # agents that an engine looks up at once


def gateway(
    caller: Caller,
    engine: EnginesOption = None,
    listen: Annotated[str, option("A loopback address.", metavar="HOST:PORT")] = DEFAULT_LISTEN,
) -> None:
    """Run one HTTP gateway before several engines of a store, until Ctrl-C.

    The gateway sends a turn to the engine that has its agent hot, else to the agent's own engine, or to the next one
    while that is gone or busy. Keys are the tokens of this home, which every engine must accept (copy
    credentials.toml). Variables KVASIR_GATEWAY_… of the environment set the gateway's other options."""
    check_installed(gateway=True)
    home, known = caller.home, caller.engine
    if not home.credentials_file.exists():
        text = f"{home.credentials_file} is missing: copy it, with tokens/, from the home of an engine"
        raise FailedPrecondition(text, reason="NO_CREDENTIALS")
    token = caller.token_file or home.tokens / "client.token"
    words = ["--listen", listen, "--credentials", str(home.credentials_file), "--token-file", str(token)]
    words += ["--state-dir", str(home.gateway_state), "--audit-file", str(home.audit_file("http"))]
    for each in engine or [known.address]:
        words += ["--engine", each]
    if ca_file := caller.ca_file or known.ca_file:
        words += ["--ca-file", str(ca_file)]
    home.make()
    for folder in (home.gateway_state, home.audit_file("http").parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    os.execv(sys.executable, [sys.executable, MODULE, "kvasir_gateway", *words])  # noqa: S606  it becomes it


@command(app, "config")
def config(
    caller: Caller,
    kind: Annotated[Literal["nginx", "envoy"], argument("nginx or envoy.", "KIND")],
    engine: EnginesOption = None,
    listen: Annotated[str, option("The address to listen at.", metavar="HOST:PORT")] = "127.0.0.1:8650",
    tls_cert: Annotated[Path | None, option("PEM certificate, needed beyond this machine.")] = None,
    tls_key: Annotated[Path | None, option("The certificate's key.")] = None,
) -> None:
    """Print a configuration of nginx or Envoy that sends each agent's gRPC turns to one of several engines.

    --ca-file, before the command, is the certificate of engines beyond this machine. Try it with `nginx -t -c FILE`, or
    `envoy --mode validate -c FILE`."""
    engines = engine or [caller.engine.address]
    balancer = Balancer(listen, engines, tls_cert, tls_key, caller.ca_file)
    balancer.check()
    text = nginx(balancer) if kind == "nginx" else envoy(balancer)
    caller.result({"kind": kind, "text": text}, lambda out: _write(out, text))


def _write(out: Console, text: str) -> None:
    """As it is: a file that is copied has no wrapped lines."""
    out.file.write(text)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine of a fleet. `hot`: the agents that it has in RAM, as `kvasir agents` names them."""

    address: str
    state: str  # ready, or why it is not
    lease_owner: str = ""
    version: str = ""
    model: str = ""
    has_store: bool = False
    hot: tuple[dict[str, Any], ...] = ()


@command(app, "status")
def status(
    caller: Caller,
    engine: EnginesOption = None,
    store: Annotated[
        list[str] | None,
        option("A store process; repeat it for each replica. Default: the home's.", "--store", metavar="ADDRESS"),
    ] = None,
) -> None:
    """Show the engines of a store, that store's processes, and which agents each engine has hot. With --store alone it
    omits engines. Ends with 3 unless all are ready and each engine reaches the store."""
    known = caller.engine
    given = [Endpoint(each, *_files(caller, known, each)) for each in engine or ([] if store else [known.address])]
    replicas = [replace(caller.store, address=each) for each in store or [caller.store.address]]
    for named, endpoints in (("--engine", given), ("--store", replicas)):
        if len({each.address for each in endpoints}) != len(endpoints):
            raise WrongUsage.of(named, "an address is given twice")
    agents = next((found for each in given if (found := _agents(each)) is not None), [])
    rows = [_row(each, agents) for each in given]
    stores = [
        {"address": each.address, "state": asyncio.run(health(each, STORE_SERVICE, ANSWER_S))} for each in replicas
    ]
    engines = [fields_of(row, *EngineRow.__dataclass_fields__) for row in rows]
    value = {"store": stores[0], "stores": stores, "engines": engines, "agents": len(agents)}
    caller.result(value, lambda out: _show(out, rows, stores))
    if any(row.state != "ready" or not row.has_store for row in rows) or any(
        each["state"] != "ready" for each in (stores if store else ())
    ):
        raise typer.Exit(UNREACHABLE)


def _files(caller: Caller, known: Endpoint, address: str) -> tuple[Path | None, Path | None]:
    """The token and certificate for an engine: those that are given, or the home's client's."""
    own = caller.home.tokens / "client.token"
    token = caller.token_file or (own if own.exists() and not address.startswith("unix:") else None)
    return token, caller.ca_file or (None if address.startswith("unix:") else known.ca_file)


def _agents(endpoint: Endpoint) -> list[str] | None:
    """The names of the namespace's agents; None if this engine does not know."""
    if not accepts(endpoint.address):
        return None
    try:
        with endpoint.engine_client(ANSWER_S) as client:
            return [agent.agent_id for agent in client.every_agent()]
    except KvasirError:
        return None


def _row(endpoint: Endpoint, agents: Sequence[str]) -> EngineRow:
    if not accepts(endpoint.address):
        return EngineRow(endpoint.address, "stopped")
    try:
        with endpoint.engine_client(ANSWER_S) as client:
            about, stats = client.get_capabilities(), client.get_stats()
            hot = tuple(_hot(client, agents))
    except KvasirError as error:
        return EngineRow(endpoint.address, f"{error.reason}: {error.message}")
    owner, version = about.lease_owner, about.version
    return EngineRow(endpoint.address, "ready", owner, version, stats.model, stats.store_is_reachable, hot)


def _hot(client: InferenceClient, agents: Sequence[str]) -> list[dict[str, Any]]:
    names = ("agent_id", "tokens", "kv_bytes", "version", "is_stored")
    pages = (agents[start : start + _PAGE] for start in range(0, len(agents), _PAGE))
    return [fields_of(each, *names) for page in pages for each in client.list_hot_memories(page)]


def _show(out: Console, rows: Sequence[EngineRow], stores: Sequence[Mapping[str, str]]) -> None:
    for store in stores:
        out.print(f"store: {store['address']}, {store['state']}")
    if not rows:
        return
    cells = [
        (row.address, row.state, "reached" if row.has_store else "not reached", row.model, len(row.hot)) for row in rows
    ]
    out.print(table(("engine", "state", "store", "model", "hot agents"), cells, numbers=("hot agents",)))
    hot = [
        (
            each["agent_id"],
            row.address,
            each["tokens"],
            size(each["kv_bytes"]),
            "" if each["is_stored"] else "not stored",
        )
        for row in rows
        for each in row.hot
    ]
    if hot:
        out.print(table(("agent", "hot at", "tokens", "KV", ""), hot, numbers=("tokens",)))
