"""The options of `kvasir up` that are no service's own, and the flags by which it takes the services'."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvasir.credentials import DEFAULT_NAMESPACE
from kvasir.options.engine import EngineTable
from kvasir.options.gateway import DEFAULT_LISTEN, GatewayTable
from kvasir.options.store import StoreTable
from kvasir.options.table import Option, Table, option, options_of

SERVICES: dict[str, type[Table]] = {"store": StoreTable, "engine": EngineTable, "gateway": GatewayTable}


@dataclass(frozen=True, kw_only=True)
class UpTable(Table):
    """Where the group listens."""

    program: ClassVar[str] = "up"

    listen: str = option(
        "", "The engine's address, where callers need a token. Default: a Unix socket.", metavar="HOST:PORT"
    )
    store_listen: str = option("", "The store's address, from which other Macs may pull.", metavar="HOST:PORT")
    tls_cert: Path | None = option(None, "PEM certificate, needed beyond this machine.")
    tls_key: Path | None = option(None, "The certificate's key, mode 0600.")
    store: str = option(
        "",
        "Use a store that runs elsewhere, by `kvasir store serve` or another `kvasir up --store-listen`, and start "
        "none here.",
        metavar="HOST:PORT|unix:/path",
    )
    store_token_file: dict[str, Path] = option(
        {},
        "With --store: a file with the engine's token there, once for each namespace. Default: the tokens of this "
        "home, whose credentials.toml and tokens/ are then copies of those of the store's home.",
        metavar="[NAMESPACE=]FILE",
        usual_name=DEFAULT_NAMESPACE,
    )
    store_ca_file: Path | None = option(
        None, "With --store: the store's certificate (PEM), which the engine pins. Needed beyond this machine."
    )
    http: str = option(
        "",
        "127.0.0.1:PORT for the HTTP APIs (OpenAI's, Anthropic's), whose keys are the tokens. Default: "
        f"{DEFAULT_LISTEN}, if it is free.",
        metavar="HOST:PORT",
    )
    no_http: bool = option(False, "Start no HTTP gateway.")
    metrics_listen: str = option(
        "",
        "127.0.0.1:PORT for the engine's Prometheus metrics and /healthz; the store's are at the next port, the HTTP "
        "gateway's at the one after it.",
        metavar="HOST:PORT",
    )


@cache
def service_flags() -> dict[str, dict[str, Option]]:
    """The flags of `kvasir up` that are services' options: of each service, its option. The engine's first."""
    flags: dict[str, dict[str, Option]] = {}
    for service in ("engine", "store", "gateway"):
        for each in options_of(SERVICES[service]).values():
            if each.about.up is not None:
                flags.setdefault(each.about.up.name, {})[service] = each
    return flags


@cache
def flags() -> dict[str, Option]:
    """All flags of `kvasir up`, its own first. Of an option that several services have, the first one's."""
    own = {each.key: each for each in options_of(UpTable).values()}
    return own | {name: next(iter(of_services.values())) for name, of_services in service_flags().items()}
