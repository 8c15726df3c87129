"""What `kvasir up` starts: the processes of a home with their addresses, options and credentials."""

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvasir.address import parse_address
from kvasir.cli.fleet.elsewhere import endpoint_of, engine_tokens, shares_credentials
from kvasir.cli.running.health import ENGINE_SERVICE, STORE_SERVICE, Health, http_health, is_ready
from kvasir.cli.running.home import Endpoint, Home, has_files
from kvasir.cli.running.own_credentials import OPERATORS, SERVICE_ADMINS
from kvasir.cli.running.program import MODULE
from kvasir.cli.running.supervisor import Service
from kvasir.cli.settings.asked import Asked
from kvasir.options.engine import EngineTable
from kvasir.options.finding import command_line
from kvasir.options.gateway import GatewayTable
from kvasir.options.store import StoreTable
from kvasir.options.table import Table
from kvasir.waits import ANSWER_S, HANGS_S, PATIENCE_S

# The first start of an engine reads a large model from disk and hashes its weights. A store that was killed compares
# its whole index with its journal, and one of an older Kvasir migrates it: if it were killed for that, it never ended.
READY_WITHIN_S = 600.0


_TABLES: Mapping[str, type[Table]] = {"store": StoreTable, "engine": EngineTable, "http": GatewayTable}
_PROGRAMS = {"store": "cachestore_svc", "engine": "inference_svc", "http": "kvasir_gateway"}


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A service to start: store, engine or http, the gateway before an engine."""

    name: str
    endpoint: Endpoint  # how it is reached from here
    log_file: Path
    options: Mapping[str, object]  # of the service, by name
    program: tuple[str, ...] = ()  # what Python runs instead, and what stands before the service's own words
    words: tuple[str, ...] = ()  # of a command line, behind the options

    @property
    def data_dir(self) -> Path:
        return Path(str(self.options["data_dir"]))

    def argv(self) -> tuple[str, ...]:
        program = (*(self.program or (_PROGRAMS[self.name],)), *(() if self.name == "http" else ("serve",)))
        return (sys.executable, MODULE, *program, *command_line(_TABLES[self.name], self.options), *self.words)

    def service(self) -> Service:
        within_s = READY_WITHIN_S + (HANGS_S if self.name == "http" else 0.0)  # the gateway waits for the engine
        state_dir = Path(str(self.options.get("state_dir", "")))
        phases = functools.partial(_phases, state_dir) if self.name == "engine" else str
        is_here = self.name == "store" and not self.options.get("catalog")
        has_data = functools.partial(has_files, self.data_dir) if is_here else lambda: True
        return Service(self.name, self.argv(), self.log_file, self._answers, within_s, phases, has_data)

    async def _answers(self) -> bool:
        if self.name == "http":  # it reports that its engine is away or, after two seconds, that it hangs; and lives
            home = Home(Path(str(self.options["home"])))
            return await http_health(home, self.endpoint.address, ANSWER_S) in (Health.READY, Health.NOT_READY)
        return await is_ready(self.endpoint, STORE_SERVICE if self.name == "store" else ENGINE_SERVICE)


def _phases(state_dir: Path) -> str:
    """What the engine's last start spent its time on; empty if it left no report."""
    try:
        seconds: dict[str, float] = json.loads((state_dir / "start.json").read_text())
        return ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The services of a home, and which of them it starts: the store of `kvasir up --store` runs elsewhere, and
    `kvasir store serve` starts no other."""

    store: ServiceProcess
    engine: ServiceProcess
    gateway: ServiceProcess | None = None
    starts: tuple[str, ...] = ("store", "engine", "http")

    @property
    def started(self) -> list[ServiceProcess]:
        every = (self.store, self.engine, self.gateway)
        return [each for each in every if each is not None and each.name in self.starts]


def plan_of(asked: Asked) -> Plan:
    """The plan of the checked settings."""
    home, up = asked.home, asked.up
    # Namespaces and tokens that were made count also where nothing listens on TCP.
    has_credentials = bool(up.listen or up.store_listen or up.http) or home.credentials_file.exists()
    ca_file = up.tls_cert if up.tls_cert is not None and up.tls_key is not None else None
    store, engine = Endpoint(home.socket_address("store")), Endpoint(home.socket_address("engine"))
    if up.store:
        store = endpoint_of(home, up)
    elif up.store_listen:
        store = Endpoint(from_here(up.store_listen), home.tokens / "engine.token", ca_file)
    if up.listen:
        engine = Endpoint(from_here(up.listen), home.tokens / "client.token", ca_file)
    of_store, of_engine, of_gateway = (each(asked, has_credentials) for each in (_of_store, _of_engine, _of_gateway))
    of_engine |= _of_store_elsewhere(asked) if up.store else {"store_token_file": store.token_file}
    of_gateway |= {"engine": engine.address, "token_file": engine.token_file, "ca_file": engine.ca_file}
    parts = [("store", "store", store, of_store), ("engine", "engine", engine, of_engine)]
    if up.http:
        parts.append(("http", "gateway", Endpoint(up.http), of_gateway))
    made = {
        field: ServiceProcess(name, endpoint, home.logs / f"{name}.log", of_home | asked.passed_on(field))
        for name, field, endpoint, of_home in parts
    }
    plan = Plan(made["store"], made["engine"], made.get("gateway"))
    return replace(plan, starts=("engine", "http")) if up.store else plan


def _of_store_elsewhere(asked: Asked) -> dict[str, object]:
    """The store's options of an engine without a store of its own home."""
    home, up = asked.home, asked.up
    return {
        "store": up.store,
        "store_token_file": engine_tokens(home, up),
        "store_token_dir": home.tokens if shares_credentials(up) else None,
        "store_ca_file": up.store_ca_file,
        "store_data_dir": None,
        "peers_file": None,
    }


