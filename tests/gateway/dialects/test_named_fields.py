"""What the engine refuses is named as the caller's own API names it, where the caller wrote it."""

import json
import re
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from kvasir_gateway.anthropic_messages import MessagesRequest
from kvasir_gateway.errors import api_of, malformed
from kvasir_gateway.openai.chat import ChatRequest
from kvasir_gateway.openai.completions import CompletionRequest
from kvasir_gateway.openai.responses import ResponsesRequest
from kvasir_gateway.openapi import document
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import Body
from pydantic import BaseModel, ValidationError

from tests.gateway.conftest import Front
from tests.gateway.dialects.test_tolerance import CHAT, COMPLETIONS, HELLO, LEAST, MESSAGES, RESPONSES
from tests.gateway.serving import MODEL

OLLAMA = "/api/chat"
NONE = {"type": "object", "properties": {"a": {"type": "nothing"}}}
CUT = '{"place": "Os'
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": CUT}}]}
ITEMS: list[Any] = [
    *({"role": "user", "content": "Look."}, {"type": "reasoning", "content": []}),
    *(
        {"type": "function_call", "call_id": name, "name": "look", "arguments": text}
        for name, text in zip("ab", ("{}", CUT), strict=True)
    ),
]


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHAT, {"messages": [*HELLO, CALLED, *HELLO]}, "messages[1].tool_calls[0].function.arguments"),
        (CHAT, {"stop": ["", "a"]}, "stop[0]"),
        (CHAT, {"repetition_penalty": 3}, "repetition_penalty"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NONE}}},
            "response_format.json_schema.schema",
        ),
        (COMPLETIONS, {"prompt": [99_999_999]}, "prompt"),
        (RESPONSES, {"instructions": "Be brief.", "input": ITEMS}, "input[3].arguments"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": NONE}}}, "text.format.schema"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": NONE}}},
            "output_config.format.schema",
        ),
        (OLLAMA, {"options": {"stop": [""]}}, "options.stop[0]"),
        (OLLAMA, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        (OLLAMA, {"format": NONE}, "format"),
    ],
)
def test_an_engines_refusal_names_the_field_that_the_caller_wrote(
    front: Front, path: str, change: dict[str, Any], field: str
) -> None:
    body = {**LEAST.get(path, {"model": MODEL, "messages": HELLO}), **change}
    answer = httpx.post(front.gateway.url + path, json=body, headers=front.bearer(), timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error if path == OLLAMA else error["message"]).startswith(f"{field}: "), error
    if path in (CHAT, COMPLETIONS, RESPONSES):
        assert error["param"] == field
    assert CUT not in front.gateway.log + front.house.engine.log


# By these words Claude Code, opencode, pi, OpenClaw and Roo Code know that they must compact their history.
FULL = (
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    r"maximum context length is \d+ tokens",
    r"(?i)this model's maximum context",
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA])
def test_agents_know_by_a_refusals_words_that_their_history_is_too_long(front: Front, path: str) -> None:
    said = [{"role": "user", "content": "word " * 20_000}]
    body = {**LEAST.get(path, {"model": MODEL}), "messages": said, "input": said, "prompt": said[0]["content"]}
    body = {name: value for name, value in body.items() if name in LEAST.get(path, {"model": 0, "messages": 0})}
    answer = httpx.post(front.gateway.url + path, json=body, headers=front.bearer(), timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, "retry-after" in answer.headers) == (400, False)
    text = error if path == OLLAMA else error["message"]
    assert all(re.search(words, text) for words in FULL), text
    if path not in (MESSAGES, OLLAMA):
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA])
def test_a_prompt_that_no_memory_holds_is_not_tried_again(path: str) -> None:
    numbers = {"needed_bytes": "9", "budget_bytes": "5"}
    text = "KV memory: the turn's KV may need 9 bytes; the engine has 5"
    error = ResourceExhausted(text, reason="MEMORY_EXCEEDED", retry_after_s=1.0, metadata=numbers)
    refusal = api_of(path).shape(error, "r")
    assert (refusal.status, "retry-after" in refusal.headers) == (400, False)
    assert f"{text}: prompt is too long" in json.dumps(refusal.body)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA])
