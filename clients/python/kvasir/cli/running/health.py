"""Asks a service whether it is ready, by grpc.health.v1, which needs no token."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvasir.cli.running.home import Endpoint
from kvasir.clients.channel import aio_channel

STORE_SERVICE = "kvasir.cachestore.v1.CacheStoreService"
ENGINE_SERVICE = "kvasir.inference.v1.InferenceService"


async def is_ready(endpoint: Endpoint, service: str, timeout_s: float = 1.0) -> bool:
    """Whether the service says SERVING. With any other answer, or none, it is not ready."""
    async with aio_channel(endpoint.address, endpoint.tls, ()) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
