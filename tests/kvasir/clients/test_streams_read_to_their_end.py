"""Calls that end with `done` read on: a stream that is left before its end is a cancelled call to its service. What is
done is not undone by what happens to the stream behind it.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from kvasir.cachestore.v1 import cachestore_pb2, cachestore_pb2_grpc
from kvasir.clients import AioInferenceClient, InferenceClient
from kvasir.inference.v1 import inference_pb2, inference_pb2_grpc

CALLS: dict[str, Callable[[Any], Any]] = {
    "pull": lambda client: client.pull_agent("studio", "ada"),
    "move": lambda client: client.move_agent("ada", from_peer="studio"),
    "load": lambda client: client.load_model("tiny"),
}


class _Service(cachestore_pb2_grpc.AgentServiceServicer, inference_pb2_grpc.InferenceServiceServicer):
    """Its calls end a moment after they said `done`, or break; notes whether somebody listened until then."""

    def __init__(self, *, breaks: bool) -> None:
        self._breaks = breaks
        self.was_heard: list[bool] = []

    def _told(self, done: Any, context: Any) -> Iterator[Any]:
        yield done
        time.sleep(0.2)
        self.was_heard.append(context.is_active())
        if self._breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it ends")

    def PullAgent(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        return self._told(cachestore_pb2.PullAgentResponse(done=cachestore_pb2.SnapshotVersion(version=1)), context)

    def MoveAgent(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        return self._told(cachestore_pb2.MoveAgentResponse(done=cachestore_pb2.Agent(agent_id="ada")), context)

    def LoadModel(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        return self._told(inference_pb2.LoadModelResponse(done=inference_pb2.LoadedModel()), context)


@contextmanager
def served(*, breaks: bool) -> Iterator[tuple[_Service, str]]:
    service, server = _Service(breaks=breaks), grpc.server(futures.ThreadPoolExecutor(1))
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        server.stop(1).wait()


@pytest.mark.long(2)
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_done_is_not_cancelled_and_does_not_fail_any_more(name: str, breaks: bool) -> None:
    """The service may be stopped, or be gone, between `done` and the end of the stream."""

    async def call(address: str) -> None:
        async with AioInferenceClient.connect(address) as client:
            assert await CALLS[name](client) is not None

    with served(breaks=breaks) as (service, address):
        with InferenceClient.connect(address) as client:
            assert CALLS[name](client) is not None
        asyncio.run(call(address))
    assert service.was_heard == [True, True]
