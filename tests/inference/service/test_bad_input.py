"""Bad input gets a typed error that names the field, at once, and nothing crashes."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from kvasir import errors
from kvasir.clients import InferenceClient
from kvasir.common.v1 import message_pb2
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.status import from_rpc_error

from tests.running.system_fixtures import House

REFUSED_WITHIN_S = 0.25
NAN = float("nan")


USER = message_pb2.ROLE_USER
TEXT = [message_pb2.Part(text="hello")]


def messages(*roles: message_pb2.Role) -> pb.MessageList:
    return pb.MessageList(messages=[message_pb2.Message(role=role, parts=TEXT) for role in roles])


def sampling(**values: Any) -> dict[str, Any]:
    return {"prompt": "hello", "sampling": pb.Sampling(**values)}


BAD: dict[str, tuple[dict[str, Any], type[errors.KvasirError], str]] = {
    "unknown model": ({"prompt": "x", "model": "gpt-9"}, errors.NotFound, "model"),
    "no input": ({}, errors.InvalidArgument, "input"),
    "empty prompt": ({"prompt": ""}, errors.InvalidArgument, "prompt"),
    "no messages": ({"messages": messages()}, errors.InvalidArgument, "messages.messages"),
    "unknown role": ({"messages": messages(USER, 9)}, errors.InvalidArgument, "messages.messages[1].role"),
    "no content": (
        {"messages": pb.MessageList(messages=[message_pb2.Message(role=USER, parts=[message_pb2.Part()])])},
        errors.InvalidArgument,
        "messages.messages[0].parts[0]",
    ),
    "image": (
        {
            "append_messages": pb.MessageList(
                messages=[message_pb2.Message(role=USER, parts=[*TEXT, message_pb2.Part(image=message_pb2.Image())])]
            ),
            "agent_id": "a",
        },
        errors.InvalidArgument,
        "append_messages.messages[0].parts[1].image",
    ),
    "empty role": (
        {"messages": messages(message_pb2.ROLE_UNSPECIFIED)},
        errors.InvalidArgument,
        "messages.messages[0].role",
    ),
    "half a character": (
        {"messages": messages(USER), "tools": [pb.Tool(name="t", parameters_json='{"a": "\\ud800"}')]},
        errors.InvalidArgument,
        "tools[0].parameters_json",
    ),
    "path as a name": ({"prompt": "x", "agent_id": "../../etc\0passwd"}, errors.InvalidArgument, "agent_id"),
    "huge name": ({"prompt": "x", "agent_id": "a" * 1_000_000}, errors.InvalidArgument, "agent_id"),
    "twin of a name": ({"prompt": "x", "agent_id": "e\u0301"}, errors.InvalidArgument, "agent_id"),
    "hidden character": ({"prompt": "x", "agent_id": "a\u202eb"}, errors.InvalidArgument, "agent_id"),
    "request id": ({"prompt": "x", "request_id": "a\nb"}, errors.InvalidArgument, "request_id"),
    "negative parent": (
        {"prompt": "x", "agent_id": "a", "expected_version": -1},
        errors.InvalidArgument,
        "expected_version",
    ),
    "parent without agent": ({"prompt": "x", "expected_version": 0}, errors.InvalidArgument, "expected_version"),
    "partial without agent": ({"prompt": "x", "keep_partial": True}, errors.InvalidArgument, "keep_partial"),
    "a gap that stops all prompts": ({"prompt": "x", "longest_gap_ms": 19}, errors.InvalidArgument, "longest_gap_ms"),
    "no gap": ({"prompt": "x", "longest_gap_ms": 0}, errors.InvalidArgument, "longest_gap_ms"),
    "a gap of a second and more": (
        {"prompt": "x", "longest_gap_ms": 1001},
        errors.InvalidArgument,
        "longest_gap_ms",
    ),
    "append without agent": ({"append_messages": messages(USER)}, errors.InvalidArgument, "append_messages"),
    "append to nobody who is expected": (
        {"append_messages": messages(USER), "agent_id": "nobody", "expect_existing": True},
        errors.NotFound,
        "agent_id",
    ),
    "expected without agent": ({"prompt": "x", "expect_existing": True}, errors.InvalidArgument, "expect_existing"),
    "mode without agent": ({"prompt": "x", "memory_mode": 2}, errors.InvalidArgument, "memory_mode"),
    "mode of no name": ({"prompt": "x", "agent_id": "a", "memory_mode": 9}, errors.InvalidArgument, "memory_mode"),
    "append without memory": (
        {"append_messages": messages(USER), "agent_id": "a", "memory_mode": 3},
        errors.InvalidArgument,
        "append_messages",
    ),
    "kept part of what is only read": (
        {"prompt": "x", "agent_id": "a", "memory_mode": 2, "keep_partial": True},
        errors.InvalidArgument,
        "keep_partial",
    ),
    "base 0": ({"prompt": "x", "agent_id": "a", "base_version": 0}, errors.InvalidArgument, "base_version"),
    "base without agent": ({"prompt": "x", "base_version": 1}, errors.InvalidArgument, "base_version"),
    "a prompt that replaces": (
        {"prompt": "x", "agent_id": "a", "replace_memory": True},
        errors.InvalidArgument,
        "replace_memory",
    ),
    "no tokens to make": (sampling(max_tokens=0), errors.InvalidArgument, "sampling.max_tokens"),
    "negative tokens": (sampling(max_tokens=-5), errors.InvalidArgument, "sampling.max_tokens"),
    "more than the context": (sampling(max_tokens=1 << 20), errors.ResourceExhausted, "sampling.max_tokens"),
    "cold below zero": (sampling(temperature=-0.1), errors.InvalidArgument, "sampling.temperature"),
    "absurd heat": (sampling(temperature=1e30), errors.InvalidArgument, "sampling.temperature"),
    "NaN": (sampling(temperature=NAN), errors.InvalidArgument, "sampling.temperature"),
    "infinite": (sampling(temperature=float("inf")), errors.InvalidArgument, "sampling.temperature"),
    "top_p of nothing": (sampling(top_p=0), errors.InvalidArgument, "sampling.top_p"),
    "top_p NaN": (sampling(top_p=NAN), errors.InvalidArgument, "sampling.top_p"),
    "top_k below zero": (sampling(top_k=-1), errors.InvalidArgument, "sampling.top_k"),
    "min_p above one": (sampling(min_p=1.5), errors.InvalidArgument, "sampling.min_p"),
    "seventeen stops": (sampling(stop=["x"] * 17), errors.InvalidArgument, "sampling.stop"),
    "empty stop": (sampling(stop=["a", ""]), errors.InvalidArgument, "sampling.stop[1]"),
    "long stop": (sampling(stop=["x" * 257]), errors.InvalidArgument, "sampling.stop[0]"),
    "many stop tokens": (sampling(stop_token_ids=range(65)), errors.InvalidArgument, "sampling.stop_token_ids"),
    "no penalty": (sampling(repetition_penalty=0), errors.InvalidArgument, "sampling.repetition_penalty"),
    "penalty NaN": (sampling(repetition_penalty=NAN), errors.InvalidArgument, "sampling.repetition_penalty"),
    "frequency NaN": (sampling(frequency_penalty=NAN), errors.InvalidArgument, "sampling.frequency_penalty"),
    "presence below minus two": (sampling(presence_penalty=-2.5), errors.InvalidArgument, "sampling.presence_penalty"),
    "penalty above two": (sampling(repetition_penalty=2.5), errors.InvalidArgument, "sampling.repetition_penalty"),
    "a penalty's tokens alone": (sampling(repetition_tokens=9), errors.InvalidArgument, "sampling.repetition_tokens"),
    "a penalty of no tokens": (
        sampling(repetition_penalty=1.2, repetition_tokens=0),
        errors.InvalidArgument,
        "sampling.repetition_tokens",
    ),
    "bias above a hundred": (sampling(logit_bias={7: 100.5}), errors.InvalidArgument, "sampling.logit_bias[7]"),
    "bias NaN": (sampling(logit_bias={7: NAN}), errors.InvalidArgument, "sampling.logit_bias[7]"),
    "many biases": (sampling(logit_bias=dict.fromkeys(range(301), 1.0)), errors.InvalidArgument, "sampling.logit_bias"),
    "stop of no token": (sampling(stop_token_ids=[1 << 31]), errors.InvalidArgument, "sampling.stop_token_ids"),
    "bias of no token": (sampling(logit_bias={1 << 31: 1.0}), errors.InvalidArgument, "sampling.logit_bias"),
    "drafts 65": (sampling(most_drafts=65), errors.InvalidArgument, "sampling.most_drafts"),
    "likeliest 21": (sampling(logprobs=True, top_logprobs=21), errors.InvalidArgument, "sampling.top_logprobs"),
    "likeliest -1": (sampling(logprobs=True, top_logprobs=-1), errors.InvalidArgument, "sampling.top_logprobs"),
    "likeliest alone": (sampling(top_logprobs=2), errors.InvalidArgument, "sampling.top_logprobs"),
    "no choices": (sampling(n=0), errors.InvalidArgument, "sampling.n"),
    "nine choices": (sampling(n=9), errors.InvalidArgument, "sampling.n"),
    "choices of an agent": ({**sampling(n=2), "agent_id": "a"}, errors.InvalidArgument, "sampling.n"),
    "empty schema": ({"prompt": "x", "json_schema": ""}, errors.InvalidArgument, "json_schema"),
    "large schema": ({"prompt": "x", "json_schema": " " * 65_537}, errors.InvalidArgument, "json_schema"),
    "schema that is no JSON": ({"prompt": "x", "json_schema": "{"}, errors.InvalidArgument, "json_schema"),
    "open regex": ({"prompt": "x", "regex": "(["}, errors.InvalidArgument, "regex"),
    "large regex": ({"prompt": "x", "regex": "a" * 16_385}, errors.InvalidArgument, "regex"),
    "tools with a prompt": ({"prompt": "x", "tools": [pb.Tool(name="t")]}, errors.InvalidArgument, "tools"),
    "tool without a name": (
        {"messages": messages(USER), "tools": [pb.Tool()]},
        errors.InvalidArgument,
        "tools[0].name",
    ),
    "tools of a megabyte": (
        {"messages": messages(USER), "tools": [pb.Tool(name="t", description="x" * (1 << 20))]},
        errors.InvalidArgument,
        "tools",
    ),
    "schema that is none": (
        {"messages": messages(USER), "tools": [pb.Tool(name="t", parameters_json="[1]")]},
        errors.InvalidArgument,
        "tools[0].parameters_json",
    ),
    "longer than the context": ({"prompt": "word " * 100_000}, errors.ResourceExhausted, "prompt"),
    "over the size limit": ({"prompt": "x" * (9 << 20)}, errors.InvalidArgument, "prompt"),
}


@pytest.fixture(scope="module")
def stub(house: House) -> Iterator[Any]:
    """Sends requests as they are, past the client's own checks."""
    with grpc.insecure_channel(house.engine.address, [("grpc.max_send_message_length", -1)]) as channel:
        grpc.channel_ready_future(channel).result(60)
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def refusal(stub: Any, request: pb.GenerateRequest) -> tuple[errors.KvasirError, float]:
    """The error of a request, and how long it took on the wire."""
    began = time.monotonic()
    try:
        list(stub.Generate(request, timeout=30))
    except grpc.RpcError as error:
        return from_rpc_error(error), time.monotonic() - began
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_at_once_with_the_field_named(name: str, stub: Any) -> None:
    fields, kind, field = BAD[name]
    request = pb.GenerateRequest(**fields)
    took_s = []
    for _ in range(20):  # on busy cores, the best of some tries says what the service takes
        error, seconds = refusal(stub, request)
        took_s.append(seconds)
        assert (type(error), error.field) == (kind, field), error
        assert field in error.message
        if seconds < REFUSED_WITHIN_S:
            break
    assert min(took_s) < REFUSED_WITHIN_S


