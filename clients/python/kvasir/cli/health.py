"""Asks a service whether it is ready, by grpc.health.v1; no token is needed for that."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvasir.cli.home import Endpoint

STORE_SERVICE = "kvasir.cachestore.v1.CacheStoreService"
ENGINE_SERVICE = "kvasir.inference.v1.InferenceService"


async def is_ready(endpoint: Endpoint, service: str, timeout_s: float = 1.0) -> bool:
    """True when the service says SERVING. Anything else, also no answer, is not ready."""
    async with _channel(endpoint) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _channel(endpoint: Endpoint) -> grpc.aio.Channel:
    # A channel of its own each time: one that failed to connect waits ever longer before it tries again.
    options = (("grpc.use_local_subchannel_pool", 1),)
    if endpoint.ca_file is None:
        return grpc.aio.insecure_channel(endpoint.address, options=options)
    credentials = grpc.ssl_channel_credentials(root_certificates=endpoint.ca_file.read_bytes())
    return grpc.aio.secure_channel(endpoint.address, credentials, options=options)
