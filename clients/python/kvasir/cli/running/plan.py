"""What `kvasir up` starts: the processes of a home with their addresses, options and credentials."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.address import parse_address
from kvasir.cli.running.home import Endpoint, Home
from kvasir.cli.running.locks import tokens_locked
from kvasir.cli.running.processes import EngineProcess, GatewayProcess, StoreProcess
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
    gateway: GatewayProcess | None = None


def plan_of(
    home: Home,
    models: Sequence[str],
    listen: str,
    store_listen: str,
    http: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    engine_options: Sequence[str] = (),
    store_options: Sequence[str] = (),
    metrics: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
) -> Plan:
    """The plan that the options ask for, which were checked. `metrics`: the addresses of the engine's, the store's and
    the gateway's, or none."""
    engine_metrics, store_metrics, http_metrics = metrics or ("", "", "")
    # Namespaces and tokens that were made count also where nothing listens on TCP.
    has_credentials = bool(listen or store_listen or http) or home.credentials_file.exists()
    credentials = home.credentials_file if has_credentials else None
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
        audit_file=home.audit_file("store"),
        engine_listen=home.socket_address("engines"),
        credentials_file=credentials,
        peers_file=home.peers_file,
        options=(*home.seal_options(), *home.sealed_options(), *store_options),
        metrics_listen=store_metrics,
        tls_cert_file=tls_cert if store_listen else None,
        tls_key_file=tls_key if store_listen else None,
    )
    engine = EngineProcess(
        listen=listen or engine_endpoint.address,
        endpoint=engine_endpoint,
        store=Endpoint(home.socket_address("engines"), store_endpoint.token_file),
        log_file=home.logs / "engine.log",
        audit_file=home.audit_file("engine"),
        state_dir=home.engine_state,
        store_data_dir=home.store_data,
        model=models[0] if models else "",
        options=(
            *(part for model in models[1:] for part in ("--model", model)),
            *(("--store-token-dir", str(home.tokens)) if credentials else ()),
            *engine_options,
        ),
        metrics_listen=engine_metrics,
        credentials_file=credentials,
        service_admin=_PRINCIPALS[0].name if credentials else "",
        tls_cert_file=tls_cert if listen else None,
        tls_key_file=tls_key if listen else None,
    )
    gateway = GatewayProcess(
        listen=http,
        engine=engine_endpoint,
        log_file=home.logs / "http.log",
        audit_file=home.audit_file("http"),
        state_dir=home.gateway_state,
        credentials_file=home.credentials_file,
        metrics_listen=http_metrics,
        options=tuple(gateway_options),
    )
    return Plan(store, engine, gateway if http else None)


def make_credentials(home: Home) -> None:
    """Write credentials and tokens, once per home. The credentials get their name last: then all tokens are there."""
    with tokens_locked(home):
        if not home.credentials_file.exists():
            _make_credentials(home)


def _make_credentials(home: Home) -> None:
    new = home.credentials_file.with_suffix(".new")
    new.unlink(missing_ok=True)
    tokens = write_credentials(new, _PRINCIPALS, lambda: secrets.token_urlsafe(32))
    for name, token in tokens.items():
        token_file = home.tokens / f"{name}.token"
        token_file.unlink(missing_ok=True)
        write_private_text(token_file, token + "\n")
    new.rename(home.credentials_file)


def from_here(address: str) -> str:
    """How a program on this machine reaches a service that listens at `address`."""
    parsed = parse_address(address)
    return f"localhost:{parsed.port}" if parsed.is_everywhere else address
