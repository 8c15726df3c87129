"""How many tokens a step may try ahead: a field of every API, and counts in the answer. No reply changes by it."""

from typing import Any

import httpx2 as httpx
import pytest
from kvasir_gateway.agents import AgentTurn
from kvasir_gateway.anthropic_messages import MessagesRequest
from kvasir_gateway.ollama.turns import OllamaChat
from kvasir_gateway.openai.chat import ChatRequest
from kvasir_gateway.openai.completions import CompletionRequest
from kvasir_gateway.openai.responses import ResponsesRequest
from kvasir_gateway.reading.tolerance import Reading
from pydantic import BaseModel

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL

MESSAGES = [{"role": "user", "content": "Where is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {"the_place_that_it_was_put_in": {"enum": ["kitchen", "garden"]}},
    "required": ["the_place_that_it_was_put_in"],
    "additionalProperties": False,
}
REQUESTS: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "Where?"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 9},
    ResponsesRequest: {"input": "Where?"},
    OllamaChat: {"messages": MESSAGES},
    AgentTurn: {"messages": MESSAGES},
}
NESTED = {OllamaChat: "options", AgentTurn: "sampling"}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize(("wish", "most"), [("off", 0), ("auto", None), (7, 7), (None, None)])
def test_every_api_has_the_field(kind: type[BaseModel], wish: Any, most: int | None) -> None:
    field = {"speculation": wish}
    body = {"model": MODEL, **REQUESTS[kind], **({NESTED[kind]: field} if kind in NESTED else field)}
    turn = kind.model_validate(body).turn(Reading())  # type: ignore[attr-defined]
    assert turn.sampling.get("most_drafts") == most
    assert "speculation" not in turn.sampling


def ask(front: Front, **body: Any) -> httpx.Response:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    body = {"model": MODEL, "messages": MESSAGES, "response_format": form, "max_tokens": 60, **body}
    return httpx.post(f"{front.gateway.url}/v1/chat/completions", json=body, headers=front.bearer(), timeout=60)


def test_an_answer_counts_tokens_that_were_tried_ahead(front: Front) -> None:
    plain, tried = (ask(front, speculation=wish).json() for wish in ("off", 16))
    assert tried["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    counted = tried["usage"]["completion_tokens_details"]
    assert counted["accepted_prediction_tokens"] > 5
    assert counted["rejected_prediction_tokens"] >= 0


@pytest.mark.parametrize("wish", ["fast", 65, -1, 1.5, True])
def test_other_values_are_refused_by_name(front: Front, wish: Any) -> None:
    answer = ask(front, speculation=wish)
    assert answer.status_code == 400
    assert "speculation" in answer.json()["error"]["message"]
