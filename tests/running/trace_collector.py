"""A collector of OpenTelemetry's traces, as services send them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent: spans by service and name."""

    def __init__(self) -> None:
        self.text = ""
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:
            self.text += str(request)
            for each in request.resource_spans:
                [service] = [pair.value.string_value for pair in each.resource.attributes if pair.key == "service.name"]
                self._spans += [(service, span) for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def services(self) -> set[str]:
        with self._lock:
            return {service for service, _ in self._spans}

    def of(self, trace_id: str) -> dict[tuple[str, str], Any]:
        with self._lock:
            return {(service, span.name): span for service, span in self._spans if span.trace_id.hex() == trace_id}


@contextmanager
def collecting() -> Iterator[tuple[Collector, int]]:
    """The collector and its port on loopback."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, port
    finally:
        server.stop(None)
