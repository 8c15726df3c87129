"""Requests that take long to check are checked beside the event loop, and count as prompts meanwhile."""

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

import pytest
from kvasir.clients.messages import message
from kvasir.common.v1 import message_pb2
from kvasir.credentials import CLIENT, Principal
from kvasir.errors import ResourceExhausted
from kvasir.inference.v1 import inference_pb2 as pb
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc.edge.long_requests import Request, checked
from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.text.token_text import TokenText
from inference_svc.turns.admission import Admission
from tests.inference.turns.test_admission import LIMITS

CALLERS = {name: Principal(name, name, frozenset({CLIENT})) for name in ("greedy", "modest")}
LARGE = replace(LIMITS, max_open_prompt_bytes=3 << 20)
MANY = pb.MessageList(messages=[message("user")] * 501)
PARTS, CALLS = message("user"), message("assistant", "Now.")
PARTS.parts.extend(message("user", "a").parts[0] for _ in range(501))
CALLS.tool_calls.extend(message_pb2.ToolCall(name="f") for _ in range(500))
NAME: ContextVar[str] = ContextVar("name")


@pytest.fixture(scope="module")
def prompting() -> Iterator[Prompting]:
    tokenizer = load_tokenizer(kvasir_tiny.path())
    tokenizer_json = (kvasir_tiny.path() / "tokenizer.json").read_text(encoding="utf-8")
    prompting = Prompting(tokenizer, TokenText.of_tokenizer(tokenizer_json, tokenizer.decode))
    yield prompting
    prompting.close()


@pytest.fixture
def admission() -> Admission:
    return Admission(LARGE, lambda: 0.0)


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
async def test_a_long_request_is_checked_where_long_conversations_are_rendered(
    request_: Request, prompting: Prompting, admission: Admission, *, is_long: bool
) -> None:
    def check() -> tuple[str, str, int]:
        return threading.current_thread().name.partition("_")[0], NAME.get(), admission.open_prompt_bytes

    NAME.set("of this call")
    thread, name, held_bytes = await checked(request_, CALLERS["modest"], check, admission, prompting)
    assert (thread == "render", held_bytes > 0, name) == (is_long, is_long, "of this call")
    assert admission.open_prompt_bytes == 0


def test_before_a_model_is_loaded_a_long_request_is_checked_at_once(admission: Admission) -> None:
    long = pb.GenerateRequest(messages=MANY)
    thread = asyncio.run(checked(long, CALLERS["modest"], threading.current_thread, admission, None))
    assert thread is threading.main_thread()


async def test_a_check_whose_call_was_cancelled_ends_before_the_next_one_begins(
    prompting: Prompting, admission: Admission
) -> None:
    may_end, ended, long = threading.Event(), list[bool](), pb.GenerateRequest(messages=MANY)
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def slow() -> None:
        loop.call_soon_threadsafe(begun.set)
        ended.append(may_end.wait(10))

    first = asyncio.create_task(checked(long, CALLERS["greedy"], slow, admission, prompting))
    await begun.wait()
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(checked(long, CALLERS["modest"], lambda: [*ended], admission, prompting))
    await asyncio.wait([second], timeout=0.1)
    may_end.set()
    assert await second == [True]


async def test_namespaces_take_turns_and_requests_that_wait_count_as_prompts(
    prompting: Prompting, admission: Admission
) -> None:
    order, long, held = list[str](), pb.GenerateRequest(messages=MANY), list[int]()

    async def one(name: str) -> None:
        await checked(long, CALLERS[name], lambda: order.append(name), admission, prompting)

    waiting = [asyncio.create_task(one(name)) for name in ("greedy", "greedy", "greedy", "modest")]
    await asyncio.sleep(0)
    held.append(admission.open_prompt_bytes)
    await asyncio.gather(*waiting)
    larger = pb.GenerateRequest(prompt="a" * (4 << 20))
    with admission.turn("greedy", "greedy", 1), pytest.raises(ResourceExhausted):
        await checked(larger, CALLERS["modest"], lambda: None, admission, prompting)
    assert held == [4 * long.ByteSize()]
    assert order.index("modest") <= 2
    assert admission.open_prompt_bytes == 0