def _of_store(asked: Asked, has_credentials: bool) -> dict[str, object]:
    """The home's settings of the store."""
    home, up = asked.home, asked.up
    return {
        "data_dir": home.store_data,
        "listen": up.store_listen or home.socket_address("store"),
        "engine_listen": home.socket_address("engines"),
        "audit_file": home.audit_file("store"),
        "credentials_file": home.credentials_file if has_credentials else None,
        "peers_file": home.peers_file,
        "seal_key_file": home.seal_key_file if home.seal_key_file.exists() else None,
        "sealed_file": home.sealed_file,
        "metrics_listen": asked.metrics[1],
        "tls_cert_file": up.tls_cert if up.store_listen else None,
        "tls_key_file": up.tls_key if up.store_listen else None,
    }


def _of_engine(asked: Asked, has_credentials: bool) -> dict[str, object]:
    home, up = asked.home, asked.up
    return {
        "listen": up.listen or home.socket_address("engine"),
        "store": home.socket_address("engines"),
        # They start together, and the store is quicker but for a large index that it reads again.
        "store_wait_s": PATIENCE_S,
        "state_dir": home.engine_state,
        "store_data_dir": home.store_data,
        "peers_file": home.peers_file,
        "audit_file": home.audit_file("engine"),
        "credentials_file": home.credentials_file if has_credentials else None,
        "store_token_dir": home.tokens if has_credentials else None,
        "service_admin": SERVICE_ADMINS if has_credentials else (),
        "metrics_listen": asked.metrics[0],
        "tls_cert_file": up.tls_cert if up.listen else None,
        "tls_key_file": up.tls_key if up.listen else None,
    }


def _of_gateway(asked: Asked, _has_credentials: bool) -> dict[str, object]:
    home = asked.home
    return {
        "listen": asked.up.http,
        "engine_wait_s": READY_WITHIN_S,
        "state_dir": home.gateway_state,
        "credentials": home.credentials_file,
        "home": home.root,
        "service_admin": OPERATORS,
        "audit_file": home.audit_file("http"),
        "metrics_listen": asked.metrics[2],
    }


def from_here(address: str) -> str:
    """How a program on this machine reaches a service that listens at `address`."""
    parsed = parse_address(address)
    return f"localhost:{parsed.port}" if parsed.is_everywhere else address