def test_an_engine_that_is_away_is_tried_again_when_it_may_be_back(path: str) -> None:
    """An SDK that is given no time gives up before a killed engine has started again."""
    of_grpc = "cannot connect to unix:/home/ada/x.sock: Connection refused"
    refusal = api_of(path).shape(Unavailable(f"{of_grpc} (agent 'ada': version 3 is kept)"), "r")
    assert refusal.headers["retry-after"] == "5"
    said = json.dumps(refusal.body)
    assert "the engine does not answer: it may be starting again (agent 'ada': version 3 is kept)" in said
    assert "/home/ada" not in said
    cut = api_of(path).shape(Unavailable("Stream removed (Socket closed) (agent 'ada': version 3 is kept)"), "r")
    assert cut.headers["retry-after"] == "5"
    assert "starting again (agent 'ada': version 3 is kept)" in json.dumps(cut.body)
    assert "Stream removed" not in json.dumps(cut.body)
    assert "retry-after" not in api_of(path).shape(Unavailable("no model", reason="MODEL_NOT_LOADED"), "r").headers


@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA])
def test_a_refusal_repeats_a_name_that_has_grpcs_words(path: str) -> None:
    refusal = api_of(path).shape(NotFound("model: 'Socket closed' is not one of 'kvasir-tiny'"), "r")
    assert "model: 'Socket closed' is not one of 'kvasir-tiny'" in json.dumps(refusal.body)


def test_an_allowed_tool_that_is_none_is_named_where_the_caller_wrote_it() -> None:
    known, unknown = ({"type": "function", "function": {"name": name}} for name in ("look", "nope"))
    listed = [{"type": "function", "name": name} for name in ("look", "nope")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [known, unknown]}}
    chat = ChatRequest.model_validate({**LEAST[CHAT], "tools": [known], "tool_choice": choice})
    flat = {"type": "allowed_tools", "mode": "auto", "tools": listed}
    response = ResponsesRequest.model_validate({**LEAST[RESPONSES], "tools": [listed[0]], "tool_choice": flat})
    for request, field in ((chat, "tool_choice.allowed_tools.tools[1]"), (response, "tool_choice.tools[1]")):
        with pytest.raises(InvalidArgument, match="expected one of the tools, got 'nope'") as refused:
            request.turn(Reading())
        assert refused.value.field == field


def test_retry_after_is_rounded_up_to_whole_seconds() -> None:
    error = ResourceExhausted("queue", reason="QUEUE_FULL", retry_after_s=2.4)
    assert api_of(CHAT).shape(error, "r").headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("path", "kind", "field"),
    [
        (MESSAGES, MessagesRequest, "stop"),
        (CHAT, ChatRequest, "json_schema"),
        (RESPONSES, ResponsesRequest, "max_tokens"),
    ],
)
def test_a_field_that_an_api_lacks_is_refused_by_the_name_that_the_caller_wrote(
    path: str, kind: type[Body], field: str
) -> None:
    """The engine has a field of that name, which the API has under another one."""
    with pytest.raises(InvalidArgument) as refused:
        Reading(is_strict=True).check(kind.model_validate({**LEAST[path], field: ["x"]}))
    shown = api_of(path).in_its_words(refused.value)
    assert (shown.field, shown.message.partition(":")[0]) == (field, field)


@pytest.mark.parametrize(
    ("schema", "change", "refusal"),
    [
        (ChatRequest, {"stop": list("abcdefghijklmnopq")}, "stop: .* string; or: .* at most 16 items .*, not 17"),
        (ChatRequest, {"stop": ["a", 1]}, r"stop\[1\]: .* string"),
        (ChatRequest, {"speculation": -1}, "speculation: .* 'off' or 'auto'; or: .* greater than or equal to 0"),
        (
            ChatRequest,
            {"messages": [*HELLO, {"role": "user", "content": ["x"]}]},
            r"messages\[1\]\.content\[0\]: .* object",
        ),
        (CompletionRequest, {"prompt": {}}, "prompt: .* string; or: .* array"),
    ],
)
def test_a_value_of_several_forms_is_refused_for_the_form_that_it_has(
    schema: type[BaseModel], change: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ValidationError) as found:
        schema.model_validate_json(json.dumps({"model": MODEL, "messages": HELLO, "prompt": "x", **change}))
    assert re.fullmatch(refusal, malformed(found.value).message)


def test_the_document_names_all_headers_that_a_turn_reads() -> None:
    paths = document("0")["paths"]
    names = {"x-agent-id", "x-agent-memory", "x-request-id", "x-kvasir-volatile"}
    assert {each["name"] for each in paths["/v1/messages"]["post"]["parameters"]} == names
    assert names - {each["name"] for each in paths["/v1/agents/{agent_id}/generate"]["post"]["parameters"]} == {
        "x-agent-id",
        "x-agent-memory",
    }
