"""Asks a service how it is, by grpc.health.v1, which needs no token."""

import asyncio
import enum
import http.client
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvasir.address import parse_address
from kvasir.cli.running.home import Endpoint
from kvasir.clients.channel import aio_channel

STORE_SERVICE = "kvasir.cachestore.v1.CacheStoreService"
ENGINE_SERVICE = "kvasir.inference.v1.InferenceService"
# A loaded machine answers late; a process that hangs does not answer at all.
PATIENCE_S = 3.0


class Health(enum.StrEnum):
    """What a service answers."""

    READY = "ready"
    NOT_READY = "not ready"  # it answers, and says that it does not serve
    SILENT = "does not answer"  # something listens there
    STOPPED = "stopped"  # nothing listens there


async def health(endpoint: Endpoint, service: str, timeout_s: float = 1.0) -> Health:
    """How a service is."""
    async with aio_channel(endpoint.address, endpoint.tls, ()) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return Health.NOT_READY
            # gRPC has the same word for "nobody listens" and for "nobody says hello".
            return Health.SILENT if await asyncio.to_thread(_accepts, endpoint.address) else Health.STOPPED
    return Health.READY if answer.status == health_pb2.HealthCheckResponse.SERVING else Health.NOT_READY


async def http_health(address: str, timeout_s: float = 1.0) -> Health:
    """How the gateway at HOST:PORT is, which is as well as its engine and store are."""
    return await asyncio.to_thread(_asked_over_http, address, timeout_s)


def _asked_over_http(text: str, timeout_s: float) -> Health:
    address = parse_address(text)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except ConnectionError:
        return Health.STOPPED
    except (OSError, http.client.HTTPException):
        return Health.SILENT
    finally:
        connection.close()
    return Health.READY if status == http.client.OK else Health.NOT_READY


def _accepts(text: str) -> bool:
    """Whether something listens at an address. The system answers for a process that is frozen."""
    address = parse_address(text)
    try:
        if address.socket_path is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(address.socket_path))
        else:
            socket.create_connection((address.host, address.port), timeout=1.0).close()
    except OSError:
        return False
    return True


async def is_ready(endpoint: Endpoint, service: str, timeout_s: float = 1.0) -> bool:
    """Whether the service says SERVING. With any other answer, or none, it is not ready."""
    return await health(endpoint, service, timeout_s) is Health.READY
