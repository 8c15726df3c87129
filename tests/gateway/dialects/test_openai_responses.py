"""OpenAI's responses and completions through the openai SDK, unmodified but for base_url."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.clients import Reply
from kvasir.common.v1.message_pb2 import ToolCall
from kvasir.errors import NotFound, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway.answering import EventStream, StreamForm
from kvasir_gateway.errors import api_of, ended_by
from kvasir_gateway.openai import response_answers as openai_response_answers
from kvasir_gateway.openai import responses as openai_responses
from kvasir_gateway.turn import Asked

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL


def cached(response: Any) -> int:
    assert response.usage is not None
    return int(response.usage.input_tokens_details.cached_tokens)


@pytest.mark.parametrize("agent", ["", "ada\0", "a" * 257, "e\u0301"])
def test_an_id_of_no_agents_name_is_not_remembered(agent: str) -> None:
    """As one of which a character was lost; it was refused as a wrong agent_id, which the request has not."""
    given = "resp_0" + base64.urlsafe_b64encode(f"0\ndigest\nrequest\n{agent}".encode()).decode().rstrip("=")
    with pytest.raises(NotFound) as caught:
        openai_responses.place_of(given)
    assert (caught.value.reason, caught.value.field) == ("RESPONSE_NOT_FOUND", "previous_response_id")


@pytest.mark.long(2)
def test_a_response_goes_on_from_the_one_before_by_its_id(front: Front, openai: Any) -> None:
    client = front.openai()
    first = client.responses.create(model=MODEL, instructions="Be kind.", input="Responses: my name is Anna.")
    assert first.status == "completed"
    second = client.responses.create(
        model=MODEL, instructions="Be kind.", input="What is my name?", previous_response_id=first.id
    )
    assert "Anna" in second.output_text
    assert cached(first) == 0
    assert cached(second) > 15
    branch = client.responses.create(
        model=MODEL, instructions="Be kind.", input="My dog is called Rex.", previous_response_id=first.id
    )
    assert cached(branch) > 15
    referring: Any = [
        {"role": "user", "content": "Responses: my name is Anna."},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Anna" in client.responses.create(model=MODEL, instructions="Be kind.", input=referring).output_text
    with pytest.raises(openai.NotFoundError) as lost:
        front.openai("eve").responses.create(model=MODEL, input=referring)
    assert lost.value.param == "input[1].id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="?", previous_response_id="resp_1bm90aGluZw")
    with pytest.raises(openai.NotFoundError):
        front.openai("eve").responses.create(model=MODEL, input="?", previous_response_id=first.id)


def test_an_id_that_names_a_turn_without_messages_is_lost(front: Front, openai: Any) -> None:
    named = {"x-agent-id": "responses/plain", "x-request-id": "plain-1"}
    front.openai().completions.create(model=MODEL, prompt="Once", max_tokens=2, extra_headers=named)
    place = base64.urlsafe_b64encode(b"0\n\nplain-1\nresponses/plain").decode().rstrip("=")
    with pytest.raises(openai.NotFoundError):
        front.openai().responses.create(model=MODEL, input=[{"type": "item_reference", "id": f"msg_{place}"}])


def test_a_request_refers_to_a_bounded_number_of_items(front: Front, openai: Any) -> None:
    many: Any = [{"type": "item_reference", "id": "msg_1bm90aGluZw"}] * 257
    with pytest.raises(openai.BadRequestError, match="at most 256 items of type item_reference"):
        front.openai().responses.create(model=MODEL, input=many)


@pytest.mark.long(2)
def test_a_stream_of_events_ends_with_the_whole_response(front: Front) -> None:
    client = front.openai()
    told: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "My name is Anna. What is my name?"}]},
    ]
    with client.responses.stream(model=MODEL, input=told, max_output_tokens=24) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert "Anna" in response.output_text


@pytest.mark.parametrize("text", ["", "So it is."])
@pytest.mark.parametrize("reasoning", ["", "Hm"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_stream_has_the_items_of_a_whole_response(text: str, reasoning: str, calls: int) -> None:
    made = [ToolCall(id=f"c{number}", name="f", arguments_json="{}") for number in range(calls)]
    events = [
        pb.GenerateResponse(started=pb.Started(model=MODEL)),
        pb.GenerateResponse(prefill_progress=pb.PrefillProgress(tokens_done=1, tokens_total=2)),
        pb.GenerateResponse(delta=pb.Delta(reasoning_text=reasoning)),
        pb.GenerateResponse(delta=pb.Delta(text=text)),
        pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, tool_calls=made)),
    ]
    asked = Asked(request_id="r", created=0, model=MODEL)
    request = openai_responses.ResponsesRequest(model=MODEL, input="?")
    reply, stream = Reply(), openai_response_answers.ResponseEvents(asked, request)
    for event in events:
        reply.add(event)
        frames = stream.frames(event)
    last = json.loads(frames.strip().rpartition("data: ")[2])
    assert last["response"] == openai_response_answers.whole(asked, reply, request)


async def test_an_error_has_the_number_behind_those_of_its_streams_events() -> None:
    request = openai_responses.ResponsesRequest(model=MODEL, input="?")
    chunks = openai_response_answers.ResponseEvents(Asked(request_id="r", created=0, model=MODEL), request)
    pieces: list[str] = []

    async def ends() -> AsyncGenerator[pb.GenerateResponse, None]:
        raise Unavailable("the engine ended")
        yield pb.GenerateResponse()

    async def send(piece: Any) -> None:
        pieces.append(piece.get("body", b"").decode())

    form = StreamForm(chunks, partial(ended_by, api_of("/v1/responses"), "r"), {})
    numbers: Any = SimpleNamespace(open_streams=0, disconnects=0)
    started = pb.GenerateResponse(started=pb.Started(model=MODEL))
    stream = EventStream(started, ends(), form, lambda: None, numbers, lambda: 0.0)
    await stream({}, asyncio.Event().wait, send)  # type: ignore[arg-type]  its reader stays
    events = [json.loads(line[6:]) for line in "".join(pieces).splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "error"
    assert [each["sequence_number"] for each in events] == [0, 1, 2]


def test_a_long_prefill_sends_events_because_codex_counts_no_comments() -> None:
    request = openai_responses.ResponsesRequest(model=MODEL, input="?")
    stream = openai_response_answers.ResponseEvents(Asked(request_id="r", created=0, model=MODEL), request)
    stream.frames(pb.GenerateResponse(started=pb.Started(model=MODEL)))
    frame = stream.frames(pb.GenerateResponse(prefill_progress=pb.PrefillProgress(tokens_done=1, tokens_total=2)))
    assert frame.startswith("event: response.in_progress\n")


def test_a_function_is_called_and_its_output_read(front: Front) -> None:
    client = front.openai()
    tool: Any = {
        "type": "function",
        "name": "weather",
        "description": "the weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        "strict": False,
    }
    said: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    calling = client.responses.create(model=MODEL, input=said, tools=[tool])
    call = next(item for item in calling.output if item.type == "function_call")
    assert call.name == "weather"
    said += [item.model_dump() for item in calling.output]
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    answer = client.responses.create(model=MODEL, input=said, tools=[tool])
    assert answer.output_text
    assert cached(answer) > 0


def test_a_prompt_is_completed_whole_and_streamed(front: Front, openai: Any) -> None:
    client = front.openai()
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The market was", "max_tokens": 8}
    whole = client.completions.create(**asked)
    # OpenAI's own chunks have no finish_reason before the last, although the SDK's type wants one.
    lenient = front.openai(is_strict=False)
    chunks = list(lenient.completions.create(**asked, stream=True))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    several = client.completions.create(**asked, n=2, temperature=1.0)
    assert len(several.choices) == 2
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{**asked, "echo": True})
    assert refused.value.param == "echo"
