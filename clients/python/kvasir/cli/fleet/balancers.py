"""Configurations of nginx and Envoy before several engines of one store: each agent's turns go to one engine.

Clients send where a turn's agent belongs as the header `kvasir-place`; a turn without an agent goes anywhere. A turn
that reaches another engine is right all the same: the lease decides who computes it.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from string import Template
from typing import Any

from kvasir.address import parse_address
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running.health import ENGINE_SERVICE
from kvasir.clients.inference_client_turns import PLACE_KEY

_UNQUOTED = frozenset("\"'{};\\ \t\n#$")


@dataclass(frozen=True, slots=True)
class Balancer:
    """Where it listens, with a certificate beyond this machine, and the engines, whose certificates are in one file."""

    listen: str
    engines: Sequence[str]
    tls_cert: Path | None = None
    tls_key: Path | None = None
    engine_ca_file: Path | None = None

    def check(self) -> None:
        """Raises WrongUsage."""
        for option, texts in (("--listen", [self.listen]), ("--engine", self.engines)):
            for text in texts:
                self._check_address(option, text)
        if len({*self.engines}) != len(self.engines):
            raise WrongUsage.of("--engine", "an address is given twice")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise WrongUsage("--tls-cert and --tls-key: give both or neither", field="--tls-key")
        files = (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key), ("--ca-file", self.engine_ca_file))
        for option, path in files:
            if path is not None:
                _check_letters(option, str(path.absolute()))

    def _check_address(self, option: str, text: str) -> None:
        try:
            address = parse_address(text)
        except ValueError as error:
            raise WrongUsage.of(option, error) from None
        if address.socket_path is not None:
            text = "expected HOST:PORT: at a Unix socket everybody who calls the balancer would be its owner"
            raise WrongUsage.of(option, text)
        _check_letters(option, text)
        pinned = self.tls_cert if option == "--listen" else self.engine_ca_file
        if not address.is_loopback and pinned is None:
            needed = "--tls-cert and --tls-key" if option == "--listen" else "--ca-file, before the command"
            raise WrongUsage.of(option, f"{text} is beyond this machine, so TLS is needed: {needed}")


def _check_letters(option: str, text: str) -> None:
    if not _UNQUOTED.isdisjoint(text):
        raise WrongUsage.of(option, f"{text!r} has letters that no configuration can quote")


class _Form(Template):
    delimiter = "%"  # nginx's own variables begin with a dollar


def _filled(name: str, **parts: str) -> str:
    return _Form(Path(__file__).with_name(name).read_text(encoding="utf-8")).substitute(parts)


def nginx(balancer: Balancer) -> str:
    """A whole nginx.conf, for nginx 1.19 or newer."""
    tls = ""
    if balancer.tls_cert is not None:
        tls = f"    ssl_certificate {_path(balancer.tls_cert)};\n    ssl_certificate_key {_path(balancer.tls_key)};\n"
    return _filled(
        "nginx.conf",
        variable=PLACE_KEY.replace("-", "_"),
        servers="\n".join(f"    server {each} max_fails=1 fail_timeout=1s;" for each in balancer.engines),
        listen=f"{balancer.listen} {'ssl http2' if tls else 'http2'}",
        tls=tls,
        scheme="grpcs" if balancer.engine_ca_file is not None else "grpc",
        pinned=_pinned_for_nginx(balancer),
    )


def _pinned_for_nginx(balancer: Balancer) -> str:
    """The lines by which nginx verifies its engines; none without their certificates."""
    if balancer.engine_ca_file is None:
        return ""
    return f"""      grpc_ssl_verify on;
      grpc_ssl_trusted_certificate {_path(balancer.engine_ca_file)};
      # nginx knows one name for all: each engine's certificate must have this DNS name.
      grpc_ssl_name {parse_address(balancer.engines[0]).host};
      grpc_ssl_server_name on;
"""


def envoy(balancer: Balancer) -> str:
    """A bootstrap configuration as JSON, which Envoy reads as YAML. No engine gets more than 125 % of the mean."""
    filled = _filled("envoy.json", place=PLACE_KEY, retries=str(len(balancer.engines)), service=ENGINE_SERVICE)
    made: dict[str, Any] = json.loads(filled)
    [listener], [cluster] = made["static_resources"]["listeners"], made["static_resources"]["clusters"]
    listener["address"] = _envoy_address(balancer.listen)
    endpoints = [{"endpoint": {"address": _envoy_address(each)}} for each in balancer.engines]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    if balancer.tls_cert is not None:
        files = {"certificate_chain": _file(balancer.tls_cert), "private_key": _file(balancer.tls_key)}
        listener["filter_chains"][0]["transport_socket"] = _tls("Downstream", {"tls_certificates": [files]})
    if balancer.engine_ca_file is not None:
        # Without names a certificate of any host would do that the same authority has signed.
        names = [_subject(parse_address(each).host) for each in balancer.engines]
        validation = {"trusted_ca": _file(balancer.engine_ca_file), "match_typed_subject_alt_names": names}
        cluster["transport_socket"] = _tls("Upstream", {"validation_context": validation})
    return json.dumps(made, indent=2)


def _file(path: Path | None) -> dict[str, str]:
    return {"filename": _path(path)}


def _path(path: Path | None) -> str:
    """Absolute, as nginx looks for others beside its own configuration."""
    assert path is not None
    return str(path.absolute())


def _subject(host: str) -> dict[str, Any]:
    kind = "DNS"
    with suppress(ValueError):
        ip_address(host)
        kind = "IP_ADDRESS"
    return {"san_type": kind, "matcher": {"exact": host}}


def _tls(side: str, context: dict[str, Any]) -> dict[str, Any]:
    kind = f"type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.{side}TlsContext"
    config = {"@type": kind, "common_tls_context": {**context, "alpn_protocols": ["h2"]}}
    return {"name": "envoy.transport_sockets.tls", "typed_config": config}


def _envoy_address(text: str) -> dict[str, Any]:
    address = parse_address(text)
    return {"socket_address": {"address": address.host, "port_value": address.port}}
