"""Large requests go over a channel of their own, and their calls end as those of small ones do."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from kvasir.clients import AioInferenceClient
from kvasir.clients.aio.large_requests import _MOST_CALLS, LARGE_BYTES, LargeRequests, _LargeCall
from kvasir.errors import DeadlineExceeded, InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.status import answer_to, to_status

_LARGE = "a" * LARGE_BYTES


class _Engine(inference_pb2_grpc.InferenceServiceServicer):
    """Emits the prompt's length and then nothing, or moves, or refuses; notes callers and each end of a call."""

    def __init__(self) -> None:
        self.callers: list[tuple[str, object]] = []
        self.ended = threading.Semaphore(0)
        self.left_s = 0.0

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self._note(context)
        if request.agent_id == "refused":
            self._refuse(context)
        if request.resume_token:
            yield pb.GenerateResponse(delta=pb.Delta(text=f"rest of {request.resume_token}"))
            yield pb.GenerateResponse(finished=pb.Finished())
            return
        text = pb.GenerateResponse(delta=pb.Delta(text=str(len(request.prompt))))
        if request.agent_id == "moves":
            yield text
            yield pb.GenerateResponse(moved=pb.Moved(peer="other", resume_token="token"))
            return
        end = self._end_of(context)
        if request.agent_id != "silent":
            yield text
        assert end.wait(60)

    def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:  # noqa: N802
        self._note(context)
        if request.model == "refused":
            self._refuse(context)
        if request.model == "waits":
            assert self._end_of(context).wait(60)
        return pb.CountTokensResponse(tokens=len(request.prompt))

    def _note(self, context: Any) -> None:
        self.left_s = context.time_remaining()
        self.callers.append((context.peer(), dict(context.invocation_metadata()).get("authorization")))

    def _end_of(self, context: Any) -> threading.Event:
        end = threading.Event()
        context.add_callback(end.set)
        context.add_callback(self.ended.release)
        return end

    def _refuse(self, context: Any) -> None:
        status = to_status(error := InvalidArgument("prompt: not that one", field="prompt"))
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(answer_to(error).code, status.message)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[_Engine, str]]:
    options = [("grpc.max_receive_message_length", -1)]
    served, server = _Engine(), grpc.server(futures.ThreadPoolExecutor(4), options=options)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(served, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield served, f"127.0.0.1:{port}"
    server.stop(0)


def _run(address: str, use: Callable[[AioInferenceClient], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        large = LargeRequests(grpc.insecure_channel(address))
        async with AioInferenceClient(grpc.aio.insecure_channel(address), token="mine", large=large) as client:
            try:
                async with asyncio.timeout(20):
                    return await use(client)
            finally:
                large.close()

    return asyncio.run(run())


def test_large_requests_have_a_connection_of_their_own_and_the_callers_token(engine: tuple[_Engine, str]) -> None:
    served, address = engine
    served.callers.clear()

    async def use(client: AioInferenceClient) -> list[int]:
        return [await client.count_tokens(prompt=prompt) for prompt in ("a", _LARGE, "aa", _LARGE + "a")]

    assert _run(address, use) == [1, LARGE_BYTES, 2, LARGE_BYTES + 1]
    (small, large, *more), tokens = zip(*served.callers, strict=True)
    assert more == [small, large]
    assert small != large
    assert {*tokens} == {"Bearer mine"}


def test_a_refusal_of_a_large_request_names_its_field(engine: tuple[_Engine, str]) -> None:
    async def use(client: AioInferenceClient) -> None:
        with pytest.raises(InvalidArgument, match="not that one") as counted:
            await client.count_tokens(prompt=_LARGE, model="refused")
        with pytest.raises(InvalidArgument, match="not that one") as generated:
            await client.reply(prompt=_LARGE, agent_id="refused")
        assert (counted.value.field, generated.value.field) == ("prompt", "prompt")

    _run(engine[1], use)


def test_a_large_call_ends_at_the_engine_when_its_reader_leaves_or_its_time_is_over(
    engine: tuple[_Engine, str],
) -> None:
    served, address = engine

    async def use(client: AioInferenceClient) -> str:
        async with aclosing(client.generate(prompt=_LARGE)) as events:
            text = (await anext(events)).delta.text
        assert await asyncio.to_thread(served.ended.acquire, timeout=5)
        for call in (client.reply(prompt=_LARGE), client.count_tokens(prompt=_LARGE, model="waits")):
            seen, waiting = len(served.callers), asyncio.ensure_future(call)
            while len(served.callers) == seen:  # noqa: ASYNC110  of another thread's doing
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await asyncio.to_thread(served.ended.acquire, timeout=5)
        with pytest.raises(DeadlineExceeded):
            await client.reply(prompt=_LARGE, timeout_s=0.5)
        return text

    assert _run(address, use) == str(LARGE_BYTES)


async def test_the_time_of_a_large_call_includes_its_wait_for_a_thread(engine: tuple[_Engine, str]) -> None:
    large = LargeRequests(grpc.insecure_channel(engine[1]))
    async with AioInferenceClient(grpc.aio.insecure_channel(engine[1]), timeout_s=8, large=large) as client:
        are_free = threading.Event()
        for _ in range(_MOST_CALLS):
            large._threads.submit(are_free.wait, 10)
        call = asyncio.ensure_future(client.count_tokens(prompt=_LARGE))
        while not large._threads._work_queue.qsize():  # noqa: ASYNC110  of the call's doing
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        are_free.set()
        await call
    large.close()
    assert engine[0].left_s <= 7.5


def test_a_turn_moves_on_from_a_large_request(engine: tuple[_Engine, str]) -> None:
    async def use(client: AioInferenceClient) -> str:
        async with AioInferenceClient(grpc.aio.insecure_channel(engine[1])) as other:
            client.peers["other"] = other
            return (await client.reply(prompt=_LARGE, agent_id="moves")).text

    assert _run(engine[1], use) == f"{LARGE_BYTES}rest of token"


def test_a_call_that_is_cancelled_while_a_thread_begins_it_ends_as_it_begins(
    engine: tuple[_Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, may_begin, is_over = threading.Event(), threading.Event(), threading.Event()
    take = _LargeCall._take

    def late(self: Any, take_one: Any) -> Any:
        begins.set()
        begin = self._begin
        self._begin = lambda: (may_begin.wait(10), begin())[1]
        try:
            return take(self, take_one)
        finally:
            is_over.set()

    monkeypatch.setattr(_LargeCall, "_take", late)

    async def use(client: AioInferenceClient) -> bool:
        turn = asyncio.create_task(client.reply(prompt=_LARGE, agent_id="silent"))
        await asyncio.to_thread(begins.wait, 10)
        turn.cancel()
        await asyncio.wait([turn])
        may_begin.set()
        return await asyncio.to_thread(is_over.wait, 10)

    assert _run(engine[1], use)
