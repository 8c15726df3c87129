"""The engine's memory behind a scenario, before an engine that says what the test wants."""

import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from kvasir.clients import AioInferenceClient
from kvasir.errors import Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir_orchestrator import Answer, EngineMemory, ReplyRequest, Scenario

GOSSIP = Scenario.shipped("gossip")
ASKED = ReplyRequest(
    turn=GOSSIP.plan.turns[0],
    agent_id="ada",
    namespace="",
    request_id="turn",
    new=[{"role": "user", "content": "Hello."}],
    transcript=[],
    version=None,
    max_tokens=8,
    temperature=0.0,
    seed=0,
    regex=None,
)


class _LosesItsFirstTurn(inference_pb2_grpc.InferenceServiceServicer):
    """An engine that cannot store its first turn and is killed; asked again, it does the turn anew, in other words."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self._turns = iter([("One.", pb.SNAPSHOT_STATE_FAILED), ("Two.", pb.SNAPSHOT_STATE_COMMITTED)])

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self.models.append(request.model)
        text, state = next(self._turns)
        yield pb.GenerateResponse(started=pb.Started(prompt_tokens=9))
        yield pb.GenerateResponse(delta=pb.Delta(text=text))
        yield pb.GenerateResponse(finished=pb.Finished(snapshot=pb.SnapshotOutcome(state=state, version=1)))


def test_an_answer_is_what_the_memory_that_was_stored_says() -> None:
    async def asked(memory: EngineMemory) -> list[str | Answer]:
        async with aclosing(memory.ask(ASKED)) as pieces:
            return [piece async for piece in pieces]

    async def both(address: str) -> list[str | Answer]:
        async with AioInferenceClient.connect(address) as client:
            memory = EngineMemory(client, model="other")
            with pytest.raises(Unavailable) as lost:
                await asked(memory)
            assert lost.value.reason == "MEMORY_NOT_STORED"
            return await asked(memory)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    engine = _LosesItsFirstTurn()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        said, answer = asyncio.run(both(f"127.0.0.1:{port}"))
    finally:
        server.stop(0)
    assert isinstance(answer, Answer)
    assert (said, answer.text, answer.version) == ("Two.", "Two.", 1)
    assert engine.models == ["other", "other"]
