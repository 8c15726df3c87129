"""Requests that take long to check are checked beside the event loop, and count as prompts meanwhile."""

import asyncio
import threading
from dataclasses import replace

import pytest
from kvasir.clients.messages import message
from kvasir.common.v1 import message_pb2
from kvasir.credentials import CLIENT, Principal
from kvasir.errors import ResourceExhausted
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.long_requests import LongRequests, Request
from inference_svc.turns.admission import Admission
from tests.inference.turns.test_admission import LIMITS

CALLERS = {name: Principal(name, name, frozenset({CLIENT})) for name in ("greedy", "modest")}
LARGE = replace(LIMITS, max_open_prompt_bytes=3 << 20)
MANY = pb.MessageList(messages=[message("user")] * 501)
PARTS, CALLS = message("user"), message("assistant", "Now.")
PARTS.parts.extend(message("user", "a").parts[0] for _ in range(501))
CALLS.tool_calls.extend(message_pb2.ToolCall(name="f") for _ in range(500))


@pytest.mark.parametrize(
    ("request_", "is_long"),
    [
        (pb.GenerateRequest(messages=MANY), True),
        (pb.GenerateRequest(append_messages=MANY), True),
        (pb.WarmRequest(messages=MANY), True),
        (pb.CountTokensRequest(messages=MANY), True),
        (pb.CountTokensRequest(messages=pb.MessageList(messages=MANY.messages[1:])), False),
        (pb.GenerateRequest(messages=pb.MessageList(messages=[PARTS])), True),
        (pb.GenerateRequest(messages=pb.MessageList(messages=[CALLS])), True),
        (pb.GenerateRequest(messages=pb.MessageList(messages=[message("user", "a")] * 500)), False),
        (pb.GenerateRequest(prompt="a" * (1 << 20)), True),
        (pb.GenerateRequest(prompt="a"), False),
        (pb.WarmRequest(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_long_request_is_checked_by_another_thread(request_: Request, *, is_long: bool) -> None:
    requests = LongRequests(Admission(LARGE, lambda: 0.0))
    checked_by = asyncio.run(requests.checked(request_, CALLERS["modest"], threading.current_thread))
    assert (checked_by is not threading.main_thread()) == is_long


def test_a_check_whose_call_was_cancelled_ends_before_the_next_one_begins() -> None:
    requests, may_end, ended = LongRequests(Admission(LARGE, lambda: 0.0)), threading.Event(), list[bool]()
    long = pb.GenerateRequest(messages=MANY)

    async def run() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def slow() -> None:
            loop.call_soon_threadsafe(begun.set)
            ended.append(may_end.wait(10))

        first = asyncio.create_task(requests.checked(long, CALLERS["greedy"], slow))
        await begun.wait()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(requests.checked(long, CALLERS["modest"], lambda: [*ended]))
        await asyncio.wait([second], timeout=0.1)
        may_end.set()
        assert await second == [True]

    asyncio.run(run())


def test_namespaces_take_turns_and_requests_that_wait_count_as_prompts() -> None:
    admission, order, long = Admission(LARGE, lambda: 0.0), list[str](), pb.GenerateRequest(messages=MANY)
    held = list[int]()

    async def check() -> None:
        requests = LongRequests(admission)

        async def one(name: str) -> None:
            await requests.checked(long, CALLERS[name], lambda: order.append(name))

        waiting = [asyncio.create_task(one(name)) for name in ("greedy", "greedy", "greedy", "modest")]
        await asyncio.sleep(0)
        held.append(admission.open_prompt_bytes)
        await asyncio.gather(*waiting)
        with admission.turn("greedy", "greedy", 1), pytest.raises(ResourceExhausted):
            await requests.checked(pb.GenerateRequest(prompt="a" * (4 << 20)), CALLERS["modest"], lambda: None)

    asyncio.run(check())
    assert held == [4 * long.ByteSize()]
    assert order.index("modest") <= 2
    assert admission.open_prompt_bytes == 0
