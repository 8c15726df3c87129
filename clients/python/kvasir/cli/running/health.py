"""Finds out how a service is, by grpc.health.v1, which needs no token."""

import asyncio
import enum
import http.client
import json

from kvasir.address import accepts, parse_address
from kvasir.cli.running.home import Endpoint, Home
from kvasir.credentials import GATEWAY_MARK
from kvasir.errors import InvalidArgument

STORE_SERVICE = "kvasir.cachestore.v1.CacheStoreService"
ENGINE_SERVICE = "kvasir.inference.v1.InferenceService"
_MAX_BODY_BYTES = 1 << 20


class Health(enum.StrEnum):
    """What a service answers."""

    READY = "ready"
    NOT_READY = "not ready"  # it answers, and does not serve
    SILENT = "does not answer"  # something listens there
    STOPPED = "stopped"  # nothing listens there
    FOREIGN = "another program's"  # a gateway of another home, or another HTTP server


async def health(endpoint: Endpoint, service: str, timeout_s: float = 1.0) -> Health:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvasir.clients.channel import aio_channel

    # gRPC has the same word for "nobody listens" and for "nobody answers", and takes longer.
    if not await asyncio.to_thread(accepts, endpoint.address):
        return Health.STOPPED
    async with aio_channel(endpoint.address, endpoint.tls, ()) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return Health.NOT_READY
            return Health.SILENT if await asyncio.to_thread(accepts, endpoint.address) else Health.STOPPED
    return Health.READY if answer.status == health_pb2.HealthCheckResponse.SERVING else Health.NOT_READY


async def http_health(home: Home, address: str, timeout_s: float = 1.0) -> Health:
    """How the home's gateway at HOST:PORT is, which is as well as its engine and store are."""
    try:
        status, _, shown = await asyncio.to_thread(_healthz, address, timeout_s)
    except ConnectionError:
        return Health.STOPPED
    except (OSError, http.client.HTTPException):
        return Health.SILENT
    if not shown or shown != home.gateway_mark():
        return Health.FOREIGN
    return Health.READY if status == http.client.OK else Health.NOT_READY


def problems_at(text: str, timeout_s: float) -> list[str]:
    """Why the service is not well whose /healthz is at HOST:PORT; nothing where nobody answers, or no address is."""
    try:
        _, body, _ = _healthz(text, timeout_s) if text else (0, b"{}", "")
        return [f"{each['message']} ({each['reason']})" for each in json.loads(body).get("problems", [])]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return []


def _healthz(text: str, timeout_s: float) -> tuple[int, bytes, str]:
    address = parse_address(text)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BODY_BYTES), answer.headers.get(GATEWAY_MARK, "")
    finally:
        connection.close()


async def is_ready(endpoint: Endpoint, service: str) -> bool:
    """Whether the service reports SERVING. With any other answer, or none, it is not ready."""
    try:
        return await health(endpoint, service, 1.0) is Health.READY
    except InvalidArgument:  # its certificate cannot be read, as while it is replaced: no reason to end a group
        return False
