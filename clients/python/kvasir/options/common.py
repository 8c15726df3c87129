"""What the tables of options share: the options of every service, and the words that people use for times and sizes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvasir import expires_after
from kvasir.address import check_endpoint, check_operators_address
from kvasir.errors import InvalidArgument
from kvasir.options.table import Table, option

GIB, MIB = 1 << 30, 1 << 20
_UNIT_S = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> str:
    """A time, as 90s, 10m or 2h, in seconds. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"expected a time such as 90s, 10m or 2h, got {text!r}")
    return str(float(found[1]) * _UNIT_S[found[2]])


def seconds_until_expiry(text: str) -> str:
    """A time, as 12h or 30d, in seconds; "" for never. Raises ValueError."""
    try:
        found = expires_after.from_label(text)
    except InvalidArgument as error:
        raise ValueError(error.message.removeprefix(f"labels.{expires_after.LABEL}: ")) from None
    return "" if found is None else str(found)


def gib(text: str) -> str:
    """GiB in bytes. Raises ValueError."""
    try:
        size_bytes = int(float(text) * GIB)
    except (ValueError, OverflowError):
        size_bytes = 0
    if size_bytes <= 0:
        raise ValueError(f"expected a number of GiB above 0, got {text!r}")
    return str(size_bytes)


@dataclass(frozen=True, kw_only=True)
class ServiceTable(Table):
    """The options that every service has."""

    metrics_listen: str = option(
        "",
        "Serve Prometheus metrics and /healthz over HTTP, to this machine only. Default: none.",
        metavar="127.0.0.1:PORT",
        check=check_operators_address,
        of_home=True,
    )
    traces_to: str = option(
        "",
        "The collector of OpenTelemetry (OTLP over gRPC) that gets spans of turns, as http://127.0.0.1:4317. Spans "
        "have counts and never a text. Default: none. Needs kvasir[traces].",
        metavar="URL",
        check=check_endpoint,
        up="traces-to",
    )
    audit_file: Path | None = option(
        None,
        "A file that gets a JSON line for each privileged call, with its caller; see `kvasir audit`. Default: none.",
        of_home=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Minimum log level.", up="log-level")
    log_format: Literal["console", "json"] = option(
        "console",
        "Format of log lines: for people, or for programs. Neither has prompt text, tokens or credentials.",
        up="log-format",
    )


@dataclass(frozen=True, kw_only=True)
class ListeningTable(ServiceTable):
    """The options of a service that listens over gRPC."""

    credentials_file: Path | None = option(
        None, "A file that lists the callers and their roles. Needed beyond a Unix socket.", of_home=True
    )
    tls_cert_file: Path | None = option(None, "PEM certificate. Needed beyond this machine.", of_home=True)
    tls_key_file: Path | None = option(None, "The certificate's key, readable by its owner only.", of_home=True)
    tls_client_ca_file: Path | None = option(None, "PEM certificates of the clients that may connect (mutual TLS).")
