"""The command lines of the services, as the supervisor, the demo and the self-test start them.

The command line runs the services as programs and never imports them: `python -m cachestore_svc …` and so on.
"""

import functools
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.running.health import ENGINE_SERVICE, STORE_SERVICE, Health, http_health, is_ready
from kvasir.cli.running.home import Endpoint
from kvasir.cli.running.supervisor import Service

# The first start reads a large model from disk and hashes its weights.
STORE_READY_WITHIN_S = 60.0
ENGINE_READY_WITHIN_S = 600.0
GATEWAY_READY_WITHIN_S = 30.0
# They start together, and the store is quicker but for a large index that it reads again.
_ENGINE_WAITS_S = 10


@dataclass(frozen=True, slots=True)
class StoreProcess:
    """A cache store to start."""

    data_dir: Path
    listen: str
    endpoint: Endpoint  # how it is reached from here
    log_file: Path
    engine_listen: str = ""  # a second address, for its engine
    audit_file: Path | None = None
    credentials_file: Path | None = None
    peers_file: Path | None = None  # also before there is one: `kvasir pair` makes it
    options: tuple[str, ...] = ()  # of the service, beside these
    metrics_listen: str = ""  # HOST:PORT of loopback
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def argv(self) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "cachestore_svc", "serve"),
            *("--data-dir", str(self.data_dir), "--listen", self.listen),
            *_option("--engine-listen", self.engine_listen),
            *_option("--audit-file", self.audit_file),
            *_option("--credentials-file", self.credentials_file),
            *_option("--peers-file", self.peers_file),
            *_option("--tls-cert-file", self.tls_cert_file),
            *_option("--tls-key-file", self.tls_key_file),
            *_option("--metrics-listen", self.metrics_listen),
            *self.options,
        )

    def service(self) -> Service:
        return Service("store", self.argv(), self.log_file, _health(self.endpoint, STORE_SERVICE), STORE_READY_WITHIN_S)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An inference service to start, with the store that it publishes to."""

    listen: str
    endpoint: Endpoint  # how it is reached from here
    store: Endpoint
    log_file: Path
    state_dir: Path
    store_data_dir: Path | None = None  # of a store of this home
    model: str = ""  # the shipped model when empty
    options: tuple[str, ...] = ()  # of the service, beside these
    program: tuple[str, ...] = ("inference_svc",)  # what Python runs, and what stands before the service's own words
    metrics_listen: str = ""  # HOST:PORT of loopback
    audit_file: Path | None = None
    credentials_file: Path | None = None
    service_admin: str = ""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def argv(self) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", *self.program, "serve"),
            *("--listen", self.listen, "--store", self.store.address, "--state-dir", str(self.state_dir)),
            *("--store-wait-s", str(_ENGINE_WAITS_S)),
            *_option("--store-data-dir", self.store_data_dir),
            *_option("--model", self.model),
            *_option("--audit-file", self.audit_file),
            *_option("--credentials-file", self.credentials_file),
            *_option("--service-admin", self.service_admin),
            *_option("--tls-cert-file", self.tls_cert_file),
            *_option("--tls-key-file", self.tls_key_file),
            *_option("--store-token-file", self.store.token_file),
            *_option("--store-ca-file", self.store.ca_file),
            *_option("--metrics-listen", self.metrics_listen),
            *self.options,
        )

    def service(self) -> Service:
        return Service(
            "engine",
            self.argv(),
            self.log_file,
            _health(self.endpoint, ENGINE_SERVICE),
            ENGINE_READY_WITHIN_S,
            start_in_words=functools.partial(_phases, self.state_dir),
        )


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """An HTTP gateway to start, before an engine. Callers' keys are the tokens of the credentials."""

    listen: str  # HOST:PORT of loopback
    engine: Endpoint
    log_file: Path
    state_dir: Path
    credentials_file: Path
    audit_file: Path | None = None
    options: tuple[str, ...] = ()  # of the service, beside these
    metrics_listen: str = ""  # HOST:PORT of loopback

    def argv(self) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "kvasir_gateway", "--listen", self.listen),
            *("--engine", self.engine.address),
            *("--state-dir", str(self.state_dir), "--credentials", str(self.credentials_file)),
            *_option("--audit-file", self.audit_file),
            *_option("--token-file", self.engine.token_file),
            *_option("--ca-file", self.engine.ca_file),
            *_option("--metrics-listen", self.metrics_listen),
            *self.options,
        )

    def service(self) -> Service:
        async def answers() -> bool:
            # It says that it is unwell as long as its engine is away, and lives.
            return await http_health(self.listen) in (Health.READY, Health.NOT_READY)

        # Behind the engine: it would wait seconds before it tries again to connect to one that is not there.
        return Service("http", self.argv(), self.log_file, answers, GATEWAY_READY_WITHIN_S, wave=1)


def _phases(state_dir: Path) -> str:
    """What the engine's last start spent its time on; empty if it left no report."""
    try:
        seconds: dict[str, float] = json.loads((state_dir / "start.json").read_text())
        return ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return ""


def _health(endpoint: Endpoint, service: str) -> Callable[[], Awaitable[bool]]:
    return functools.partial(is_ready, endpoint, service)


def _option(name: str, value: Path | str | None) -> tuple[str, ...]:
    return (name, str(value)) if value else ()
