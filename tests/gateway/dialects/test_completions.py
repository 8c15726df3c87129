"""OpenAI's completions: prompts of text or token ids, the tokens of prompt and reply, and log probabilities."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL

TEXT = "My name is Anna. My dog is called Rex. " * 6
ON = {"max_tokens": 8, "logit_bias": {"2": -100}}


def post(front: Front, path: str = "completions", agent: str = "", **body: Any) -> httpx.Response:
    headers = front.bearer() | ({"x-agent-id": agent} if agent else {})
    return httpx.post(f"{front.gateway.url}/v1/{path}", json={"model": MODEL, **body}, headers=headers, timeout=60)


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_token_ids_are_the_prompt_that_their_text_is_and_come_back_where_they_are_requested(front: Front) -> None:
    [by_text] = post(front, prompt=TEXT, return_token_ids=True, **ON).json()["choices"]
    ids = by_text["prompt_token_ids"]
    for prompt in (ids, [ids]):
        [by_ids] = post(front, prompt=prompt, return_token_ids=True, **ON).json()["choices"]
        assert by_ids == by_text
    assert len(by_text["token_ids"]) == ON["max_tokens"]
    [plain] = post(front, prompt=ids, **ON).json()["choices"]
    assert plain.keys().isdisjoint({"token_ids", "prompt_token_ids"})
    parts = [each["choices"][0] for each in chunks(post(front, prompt=ids, return_token_ids=True, stream=True, **ON))]
    assert parts[0]["prompt_token_ids"] == ids
    assert [token for part in parts for token in part.get("token_ids", ())] == by_text["token_ids"]


def test_a_named_agents_memory_goes_on_by_token_ids(front: Front) -> None:
    [first] = post(front, agent="by ids", prompt=TEXT, return_token_ids=True, **ON).json()["choices"]
    longer = [*first["prompt_token_ids"], *first["token_ids"], 77, 78]
    used = post(front, agent="by ids", prompt=longer, **ON).json()["usage"]
    assert used["prompt_tokens"] == len(longer)
    assert used["prompt_tokens_details"]["cached_tokens"] >= len(longer) - 3


def test_chat_completions_tell_their_tokens_too(front: Front) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "return_token_ids": True, "max_tokens": 6}
    whole = post(front, "chat/completions", **body).json()
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"]
    parts = chunks(post(front, "chat/completions", stream=True, **body))
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [token for part in parts for token in part["choices"][0].get("token_ids", ())]
    assert streamed == whole["choices"][0]["token_ids"]


def test_log_probabilities_have_the_form_of_completions(front: Front) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": TEXT, "logprobs": 2, **ON}
    client = front.openai()
    [choice] = client.completions.create(**asked).choices
    told = choice.logprobs
    assert told is not None
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == [len("".join(told.tokens[:number])) for number in range(len(told.tokens))]
    for value, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert len(top) == 2
        assert value <= max(top.values())
    stream = front.openai(is_strict=False).completions.create(stream=True, **asked)  # their types know no chunks
    streamed = [chunk.choices[0].logprobs for chunk in stream]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in streamed if part for each in getattr(part, name)] == getattr(told, name)


@pytest.mark.parametrize("prompt", [[], "", [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [-1], [1 << 32], 5, None])
def test_a_prompt_that_is_none_or_several_is_refused_by_name(front: Front, prompt: Any) -> None:
    answer = post(front, prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")


def test_a_token_that_the_model_does_not_have_is_refused(front: Front) -> None:
    answer = post(front, prompt=[1, 1 << 20])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
