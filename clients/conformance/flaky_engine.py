"""An engine that is UNAVAILABLE at first: which calls a client repeats by itself is seen in what it counts."""

from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from kvasir.cachestore.v1 import cachestore_pb2, cachestore_pb2_grpc
from kvasir.inference.v1 import inference_pb2, inference_pb2_grpc


class FlakyEngine(inference_pb2_grpc.InferenceServiceServicer, cachestore_pb2_grpc.AgentServiceServicer):  # type: ignore[misc]
    """Refuses the first two calls of each kind, as gRPC does for a service that is gone: without details."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def CountTokens(self, request: Any, context: Any) -> inference_pb2.CountTokensResponse:  # noqa: N802
        self._refuse("CountTokens", context)
        return inference_pb2.CountTokensResponse(tokens=7)

    def GetAgent(self, request: Any, context: Any) -> cachestore_pb2.GetAgentResponse:  # noqa: N802
        self._refuse("GetAgent", context)
        line = cachestore_pb2.SnapshotVersion(version=1, token_count=9)
        return cachestore_pb2.GetAgentResponse(agent=cachestore_pb2.Agent(agent_id="ada", lines=[line]))

    def GetUsage(self, request: Any, context: Any) -> cachestore_pb2.GetUsageResponse:  # noqa: N802
        self._refuse("GetUsage", context)
        return cachestore_pb2.GetUsageResponse(agent_count=1)

    def ListHotMemories(self, request: Any, context: Any) -> inference_pb2.ListHotMemoriesResponse:  # noqa: N802
        self._refuse("ListHotMemories", context)
        return inference_pb2.ListHotMemoriesResponse()

    def ForkAgent(self, request: Any, context: Any) -> cachestore_pb2.ForkAgentResponse:  # noqa: N802
        self._refuse("ForkAgent", context)
        return cachestore_pb2.ForkAgentResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        self._refuse("Generate", context)
        yield inference_pb2.GenerateResponse()

    def _refuse(self, name: str, context: Any) -> None:
        self.calls[name] += 1
        if self.calls[name] <= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")


@contextmanager
def flaky_engine() -> Iterator[tuple[FlakyEngine, str]]:
    """The engine, and its address on loopback."""
    engine = FlakyEngine()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield engine, f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None)
