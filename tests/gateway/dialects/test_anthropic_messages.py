"""Anthropic's messages through the anthropic SDK, unmodified but for base_url; its types validate every answer."""

from typing import Any

import pytest

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL

TOOL: Any = {
    "name": "weather",
    "description": "the weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


@pytest.mark.long(4)
def test_two_turns_are_remembered_and_counted_apart(front: Front) -> None:
    client = front.anthropic()
    messages: list[Any] = [{"role": "user", "content": "My name is Anna."}]
    first = client.messages.create(model=MODEL, max_tokens=24, messages=messages)
    assert first.usage.cache_read_input_tokens == 0
    assert first.stop_reason == "end_turn"
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
    ]
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    with client.messages.stream(model=MODEL, max_tokens=24, messages=messages) as stream:
        told = "".join(stream.text_stream)
        second = stream.get_final_message()
    assert "Anna" in told
    assert second.content[0].type == "text"
    assert second.content[0].text == told
    cached = second.usage.cache_read_input_tokens or 0
    assert cached > 15
    assert second.usage.input_tokens + cached == counted.input_tokens


def test_all_messages_are_counted_also_those_that_a_turn_would_not_append(front: Front) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "I will remember that."},
        {"role": "user", "content": "What is my name?"},
    ]
    appending = {"x-agent-id": "counted", "x-agent-memory": "append"}
    counts = [
        client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        for client in (front.anthropic(), front.anthropic(**appending))
    ]
    assert counts[0] == counts[1]


def test_a_tool_is_called_and_its_result_read(front: Front) -> None:
    client = front.anthropic()
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "tools": [TOOL], "messages": messages}
    calling = client.messages.create(**asked)
    uses = [block for block in calling.content if block.type == "tool_use"]
    assert calling.stop_reason == "tool_use"
    assert uses[0].name == "weather"
    assert isinstance(uses[0].input, dict)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [uses[0].input]
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in calling.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "sunny"}]}
            ],
        },
    ]
    answer = client.messages.create(**asked)
    assert answer.content[0].type == "text"
    assert (answer.usage.cache_read_input_tokens or 0) > 0


def test_the_sdk_runs_tools_without_a_thread_of_the_servers(front: Front, anthropic: Any) -> None:
    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def weather(place: str) -> str:
        """the weather of a place"""
        return f"sunny in {place}"

    talk = front.anthropic().beta.messages.tool_runner(
        model=MODEL,
        max_tokens=40,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[weather],
    )
    assert [answer.stop_reason for answer in talk] == ["tool_use", "end_turn"]


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        (
            {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": " "}]},
            "BadRequestError",
            "invalid_request_error",
        ),
        ({"model": "claude-9"}, "NotFoundError", "not_found_error"),
        ({"max_tokens": 0}, "BadRequestError", "invalid_request_error"),
        ({"extra_body": {"temperature": "hot"}}, "BadRequestError", "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError", "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x:"}}]}]},
            "BadRequestError",
            "invalid_request_error",
        ),
    ],
)
def test_a_refusal_has_the_shape_of_this_api(
    strict: Front, anthropic: Any, change: dict[str, Any], error: str, kind: str
) -> None:
    asked = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello."}], **change}
    with pytest.raises(getattr(anthropic, error)) as refused:
        strict.anthropic().messages.create(**asked)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == kind
    assert refused.value.request_id
