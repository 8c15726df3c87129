"""Options of a turn: named in a call or kept as a value, each reaches its field of the request, in both clients."""

import asyncio
import inspect
import os
from collections.abc import Iterator
from concurrent import futures
from dataclasses import fields
from typing import Any, get_type_hints

import grpc
import pytest
from kvasir.cli.talking.turn import follow_turn
from kvasir.clients import AioInferenceClient, GenerateOptions, InferenceClient, Reply
from kvasir.clients.generate_options import OptionArguments
from kvasir.clients.inference_client_turns import Input, turn_request
from kvasir.clients.messages import message
from kvasir.errors import Cancelled, Internal, InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc

TOOLS = [pb.Tool(name="look")]
FULL = pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST)
DATES = pb.VolatileRules(names=["template-date"])
TIDES = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="tides")
THINKING = pb.Thinking(budget_tokens=3)
# Every option, and the request's field with what must arrive in it.
ARRIVES: dict[str, tuple[Any, str, Any]] = {
    "agent_id": ("ada", "agent_id", "ada"),
    "expected_version": (0, "expected_version", 0),
    "memory_mode": (pb.MEMORY_MODE_READ_ONLY, "memory_mode", pb.MEMORY_MODE_READ_ONLY),
    "base_version": (3, "base_version", 3),
    "expect_existing": (True, "expect_existing", True),
    "replace_memory": (True, "replace_memory", True),
    "volatile": (DATES, "volatile", DATES),
    "return_prompt_token_ids": (True, "return_prompt_token_ids", True),
    "continue_final_message": (True, "continue_final_message", True),
    "on_full": (FULL, "on_full", FULL),
    "max_tokens": (50, "sampling", pb.Sampling(max_tokens=50)),
    "sampling": ({"temperature": 0.5}, "sampling", pb.Sampling(temperature=0.5)),
    "json_schema": ({"type": "null"}, "json_schema", '{"type": "null"}'),
    "regex": ("a|b", "regex", "a|b"),
    "tools": (TOOLS, "tools", TOOLS),
    "tool_choice": (TIDES, "tool_choice", TIDES),
    "thinking": (THINKING, "thinking", THINKING),
    "template_settings": ({"x": True}, "template_settings", {"x": pb.TemplateValue(flag=True)}),
    "ignore_unread_settings": (True, "ignore_unread_settings", True),
    "keep_partial": (True, "keep_partial", True),
    "priority": (pb.PRIORITY_BACKGROUND, "priority", pb.PRIORITY_BACKGROUND),
    "longest_gap_ms": (200, "longest_gap_ms", 200),
    "model": ("second", "model", "second"),
    "request_id": ("r-1", "request_id", "r-1"),
}


