"""Replies that a client has begun: each API answers with the rest, and the conversation has one hot memory."""

from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL

BEGUN = "Well, your name"


def post(front: Front, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{front.gateway.url}{path}", json={"model": MODEL, **body}, headers=front.bearer(), timeout=60)


def chat(front: Front, messages: list[Any], **more: Any) -> tuple[str, int, str]:
    if messages[-1]["role"] == "assistant":
        more["continue_final_message"] = True
    answer = post(front, "/v1/chat/completions", messages=messages, max_tokens=24, **more)
    told = answer.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["message"]["content"], cached, answer.headers["x-agent-id"]


def anthropic(front: Front, messages: list[Any]) -> tuple[str, int, str]:
    answer = post(front, "/v1/messages", messages=messages, max_tokens=24)
    told = answer.json()
    return told["content"][0]["text"], told["usage"]["cache_read_input_tokens"], answer.headers["x-agent-id"]


def ollama(front: Front, messages: list[Any]) -> tuple[str, int, str]:
    answer = post(front, "/api/chat", messages=messages, stream=False, options={"num_predict": 24})
    return answer.json()["message"]["content"], -1, answer.headers["x-agent-id"]


@pytest.mark.parametrize("ask", [chat, anthropic, ollama])
def test_the_answer_is_the_rest_and_the_next_turn_extends_the_one_memory(front: Front, ask: Any) -> None:
    asked = [{"role": "user", "content": f"By {ask.__name__}. My name is Anna. What is my name?"}]
    rest, first, agent = ask(front, [*asked, {"role": "assistant", "content": BEGUN}])
    assert rest
    assert not rest.startswith("Well")
    history = [*asked, {"role": "assistant", "content": BEGUN + rest}, {"role": "user", "content": "Thank you."}]
    _, cached, same = ask(front, history)
    assert same == agent
    assert cached == -1 or cached > first + 20


def test_a_count_of_tokens_counts_what_is_begun(front: Front) -> None:
    asked = [{"role": "user", "content": "What is it?"}]
    counts = [
        post(front, "/v1/messages/count_tokens", messages=[*asked, *more]).json()["input_tokens"]
        for more in ([], [{"role": "assistant", "content": BEGUN}])
    ]
    assert counts[0] < counts[1]
    used = post(front, "/v1/messages", messages=[*asked, {"role": "assistant", "content": BEGUN}], max_tokens=1)
    assert used.json()["usage"]["input_tokens"] == counts[1]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "continue_final_message": True}, ""),
        ("/v1/agents/a/generate", {"prompt": "?", "continue_final_message": True}, "continue_final_message"),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": "It"}], "max_tokens": 4}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": []}]}, ""),
    ],
)
def test_what_cannot_go_on_is_refused(front: Front, path: str, body: dict[str, Any], field: str) -> None:
    answer = post(front, path, **({} if "prompt" in body else {"max_tokens": 4}) | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field or "messages")
