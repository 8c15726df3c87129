"""Forced tool calls over all three APIs: the reply is calls of the tools that were asked for, whatever was said."""

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL
from tests.made_models.sampling import first_and_in_turn

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OTHER: dict[str, Any] = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
NAMES = {"weather": SCHEMA, "lamp": OTHER}
HELLO: list[Any] = [{"role": "user", "content": "My name is Anna. What is my name?"}]
Called = list[tuple[str, Any]]


def post(front: Front, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(front.gateway.url + path, json={"model": MODEL, **body}, headers=front.bearer(), timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(front: Front, name: str | None, most: int = 80, messages: list[Any] = HELLO) -> tuple[Called, str, Any]:
    tools = [{"type": "function", "function": {"name": each, "parameters": NAMES[each]}} for each in NAMES]
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    body = {
        "messages": messages,
        "max_tokens": most,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    told = post(front, "/v1/chat/completions", body)
    message = told["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    called = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return called, told["choices"][0]["finish_reason"], told


def responses(front: Front, name: str | None, most: int = 80) -> tuple[Called, str, Any]:
    tools = [{"type": "function", "name": each, "parameters": NAMES[each]} for each in NAMES]
    choice: Any = {"type": "function", "name": name} if name else "required"
    body = {"max_output_tokens": most, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    told = post(front, "/v1/responses", {"input": HELLO[0]["content"], **body})
    calls = [
        (each["name"], json.loads(each["arguments"])) for each in told["output"] if each["type"] == "function_call"
    ]
    return calls, {"completed": "tool_calls", "incomplete": "length"}[told["status"]], told


def messages(front: Front, name: str | None, most: int = 80) -> tuple[Called, str, Any]:
    tools = [{"name": each, "input_schema": NAMES[each]} for each in NAMES]
    choice = {"type": "tool", "name": name} if name else {"type": "any", "disable_parallel_tool_use": True}
    body = {"messages": HELLO, "max_tokens": most, "tools": tools, "tool_choice": choice}
    told = post(front, "/v1/messages", body)
    calls = [(each["name"], each["input"]) for each in told["content"] if each["type"] == "tool_use"]
    return calls, {"tool_use": "tool_calls", "max_tokens": "length"}[told["stop_reason"]], told


APIS = [chat, responses, messages]
EVERY = pytest.mark.parametrize("ask", APIS)
CHOICES = [(chat, None), (responses, "weather"), (messages, "lamp")]
CHOICES += [(ask, name) for ask in APIS for name in (None, "weather", "lamp") if (ask, name) not in CHOICES]


@pytest.mark.parametrize(("ask", "name"), first_and_in_turn(CHOICES, seconds=3, first=3))
def test_a_forced_call_is_of_a_tool_requested_and_fits_its_schema(
    front: Front, ask: Callable[..., tuple[Called, str, Any]], name: str | None
) -> None:
    called, reason, told = ask(front, name)
    assert reason == "tool_calls", str(told)[:900]
    ((tool, arguments),) = called
    assert name in (None, tool)
    if tool == "lamp":
        assert list(arguments) == ["on"]
        assert isinstance(arguments["on"], bool)
    else:
        assert arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Oslo", "Rome")
        assert 1 <= arguments["days"] <= 9


@EVERY
def test_a_call_that_max_tokens_cuts_is_no_call_and_ends_by_length(
    front: Front, ask: Callable[..., tuple[Called, str, Any]]
) -> None:
    called, reason, told = ask(front, "weather", 4)
    assert (called, reason) == ([], "length"), told


def test_the_turn_behind_a_forced_call_reuses_its_memory(front: Front) -> None:
    opening = [{"role": "user", "content": "Turn on the lamp, and remember the word marigold."}]
    ((tool, arguments),), _, told = chat(front, "lamp", messages=opening)
    call = told["choices"][0]["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "it is on"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    _, _, after = chat(front, "lamp", messages=[*opening, said, result])
    first = told["usage"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"]
    assert (tool, list(arguments)) == ("lamp", ["on"])
