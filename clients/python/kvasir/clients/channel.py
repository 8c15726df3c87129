"""Channels of gRPC clients: address, TLS, keepalive and retries.

Tokens never travel in the clear to another machine. A server may be pinned by its own certificate. The channel itself
retries reads only, because repeating them changes nothing."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from kvasir.address import AddressError, parse_address
from kvasir.cachestore.v1 import cachestore_pb2, cachestore_pb2_grpc
from kvasir.certificates import read_certificates
from kvasir.errors import InvalidArgument, Unauthenticated
from kvasir.formats.frame_messages import carrier_reader
from kvasir.waits import PAUSE_S, SOON_S

Metadata = tuple[tuple[str, str | bytes], ...]

_MAX_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """How a client verifies its server, and the certificate that it shows."""

    # PEM: the authority that signed the server's certificate, or that certificate itself, which pins it.
    ca_file: Path
    # The name in the server's certificate, when it is not the host of the address.
    server_name: str = ""
    # PEM: the client's own certificate and key, for a server that wants them (mutual TLS).
    cert_file: Path | None = None
    key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class PinnedTls:
    """Mutual TLS between two that have pinned each other's certificate. All are PEM."""

    server_certificate: bytes
    # The name in it.
    server_name: str
    certificate: bytes
    key: bytes = field(repr=False)


AnyTls = Tls | PinnedTls


def aio_channel(address: str, tls: AnyTls | None, safe_reads: Sequence[str]) -> grpc.aio.Channel:
    """A channel of grpc.aio. `safe_reads` are "package.Service/Rpc" that may be repeated. Raises InvalidArgument."""
    target, options = _target(address, tls), _options(tls, safe_reads, is_remote=not address.startswith("unix:"))
    if tls is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, _credentials(tls), options)


def sync_channel(address: str, tls: AnyTls | None, safe_reads: Sequence[str]) -> grpc.Channel:
    """As aio_channel, for blocking calls."""
    target, options = _target(address, tls), _options(tls, safe_reads, is_remote=not address.startswith("unix:"))
    if tls is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, _credentials(tls), options)


def repeatable(*services: Any) -> tuple[str, ...]:
    """The "package.Service/Rpc" that may be repeated, by the .proto."""
    rpcs = ((service, rpc) for service in services for rpc in service.methods)
    return tuple(f"{service.full_name}/{rpc.name}" for service, rpc in rpcs if rpc.GetOptions().idempotency_level)


def calls_of(channel: Any, *stubs: Any, **own: Any) -> Any:
    """The calls of a service's stubs and, over the same channel, those about agents; `own` ones go before them."""
    made = [stub(channel) for stub in (cachestore_pb2_grpc.AgentServiceStub, *stubs)]
    return SimpleNamespace(**{name: call for stub in made for name, call in vars(stub).items()} | own)


def blob_calls(channel: Any) -> dict[str, Any]:
    """A store's calls with blobs: WriteBlobs takes serialized requests, and ReadBlobs gives a Carrier."""
    writes = channel.stream_stream(
        "/kvasir.cachestore.v1.CacheStoreService/WriteBlobs",
        response_deserializer=cachestore_pb2.WriteBlobsResponse.FromString,
    )
    reads = channel.unary_stream(
        "/kvasir.cachestore.v1.CacheStoreService/ReadBlobs",
        request_serializer=cachestore_pb2.ReadBlobsRequest.SerializeToString,
        response_deserializer=carrier_reader(cachestore_pb2.ReadBlobsResponse),
    )
    return {"WriteBlobs": writes, "ReadBlobs": reads}


def bearer(token: str) -> Metadata:
    """The metadata that show a token to the service. Raises Unauthenticated for text that is no token."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise Unauthenticated("token: expected printable ASCII without spaces", reason="NO_CREDENTIAL")
    return (("authorization", f"Bearer {token}"),)


def _target(address: str, tls: AnyTls | None) -> str:
    try:
        parsed = parse_address(address)
    except AddressError as error:
        raise InvalidArgument.of("address", error) from None
    if tls is None and not parsed.is_loopback:
        raise InvalidArgument(f"address: {address} is another machine, so TLS is needed", field="tls")
    if parsed.socket_path is not None:
        return f"unix:{quote(os.fsencode(parsed.socket_path))}"  # gRPC reads a URL: # and ? would end the path
    return str(parsed)


def _credentials(tls: AnyTls) -> grpc.ChannelCredentials:
    if isinstance(tls, PinnedTls):
        return grpc.ssl_channel_credentials(tls.server_certificate, tls.key, tls.certificate)
    try:
        return grpc.ssl_channel_credentials(
            root_certificates=read_certificates(tls.ca_file),
            private_key=tls.key_file.read_bytes() if tls.key_file else None,
            certificate_chain=read_certificates(tls.cert_file) if tls.cert_file else None,
        )
    except ValueError as error:
        raise InvalidArgument.of("tls", error) from None
    except OSError as error:
        raise InvalidArgument.of("tls", f"{error.filename}: {error.strerror}") from None


def _options(tls: AnyTls | None, safe_reads: Sequence[str], *, is_remote: bool) -> list[tuple[str, str | int]]:
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        # The service refuses a message that is too large, with its own numbers.
        ("grpc.max_send_message_length", -1),
        # A service that froze or a machine that vanished ends the call as UNAVAILABLE after 20 s at most.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Finds a restarted service soon; gRPC's own pauses grow to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        # To a socket file an attempt costs nothing, and who calls meanwhile is refused.
        ("grpc.max_reconnect_backoff_ms", round(1000 * (SOON_S if is_remote else PAUSE_S))),
        # Each channel has a connection of its own: a service bounds the calls on one.
        ("grpc.use_local_subchannel_pool", 1),
        # These calls do not go through a proxy that the environment names.
        ("grpc.enable_http_proxy", 0),
    ]
    if safe_reads:
        options += [("grpc.enable_retries", 1), ("grpc.service_config", _retry_config(safe_reads))]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def _retry_config(safe_reads: Sequence[str]) -> str:
    names = [dict(zip(("service", "method"), name.split("/"), strict=True)) for name in safe_reads]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})
