"""Calls where the model decides: bound by strict tools, one at most, of some tools, or beside a reply format."""

import json
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import jsonschema_rs
import pytest
from kvasir.errors import FailedPrecondition
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway.engine import _taken_instead
from kvasir_gateway.turn import NO_CALLS, Turn

from tests.gateway.conftest import Front
from tests.gateway.dialects.test_forced_tool_choice import HELLO, NAMES, post
from tests.gateway.serving import MODEL
from tests.made_models.sampling import first_and_in_turn

CHAT = "/v1/chat/completions"
CALLS, NONE = {"logit_bias": {"1022": 100}}, {"logit_bias": {"1022": -100}}  # the token <tool_call>
_INPUT = ("input_tokens", "cache_read_input_tokens")
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def tools(*, strict: bool | None = True) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in NAMES.items()
    ]


def chat(front: Front, **body: Any) -> dict[str, Any]:
    message: dict[str, Any] = post(front, CHAT, {"messages": HELLO, "max_tokens": 80, **body})["choices"][0]["message"]
    return message


def check(message: dict[str, Any]) -> list[str]:
    """The names of the calls, whose arguments fit."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    for call in calls:
        jsonschema_rs.validate(NAMES[call["name"]], json.loads(call["arguments"]))
    return [call["name"] for call in calls]


@pytest.mark.long(4)
def test_a_strict_tools_call_is_bound_and_text_without_calls_is_the_models_own(front: Front) -> None:
    assert len(check(chat(front, tools=tools(), parallel_tool_calls=False, **CALLS))) == 1
    assert check(chat(front, tools=tools(), **CALLS))
    free = chat(front, tools=tools(strict=None), **NONE)
    assert chat(front, tools=tools(), **NONE)["content"] == free["content"]


@pytest.mark.parametrize("mode", first_and_in_turn(["auto", "required"], seconds=2))
def test_only_allowed_tools_are_called(front: Front, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "lamp"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"tools": tools(), "tool_choice": choice, "parallel_tool_calls": False}
    assert check(chat(front, **body, **CALLS)) == ["lamp"]
    functions = [{"type": "function", "name": name, "parameters": schema} for name, schema in NAMES.items()]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lamp"}]}
    told = post(front, "/v1/responses", {"input": "Hello.", "tools": functions, "tool_choice": choice})
    assert {each["name"] for each in told["output"] if each["type"] == "function_call"} == {"lamp"}


def test_tools_that_may_not_be_called_stay_in_the_prompt(front: Front) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "tools": tools(strict=None)}
    first = post(front, CHAT, {**body, **NONE})
    body["messages"] = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "No calls now."}]
    second = post(front, CHAT, {**body, "tool_choice": "none", **CALLS})
    assert not second["choices"][0]["message"].get("tool_calls")
    assert "<tool_call>" not in second["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    functions = [{"type": "function", "name": name, "parameters": schema} for name, schema in NAMES.items()]
    offered = [{"name": name, "input_schema": schema} for name, schema in NAMES.items()]
    for path, given, none in (
        ("/v1/responses", {"input": HELLO, "tools": functions}, "none"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 8, "tools": offered}, {"type": "none"}),
    ):
        free, without = (post(front, path, {**given, **choice}) for choice in ({}, {"tool_choice": none}))
        sizes = [sum(each["usage"].get(name, 0) for name in _INPUT) for each in (free, without)]
        assert sizes[0] == sizes[1] > 50, path


@pytest.mark.parametrize("reason", ["NO_FORCED_CALLS", "NO_RESPONSE_FORMATS"])
def test_a_model_whose_calls_no_grammar_describes_is_not_given_tools_that_it_may_not_call(reason: str) -> None:
    turn = Turn(model=MODEL, tools=(pb.Tool(name="f"),), tool_choice=NO_CALLS)
    refusal = FailedPrecondition.of("tools", "no grammar", reason=reason)
    assert _taken_instead(turn, refusal) == replace(turn, tools=(), tool_choice=None)
    with pytest.raises(FailedPrecondition):
        _taken_instead(replace(turn, tool_choice=None), refusal)


def test_a_reply_beside_a_format_is_its_text_or_calls(front: Front) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    text = chat(front, tools=tools(), response_format=asked, **NONE)
    jsonschema_rs.validate(COLOUR, json.loads(text["content"]))
    assert check(chat(front, tools=tools(), response_format=asked, **CALLS))
    alone = chat(front, tools=tools(), response_format=asked, tool_choice="none", **CALLS)
    jsonschema_rs.validate(COLOUR, json.loads(alone["content"]))
    forced = chat(front, tools=tools(), response_format=asked, tool_choice="required", **NONE)
    assert check(forced)


def test_the_other_apis_take_tools_beside_a_format(front: Front) -> None:
    functions = [{"type": "function", "name": name, "parameters": schema} for name, schema in NAMES.items()]
    asked = {
        "input": "Which colour?",
        "tools": functions,
        "text": {"format": {"type": "json_schema", "schema": COLOUR}},
    }
    asked["text"]["format"]["name"] = "colour"
    output = post(front, "/v1/responses", asked)["output"]
    texts = [part["text"] for each in output if each["type"] == "message" for part in each["content"]]
    for text in texts:
        jsonschema_rs.validate(COLOUR, json.loads(text))
    for call in [each for each in output if each["type"] == "function_call"]:
        jsonschema_rs.validate(NAMES[call["name"]], json.loads(call["arguments"]))
    offered = [{"name": name, "input_schema": schema} for name, schema in NAMES.items()]
    body = {"messages": HELLO, "max_tokens": 80, "tools": offered}
    body["output_config"] = {"format": {"type": "json_schema", "schema": COLOUR}}
    for block in post(front, "/v1/messages", body)["content"]:
        if block["type"] == "text":
            jsonschema_rs.validate(COLOUR, json.loads(block["text"]))
        else:
            jsonschema_rs.validate(NAMES[block["name"]], block["input"])


def test_a_strict_schema_that_no_grammar_can_hold_is_a_wish_and_a_strict_gateway_refuses_it(
    front: Front, strict: Front
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)"}}}
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "tools": offered}
    answer = httpx.post(front.gateway.url + CHAT, json=body, headers=front.bearer(), timeout=60)
    assert (answer.status_code, answer.headers["x-kvasir-ignored"]) == (200, "tools.strict")
    refused = httpx.post(strict.gateway.url + CHAT, json=body, headers=strict.bearer(), timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("tools")