def test_a_prompt_of_100_megabytes_is_refused_unread_with_numbers(stub: Any) -> None:
    error, _ = refusal(stub, pb.GenerateRequest(prompt="x" * 100_000_000))
    assert isinstance(error, errors.ResourceExhausted)
    assert "100000" in error.message


def test_text_that_is_no_utf8_is_refused_and_the_service_goes_on(house: House, client: InferenceClient) -> None:
    broken = b"\x2a\x04ab\xff\xfe"  # field 5, prompt, 4 bytes
    with grpc.insecure_channel(house.engine.address) as channel:
        call = channel.unary_stream("/kvasir.inference.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(broken, timeout=60))
    error = from_rpc_error(refused.value)
    assert (type(error), error.field) == (errors.InvalidArgument, "request")
    assert client.reply(prompt="hello", sampling={"max_tokens": 1}).finished.usage.completion_tokens == 1


def test_the_client_names_what_it_cannot_send(client: InferenceClient) -> None:
    with pytest.raises(errors.InvalidArgument):
        client.reply(prompt="x", sampling={"max_tokens": 1 << 40})
    with pytest.raises(errors.InvalidArgument):
        client.reply(prompt="\ud800")
    with pytest.raises(errors.InvalidArgument) as both:
        client.reply(prompt="x", messages=[])
    assert both.value.field == "input"


def test_a_text_that_cannot_fit_is_refused_and_not_counted(client: InferenceClient) -> None:
    """To count eight million letters takes longer than a caller waits."""
    text = "a" * (8 << 20)
    with pytest.raises(errors.ResourceExhausted) as refused:
        client.count_tokens(prompt=text)
    assert (refused.value.reason, refused.value.field) == ("CONTEXT_EXCEEDED", "prompt")
    with pytest.raises(errors.ResourceExhausted) as refused:
        client.count_tokens(messages=[{"role": "user", "content": text[: 7 << 20]}])
    assert (refused.value.reason, refused.value.field) == ("CONTEXT_EXCEEDED", "messages")


def test_a_parent_that_is_not_the_newest_version_is_a_conflict(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    client.reply(agent_id=agent, prompt="hello there", sampling={"max_tokens": 2})
    with pytest.raises(errors.Conflict) as conflict:
        client.reply(agent_id=agent, prompt="hello again", expected_version=0)
    assert conflict.value.metadata["head_version"] == "1"


def test_no_word_of_any_prompt_is_logged(house: House, client: InferenceClient, new_agent: Callable[[], str]) -> None:
    secret = "xyzzy-plugh-42"
    client.reply(agent_id=new_agent(), messages=[{"role": "user", "content": secret}], sampling={"max_tokens": 4})
    with pytest.raises(errors.InvalidArgument):
        client.reply(prompt=secret, sampling={"temperature": 9.0})
    for service in (house.engine, house.store):
        assert secret not in service.log
