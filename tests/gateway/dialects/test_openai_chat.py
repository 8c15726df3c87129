"""OpenAI's chat completions through the openai SDK, unmodified but for base_url; its types validate every answer."""

from typing import Any

import pytest

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL
from tests.made_models.sampling import first_and_in_turn

NAME = "My name is Anna."


def ask(client: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, **options)


def cached(answer: Any) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_conversation_of_three_turns_is_remembered_from_the_second(front: Front) -> None:
    client = front.openai()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Three turns. " + NAME}]
    known: list[int] = []
    for question in ("My dog is called Rex.", "What is my name?", ""):
        answer = ask(client, messages)
        assert answer.usage is not None
        known.append(cached(answer))
        if known[1:]:
            # All but what is new: the last question and the template's words around it.
            assert answer.usage.prompt_tokens - cached(answer) < 25
        reply = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
    assert known[0] == 0
    assert 0 < known[1] < known[2]
    assert "Anna" in str(messages[-2]["content"])


def test_a_stream_says_what_a_whole_answer_says(front: Front) -> None:
    client = front.openai()
    messages: list[dict[str, Any]] = [{"role": "user", "content": NAME + " What is my name?"}]
    whole = ask(client, messages)
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.long(2)
def test_schemas_stop_strings_and_limits_are_applied(front: Front) -> None:
    client = front.openai()
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    schema["additionalProperties"] = False
    answer = ask(
        client,
        [{"role": "user", "content": "My favourite colour is red."}],
        response_format={"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}},
    )
    assert answer.choices[0].message.content == '{"colour": "red"}'
    short = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me a story."}], max_completion_tokens=2
    )
    assert short.choices[0].finish_reason == "length"
    several = ask(client, [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello."}], n=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    told = [{"type": "text", "text": "My name is Anna. "}, {"type": "text", "text": "What is my name?"}]
    stopped = ask(client, [{"role": "user", "content": told}], stop=["Anna"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "Anna" not in str(stopped.choices[0].message.content)


def test_log_probabilities_spell_the_answer(front: Front) -> None:
    client = front.openai()
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    told: list[dict[str, Any]] = [{"role": "user", "content": "My name is Anna."}]
    answer = ask(client, told, **asked).choices[0]
    assert answer.logprobs is not None
    content = answer.logprobs.content or []
    spelled = b"".join(bytes(token.bytes or []) for token in content).decode()
    assert spelled.removesuffix("<|im_end|>") == answer.message.content
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)  # it is greedy
    chunks = client.chat.completions.create(model=MODEL, messages=told, max_tokens=24, stream=True, **asked)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts if part is not None for token in part.content or []] == content


@pytest.mark.parametrize("penalty", first_and_in_turn(["frequency_penalty", "presence_penalty"], seconds=2))
def test_penalties_are_applied(front: Front, openai: Any, penalty: str) -> None:
    client, said = front.openai(), [{"role": "user", "content": "Say the colours of the house, the door and the roof."}]
    on = {"logit_bias": dict.fromkeys(map(str, range(70, 130)), 60), "max_tokens": 10}  # it says nothing else
    chats = [client.chat.completions.create(model=MODEL, messages=said, **on, **{penalty: p}) for p in (0, 2)]
    assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
    texts = [
        client.completions.create(model=MODEL, prompt="My name is Ada and I live in", **on, **{penalty: p})
        for p in (0, 2)
    ]
    assert texts[0].choices[0].text != texts[1].choices[0].text


@pytest.mark.parametrize(
    ("change", "error", "param", "code"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "model", "model_not_found"),
        ({"temperature": 3}, "BadRequestError", "temperature", "invalid_field"),
        ({"presence_penalty": -2.5}, "BadRequestError", "presence_penalty", "invalid_field"),
        ({"tool_choice": "required"}, "BadRequestError", "tool_choice", None),
        ({"extra_body": {"magic": True}}, "BadRequestError", "magic", "unknown_parameter"),
        ({"messages": [{"role": "wizard", "content": "?"}]}, "BadRequestError", "messages[0].role", None),
        ({"messages": []}, "BadRequestError", "messages", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "BadRequestError",
            "messages[0].content[0]",
            None,
        ),
        ({"messages": [{"role": "user", "content": "words " * 20_000}]}, "BadRequestError", None, None),
    ],
)
def test_a_refusal_names_the_field(
    strict: Front, openai: Any, change: dict[str, Any], error: str, param: str | None, code: str | None
) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], **change}
    with pytest.raises(getattr(openai, error)) as refused:
        strict.openai().chat.completions.create(**asked)
    if param is not None:
        assert refused.value.param == param
    if code is not None:
        assert refused.value.code == code