class _Listener(inference_pb2_grpc.InferenceServiceServicer):
    """An engine that notes what it is asked, and says nothing."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []

    def Generate(self, request: pb.GenerateRequest, context: object) -> Iterator[pb.GenerateResponse]:  # noqa: N802
        self.asked.append(request)
        yield pb.GenerateResponse(finished=pb.Finished())


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[_Listener, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    listener = _Listener()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(listener, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield listener, f"127.0.0.1:{port}"
    server.stop(0)


def asked(listening: tuple[_Listener, str], **given: Any) -> pb.GenerateRequest:
    """The request that both clients send."""
    listener, address = listening
    listener.asked.clear()
    with InferenceClient.connect(address) as client:
        client.reply(prompt="x", **given)

    async def ask() -> None:
        async with AioInferenceClient.connect(address) as client:
            await client.reply(prompt="x", **given)

    asyncio.run(ask())
    blocking, other = listener.asked
    if blocking.request_id != "r-1":
        assert "" != blocking.request_id != other.request_id != ""
        other.request_id = blocking.request_id
    assert blocking == other
    return blocking


def test_arguments_and_fields_are_one_list() -> None:
    assert get_type_hints(OptionArguments) == get_type_hints(GenerateOptions)
    assert set(ARRIVES) == {field.name for field in fields(GenerateOptions)}


@pytest.mark.parametrize("name", ARRIVES)
def test_an_option_reaches_its_field_named_or_as_a_value(name: str, listening: tuple[_Listener, str]) -> None:
    value, field, expected = ARRIVES[name]
    named = asked(listening, **{name: value})
    kept = asked(listening, options=GenerateOptions(**{name: value}))
    for request in (named, kept):
        assert getattr(request, field) == expected
    others = {"prompt", "request_id", field}
    assert {found.name for found, _ in named.ListFields()} <= others


def test_what_a_call_names_goes_before_what_it_hands_over(listening: tuple[_Listener, str]) -> None:
    kept = GenerateOptions(agent_id="ada", max_tokens=9)
    request = asked(listening, options=kept, agent_id="bob", sampling=pb.Sampling(seed=3))
    assert (request.agent_id, request.sampling) == ("bob", pb.Sampling(max_tokens=9, seed=3))
    assert kept == GenerateOptions(agent_id="ada", max_tokens=9)


def test_a_message_of_sampling_is_not_changed_by_max_tokens(listening: tuple[_Listener, str]) -> None:
    sampling = pb.Sampling(seed=3)
    asked(listening, sampling=sampling, max_tokens=4)
    assert sampling == pb.Sampling(seed=3)


def test_two_lengths_and_unknown_names_are_refused() -> None:
    with InferenceClient.connect("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument) as caught:
            client.reply(prompt="x", max_tokens=3, sampling={"max_tokens": 3})
        assert caught.value.field == "max_tokens"
        with pytest.raises(TypeError, match="max_token"):
            client.reply(prompt="x", max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(("given", "field"), [("prompt", "prompt"), ("append_messages", "append_messages[0]")])
def test_half_a_character_is_refused_in_plain_words(given: str, field: str) -> None:
    text = os.fsdecode(b"\xff")  # as a terminal's bytes reach a program
    asked = {given: text if given == "prompt" else [{"role": "user", "content": text}]}
    with InferenceClient.connect("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as caught:
        client.reply(**asked)  # type: ignore[arg-type]
    assert caught.value.message == f"{field}: a text or a name is not valid UTF-8"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt": [-1]}, "prompt_token_ids"),
        ({"prompt": "x", "sampling": {"seed": 1 << 64}}, "sampling"),
        ({"prompt": "x", "sampling": {"nothing": 1}}, "sampling"),
        ({"prompt": "x", "json_schema": {"enum": {1}}}, "json_schema"),
        ({"prompt": "x", "memory_mode": "none"}, "memory_mode"),
        ({"prompt": "x", "base_version": "x"}, "base_version"),
        ({"messages": "Hello."}, "messages[0]"),
        ({"messages": [{"role": "user", "text": "Hello."}]}, "messages[0].text"),
    ],
)
def test_a_value_that_a_message_cannot_hold_is_refused_with_its_field(given: dict[str, Any], field: str) -> None:
    with InferenceClient.connect("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as caught:
        client.reply(**given)
    assert caught.value.field == field
    assert "ValueError: unknown enum" not in caught.value.message


def test_a_field_of_sampling_that_a_call_names_is_shown_in_its_place() -> None:
    with InferenceClient.connect("127.0.0.1:1") as client, pytest.raises(TypeError, match=r"'temperature': 0\.5"):
        client.reply(prompt="x", temperature=0.5)  # type: ignore[call-arg]


def test_generate_and_reply_take_the_same_in_both_clients() -> None:
    methods = [
        getattr(client, name) for client in (InferenceClient, AioInferenceClient) for name in ("generate", "reply")
    ]
    assert len({tuple(inspect.signature(method).parameters.items()) for method in methods}) == 1


@pytest.mark.parametrize("number", [-1, 1 << 30])
def test_a_choice_that_no_service_sends_makes_no_room_for_itself(number: int) -> None:
    with pytest.raises(Internal):
        Reply().add(pb.GenerateResponse(delta=pb.Delta(choice=number, text="x")))


def test_a_turn_that_never_started_has_no_result() -> None:
    with pytest.raises(Internal):
        follow_turn([pb.GenerateResponse(finished=pb.Finished())])


@pytest.mark.parametrize("began", [[], [pb.GenerateResponse(started=pb.Started(request_id="r"))]])
def test_a_turn_that_another_call_cancelled_has_no_result(began: list[pb.GenerateResponse]) -> None:
    ended = pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_CANCELLED))
    with pytest.raises(Cancelled):
        follow_turn([*began, ended])


@pytest.mark.parametrize("count", [0, 1, 600])
@pytest.mark.parametrize("name", ["messages", "append_messages"])
def test_messages_are_sent_in_their_order_however_many_are_copied_at_once(name: str, count: int) -> None:
    sent = [message("user", f"{number}") for number in range(count)]
    given = Input(**{"prompt": None, "messages": None, "append_messages": None, name: sent})
    written = turn_request(given, GenerateOptions(), "r").SerializeToString()
    field: Any = {name: pb.MessageList(messages=sent)}
    assert pb.GenerateRequest.FromString(written) == pb.GenerateRequest(
        request_id="r", sampling=GenerateOptions().to_proto_sampling(), **field
    )
