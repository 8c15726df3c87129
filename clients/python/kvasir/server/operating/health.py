"""The health of a server's services (grpc.health.v1), whose watches end with a stop; gRPC's own delay it."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING, _NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()  # another one after each change
        self._is_over = False

    def set(self, services: Iterable[str], *, serve: bool) -> None:
        """What is answered for these from now on. Changes nothing after the end."""
        if not self._is_over:
            self._statuses |= dict.fromkeys(services, _SERVING if serve else _NOT_SERVING)
            self._tell()

    def end(self) -> None:
        """No service serves any more; watches end when they have reported it."""
        self.set(self._statuses, serve=False)
        self._is_over = True
        self._tell()

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> Any:  # noqa: N802 - gRPC's names
        if (status := self._statuses.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        said = None
        while True:
            changed, is_over = self._changed, self._is_over
            status = self._statuses.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != said:
                await context.write(pb.HealthCheckResponse(status=status))
                said = status
            if is_over:
                return
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
