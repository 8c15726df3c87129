"""The blocking clients have all that the asynchronous ones have, and leave neither a call nor a thread behind."""

import asyncio
import gc
import inspect
import math
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing
from typing import Any

import grpc
import pytest
from kvasir.clients import AioInferenceClient, AioStoreClient, InferenceClient, StoreClient
from kvasir.errors import Cancelled, FailedPrecondition
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc

Turn = Iterator[pb.GenerateResponse]


class _Endless(inference_pb2_grpc.InferenceServiceServicer):
    """An engine whose turns emit three words and then nothing; notes each end of a call."""

    def __init__(self) -> None:
        self.ended = threading.Semaphore(0)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Turn:  # noqa: N802
        ended = threading.Event()
        context.add_callback(ended.set)
        context.add_callback(self.ended.release)
        for word in ("one", "two", "three"):
            yield pb.GenerateResponse(delta=pb.Delta(text=word))
        assert ended.wait(60)


@pytest.fixture(scope="module")
def endless() -> Iterator[tuple[_Endless, str]]:
    may_ping = [("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.min_ping_interval_without_data_ms", 5_000)]
    engine, server = _Endless(), grpc.server(futures.ThreadPoolExecutor(4), options=may_ping)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield engine, f"127.0.0.1:{port}"
    server.stop(0)


@pytest.mark.parametrize(
    ("blocking", "aio"), [(InferenceClient, AioInferenceClient), (StoreClient, AioStoreClient)], ids=["engine", "store"]
)
def test_each_method_of_an_asynchronous_client_is_one_of_the_blocking_client(blocking: type, aio: type) -> None:
    for name, method in inspect.getmembers(aio, inspect.isroutine):
        if not name.startswith("_"):
            mine = getattr(blocking, name)
            assert inspect.getdoc(mine) == inspect.getdoc(method), name
            given, expected = ([*inspect.signature(each).parameters] for each in (mine, method))
            assert given == expected, name
            assert not inspect.iscoroutinefunction(mine)


def test_another_callers_client_shows_the_engines_that_it_uses() -> None:
    with InferenceClient.connect("localhost:1") as mine, InferenceClient.connect("localhost:2") as other:
        mine.engines = [other]
        assert mine.engines == (other,)
        assert mine.with_token("x" * 32).engines == ()
        assert mine.engines == (other,)


def _closed(turn: Turn) -> None:
    next(turn)
    turn.close()  # type: ignore[attr-defined]


def _dropped(turn: Turn) -> None:
    next(turn)
    del turn
    gc.collect()


def _failing_reader(turn: Turn) -> None:
    with pytest.raises(ZeroDivisionError), closing(turn):  # type: ignore[type-var]
        assert 1 // next(turn).delta.choice


def _interrupted(turn: Turn) -> None:
    """By Ctrl-C while it waits for the next event."""
    texts = [next(turn).delta.text for _ in range(3)]
    assert texts == ["one", "two", "three"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(turn)
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    assert next(turn, None) is None


@pytest.mark.parametrize("left", [_closed, _dropped, _failing_reader, _interrupted])
def test_a_stream_that_is_left_is_a_cancelled_call(endless: tuple[_Endless, str], left: Callable[[Turn], None]) -> None:
    engine, address = endless
    threads = set(threading.enumerate())
    with InferenceClient.connect(address) as client:
        left(client.generate(prompt="x"))
        assert engine.ended.acquire(timeout=60)
    assert _new_threads(threads) == []


def test_a_stream_that_began_in_an_event_loop_goes_on_after_the_loops_end(endless: tuple[_Endless, str]) -> None:
    with InferenceClient.connect(endless[1]) as client, closing(client.generate(prompt="x")) as turn:

        async def begin() -> str:
            return next(turn).delta.text

        assert asyncio.run(begin()) == "one"
        assert next(turn).delta.text == "two"


async def test_a_blocking_client_works_where_an_event_loop_runs(endless: tuple[_Endless, str]) -> None:
    """As in a notebook."""
    engine, address = endless
    with InferenceClient.connect(address) as client:
        with closing(client.generate(prompt="x")) as turn:
            texts = [next(turn).delta.text for _ in range(3)]
        assert engine.ended.acquire(timeout=60), "the loop has to run before the call is cancelled"
    assert texts == ["one", "two", "three"]


def test_an_endless_deadline_is_none(endless: tuple[_Endless, str]) -> None:
    with InferenceClient.connect(endless[1]) as client:
        with closing(client.generate(prompt="x", timeout_s=math.inf)) as turn:
            assert next(turn).delta.text == "one"
        with pytest.raises(FailedPrecondition):  # this engine has no other calls
            client.get_capabilities(timeout_s=math.inf)
    assert endless[0].ended.acquire(timeout=60)


def test_a_closed_client_refuses_calls_and_may_be_closed_again(endless: tuple[_Endless, str]) -> None:
    client = InferenceClient.connect(endless[1])
    other = client.with_token("x" * 32)
    turn = client.generate(prompt="x")
    next(turn)
    client.close()
    client.close()
    for call in (client.list_turns, other.list_turns, lambda: next(client.generate(prompt="x")), lambda: [*turn]):
        with pytest.raises(Cancelled):
            call()
    assert endless[0].ended.acquire(timeout=60)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_closed_client_ends_other_tasks_turns_with_an_error(
    endless: tuple[_Endless, str], is_cancelled: bool
) -> None:
    """Not with the CancelledError of gRPC: it ends a task that nobody has cancelled, and no TaskGroup reports it."""
    engine, address = endless
    client = AioInferenceClient.connect(address)
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate(prompt="x"):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    if is_cancelled:
        reading.cancel()
    await client.close()
    await client.close()
    with pytest.raises(asyncio.CancelledError if is_cancelled else Cancelled):
        await reading
    with pytest.raises(Cancelled, match="the client is closed"):
        await client.list_turns()
    assert engine.ended.acquire(timeout=60)


def _new_threads(before: set[threading.Thread]) -> list[str]:
    """Names of the threads that stay, without those of the server."""
    passed = threading.Event()
    for _ in range(200):
        new = [each.name for each in threading.enumerate() if each not in before and "ThreadPool" not in each.name]
        if not new:
            break
        passed.wait(0.05)
    return new
