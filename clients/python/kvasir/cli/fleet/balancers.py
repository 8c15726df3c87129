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
from typing import Any

from kvasir.address import Address, parse_address
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running.health import ENGINE_SERVICE
from kvasir.clients.inference_client_turns import PLACE_KEY

_MOST_OF_MEAN_PERCENT = 125
_WINDOW_BYTES = 4 << 20
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
            raise WrongUsage("--engine: an address is given twice", field="--engine")
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
            raise WrongUsage(f"{option}: {error}", field=option) from None
        if address.socket_path is not None:
            text = f"{option}: expected HOST:PORT: at a Unix socket everybody who calls the balancer would be its owner"
            raise WrongUsage(text, field=option)
        _check_letters(option, text)
        pinned = self.tls_cert if option == "--listen" else self.engine_ca_file
        if not address.is_loopback and pinned is None:
            needed = "--tls-cert and --tls-key" if option == "--listen" else "--ca-file, before the command"
            raise WrongUsage(f"{option}: {text} is beyond this machine, so TLS is needed: {needed}", field=option)


def _check_letters(option: str, text: str) -> None:
    if not _UNQUOTED.isdisjoint(text):
        raise WrongUsage(f"{option}: {text!r} has letters that no configuration can quote", field=option)


def nginx(balancer: Balancer) -> str:
    """A whole nginx.conf, for nginx 1.19 or newer."""
    variable = PLACE_KEY.replace("-", "_")
    servers = "\n".join(f"    server {each} max_fails=1 fail_timeout=1s;" for each in balancer.engines)
    tls = ""
    if balancer.tls_cert is not None:
        tls = f"    ssl_certificate {_path(balancer.tls_cert)};\n    ssl_certificate_key {_path(balancer.tls_key)};\n"
    scheme = "grpcs" if balancer.engine_ca_file is not None else "grpc"
    return f"""# Made by `kvasir fleet config nginx`: an agent's turns go to one engine, else to the next one.
events {{ worker_connections 4096; }}
http {{
  access_log off;
  # A turn without an agent goes anywhere.
  map $http_{variable} $place {{ "" $request_id; default $http_{variable}; }}
  upstream engines {{
    hash $place consistent;
{servers}
    keepalive 64;
  }}
  server {{
    listen {balancer.listen} {"ssl http2" if tls else "http2"};
{tls}    keepalive_requests 1000000000;
    client_max_body_size 0;
    client_body_timeout 1h;
    location / {{
      grpc_pass {scheme}://engines;
{_pinned_for_nginx(balancer)}      grpc_connect_timeout 2s;
      grpc_read_timeout 1h;
      grpc_send_timeout 1h;
      grpc_socket_keepalive on;
    }}
    # gRPC's UNAVAILABLE, which clients try again, in place of a page of HTML.
    error_page 502 504 = @away;
    location @away {{
      default_type application/grpc;
      add_header grpc-status 14 always;
      add_header grpc-message "no engine answers" always;
      return 200;
    }}
  }}
}}
"""


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
    """A bootstrap configuration as JSON, which Envoy reads as it reads YAML."""
    options = {"initial_stream_window_size": _WINDOW_BYTES, "initial_connection_window_size": 2 * _WINDOW_BYTES}
    route = {
        "cluster": "engines",
        "timeout": "0s",
        "hash_policy": [{"header": {"header_name": PLACE_KEY}}],
        "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": len(balancer.engines)},
    }
    manager = {
        "@type": _type("filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "engines",
        "codec_type": "HTTP2",
        "http2_protocol_options": options,
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {"name": "engines", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": _type("filters.http.router.v3.Router")}}
        ],
    }
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    if balancer.tls_cert is not None:
        files = {"certificate_chain": _file(balancer.tls_cert), "private_key": _file(balancer.tls_key)}
        context = {"common_tls_context": {"tls_certificates": [files], "alpn_protocols": ["h2"]}}
        chain["transport_socket"] = _tls("DownstreamTlsContext", context)
    listener = {
        "name": "callers",
        "address": _envoy_address(parse_address(balancer.listen)),
        "filter_chains": [chain],
    }
    return json.dumps(
        {"static_resources": {"listeners": [listener], "clusters": [_cluster(balancer, options)]}}, indent=2
    )


def _cluster(balancer: Balancer, options: dict[str, int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _envoy_address(parse_address(each))}} for each in balancer.engines]
    check = {"timeout": "1s", "interval": "1s", "no_traffic_interval": "1s", "unhealthy_threshold": 1}
    cluster: dict[str, Any] = {
        "name": "engines",
        "type": "STRICT_DNS",
        "connect_timeout": "2s",
        "lb_policy": "RING_HASH",
        "common_lb_config": {"consistent_hashing_lb_config": {"hash_balance_factor": _MOST_OF_MEAN_PERCENT}},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _type("upstreams.http.v3.HttpProtocolOptions"),
                "explicit_http_config": {"http2_protocol_options": options},
            }
        },
        "health_checks": [
            {**check, "healthy_threshold": 1, "grpc_health_check": {"service_name": ENGINE_SERVICE}},
        ],
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    if balancer.engine_ca_file is not None:
        # Without names a certificate of any host would do that the same authority has signed.
        names = [_subject(parse_address(each).host) for each in balancer.engines]
        validation = {"trusted_ca": _file(balancer.engine_ca_file), "match_typed_subject_alt_names": names}
        context = {"common_tls_context": {"validation_context": validation, "alpn_protocols": ["h2"]}}
        cluster["transport_socket"] = _tls("UpstreamTlsContext", context)
    return cluster


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.extensions.{name}"


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


def _tls(kind: str, context: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {"@type": _type(f"transport_sockets.tls.v3.{kind}"), **context},
    }


def _envoy_address(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address.host, "port_value": address.port}}
