"""What clients send unasked is ignored and reported; what would change the reply's meaning is refused all the same."""

import json
import re
import time
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir import volatile
from kvasir.clients import Reply
from kvasir.common.v1.message_pb2 import ToolCall
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway.openai import response_answers as openai_response_answers
from kvasir_gateway.openai import responses as openai_responses
from kvasir_gateway.reading.tolerance import Reading, Tolerance
from kvasir_gateway.turn import Asked

from tests.gateway.conftest import Front
from tests.gateway.serving import MODEL
from tests.made_models.sampling import first_and_in_turn

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
COMPLETIONS, COUNT = "/v1/completions", "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
# Another server ran a search in it.
SEARCHED: list[Any] = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "w", "name": "web_search", "input": {"query": "ships"}},
            {"type": "web_search_tool_result", "tool_use_id": "w", "content": []},
            {"type": "mcp_tool_use", "id": "m", "name": "list", "server_name": "port", "input": {}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
            {"type": "text", "text": "Two ships."},
        ],
    },
    *HELLO,
]
# A short request of each API.
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HELLO, "max_completion_tokens": 2},
    COMPLETIONS: {"model": MODEL, "prompt": "Hello", "stop": [" ", "e"]},
    RESPONSES: {"model": MODEL, "input": "Hello.", "max_output_tokens": 2},
    MESSAGES: {"model": MODEL, "messages": HELLO, "max_tokens": 2},
    COUNT: {"model": MODEL, "messages": HELLO},
}
LONGEST = {CHAT: "max_completion_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
NUMBER = re.compile(r"\[\d+\]")
KWARGS = "chat_template_kwargs.(unnamed), chat_template_kwargs.a, chat_template_kwargs.d"
BILLING = "x-anthropic-billing-header: cc_version=2.1.{n}.abc; cc_entrypoint=cli; cch={n:05x};"


def ask(front: Front, path: str, **change: Any) -> httpx.Response:
    asked = {**LEAST[path], **change}
    return httpx.post(front.gateway.url + path, json=asked, headers=front.bearer(), timeout=60)


@pytest.mark.parametrize(
    ("path", "change", "ignored"),
    first_and_in_turn(
        [
            (CHAT, {"magic": 1, "reasoning_effort": "high", "verbosity": "low"}, "magic, reasoning_effort, verbosity"),
            (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "output_config.effort"),
            (CHAT, {"magic": None}, None),
            (COMPLETIONS, {"metadata": {}}, "metadata"),
            (RESPONSES, {"reasoning": {"summary": "auto", "context": "all"}}, "reasoning.context"),
            (COUNT, {"magic": 1}, "magic"),
            (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "magic": 1}]}, "tools[0].magic"),
            (CHAT, {"not a\nfield": 1}, "(unnamed)"),
            (CHAT, {"chat_template_kwargs": {"a": True, "b c": 1, "d": [], "e": None}}, KWARGS),
            (CHAT, {"enable_thinking": True, "thinking_budget": 9}, "enable_thinking, thinking_budget"),
            (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
            (CHAT, {"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, None),
            (CHAT, {"reasoning_effort": "a little"}, "reasoning_effort"),
            (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.effort"),
            (RESPONSES, {"reasoning": {"effort": "none"}}, None),
            (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
            (MESSAGES, {"thinking": {"type": "disabled"}}, None),
            (COUNT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
            (RESPONSES, {"tools": [{"type": "web_search", "external_web_access": False}]}, "tools[0]"),
            (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
            (RESPONSES, {"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"]}, None),
            (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
            (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
            (MESSAGES, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
            (RESPONSES, {"include": ["message.output_text.logprobs", "web_search_call.results"]}, "include"),
            (RESPONSES, {"include": ["web_search_call.results"]}, None),
            (MESSAGES, {"tools": [{"name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
            (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 5}]}, "tools[0]"),
            (RESPONSES, {"input": [{"type": "web_search_call", "id": "w"}, *HELLO]}, "input[0]"),
            (MESSAGES, {"messages": SEARCHED}, ", ".join(f"messages[1].content[{number}]" for number in range(4))),
        ],
        seconds=6,
        first=6,
    ),
)
def test_a_field_that_changes_no_meaning_is_ignored_and_reported(
    front: Front, path: str, change: dict[str, Any], ignored: str | None
) -> None:
    answer = ask(front, path, **change)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-kvasir-ignored") == ignored
    again = ask(front, path, **change)
    assert again.headers.get("x-kvasir-ignored") == ignored
    for name in (ignored or "").split(", "):
        line = f"request.ignored path={path} field={NUMBER.sub('[]', name)}\n"
        assert front.gateway.log.count(line) == bool(name), "once a field"


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.name"),
        (
            CHAT,
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.name",
        ),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"chat_template_kwargs": {f"name{number}": 1 for number in range(17)}}, "template_settings"),
        (COMPLETIONS, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (CHAT, {"frequency_penalty": 2.5}, "frequency_penalty"),
        (COMPLETIONS, {"guided_regex": "a+"}, "guided_regex"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"tools": [{"type": "mcp", "server_url": "https://a.example"}]}, "tools[0].type"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "tool"}, "tools": [{"name": "f"}]}, "tool_choice.name"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "g"}, "tools": [{"name": "f"}]}, "tool_choice.name"),
        (MESSAGES, {"mcp_servers": [{"type": "url", "url": "https://a.example"}]}, "mcp_servers"),
        (MESSAGES, {"thread": "t"}, "thread"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ],
)
def test_a_field_that_changes_the_meaning_is_refused_by_its_name(
    front: Front, path: str, change: dict[str, Any], field: str
) -> None:
    answer = ask(front, path, **change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", [*LONGEST, MESSAGES])
def test_a_max_tokens_beyond_the_context_is_what_fits(front: Front, strict: Front, path: str) -> None:
    name = LONGEST.get(path, "max_tokens")
    assert ask(front, path, **{name: 32_000}).status_code == 200
    refused = ask(strict, path, **{name: 32_000})
    assert refused.status_code == 400
    assert "32000 to generate" in refused.json()["error"]["message"]
    long = "words " * 20_000
    given: dict[str, Any] = {"messages": [{"role": "user", "content": long}]} if "messages" in LEAST[path] else {}
    given = given or ({"prompt": long} if path == COMPLETIONS else {"input": long})
    too_long = ask(front, path, **given, **{name: 32_000})
    assert too_long.status_code == 400, "a prompt that does not fit is refused"


@pytest.mark.parametrize("path", LEAST)
def test_another_models_name_gets_the_loaded_one_which_the_answer_names(front: Front, strict: Front, path: str) -> None:
    answer = ask(front, path, model="claude-9")
    assert answer.status_code == 200, answer.text
    assert path == COUNT or answer.json()["model"] == MODEL
    assert ask(strict, path, model="claude-9").status_code == 404
    streamed = path != COUNT and ask(front, path, model="claude-9", stream=True)
    assert not streamed or (streamed.status_code == 200 and MODEL in streamed.text)


def test_a_system_message_in_mid_conversation_stays_where_it_was_said(front: Front) -> None:
    talk = [
        {"role": "user", "content": "Hello there."},
        {"role": "system", "content": [{"type": "text", "text": "Be."}]},
    ]
    first = ask(front, MESSAGES, messages=talk, max_tokens=8)
    assert first.status_code == 200, first.text
    goes_on = [*talk, {"role": "assistant", "content": first.json()["content"]}, *HELLO]
    used = ask(front, MESSAGES, messages=goes_on).json()["usage"]
    before = first.json()["usage"]
    assert used["cache_read_input_tokens"] >= before["input_tokens"] + before["cache_read_input_tokens"]


@pytest.mark.parametrize("path", first_and_in_turn([MESSAGES, CHAT, RESPONSES], seconds=2))
def test_a_billing_line_that_changes_leaves_one_memory_that_goes_on(front: Front, path: str) -> None:
    system = f"You are a helper of {path}. " * 20
    said: list[Any] = [{"role": "user", "content": "My name is Anna."}]
    seen = []
    for n in range(3):
        blocks = [{"type": "text", "text": BILLING.format(n=n)}, {"type": "text", "text": system}]
        if path == MESSAGES:
            answer = ask(front, path, system=blocks, messages=said, max_tokens=8)
            reply = answer.json()["content"]
            usage = answer.json()["usage"]
            cached, prompt = usage["cache_read_input_tokens"], usage["cache_read_input_tokens"] + usage["input_tokens"]
        elif path == CHAT:
            answer = ask(front, path, messages=[{"role": "system", "content": blocks}, *said], max_tokens=8)
            reply, usage = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
            cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        else:
            answer = ask(front, path, instructions=f"{BILLING.format(n=n)}\n{system}", input=said, max_output_tokens=8)
            reply, usage = answer.json()["output"][0]["content"], answer.json()["usage"]
            cached, prompt = usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
        assert answer.headers["x-kvasir-volatile"] == "billing-line"
        seen.append((answer.headers["x-agent-id"], cached / prompt))
        said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
    assert len({agent for agent, _ in seen}) == 1
    assert min(share for _, share in seen[1:]) > 0.8


def test_without_the_rule_a_billing_line_is_prompted(strict: Front) -> None:
    texts = [ask(strict, COUNT, system=text).json()["input_tokens"] for text in (BILLING.format(n=1), "")]
    assert texts[0] > texts[1] + 20


@pytest.mark.long(11)
@given(st.text(), st.sampled_from(["user", "assistant", "tool", "system"]))
def test_no_other_text_changes(text: str, role: str) -> None:
    reading = Tolerance().reading(None)
    billing = BILLING.format(n=7)
    assert reading.content(role, ["", text]) == text
    assert "x-kvasir-volatile" not in reading.headers()
    assert reading.content(role, [f" {billing}", text, f"a {billing}"]) == f" {billing}{text}a {billing}"
    kept = "" if role == "system" else billing
    assert reading.content(role, [billing, text]) == kept + text
    line = "" if role == "system" else f"{billing}\n"
    assert reading.content(role, [f"{billing}\n{text}"]) == line + text


def test_rules_are_chosen_by_name() -> None:
    assert volatile.rules_of("none", "--volatile") == frozenset()
    assert volatile.rules_of("billing-line, tools-order", "--volatile") == {"billing-line", "tools-order"}
    with pytest.raises(InvalidArgument, match=r"--volatile: .clock. is none of billing-line, template-date, .*none"):
        volatile.rules_of("billing-line,clock", "--volatile")


def test_a_groups_functions_are_offered_flat_and_their_calls_name_the_group(front: Front) -> None:
    function = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
    group = {"type": "namespace", "name": "agents", "description": "other agents", "tools": [function]}
    request = openai_responses.ResponsesRequest.model_validate(
        {"model": MODEL, "input": "?", "tools": [{**function, "name": "plain"}, group]}
    )
    assert [tool.name for tool in request.turn(Reading()).tools] == ["plain", "agents__spawn"]

    made = [ToolCall(id=name, name=name, arguments_json="{}") for name in ("agents__spawn", "plain")]
    events = [
        pb.GenerateResponse(started=pb.Started(model=MODEL)),
        pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_TOOL_CALLS, tool_calls=made)),
    ]
    asked, reply = Asked(request_id="r", created=0, model=MODEL), Reply()
    stream = openai_response_answers.ResponseEvents(asked, request)
    for event in events:
        reply.add(event)
        frames = stream.frames(event)
    whole = openai_response_answers.whole(asked, reply, request)
    assert json.loads(frames.strip().rpartition("data: ")[2])["response"] == whole
    called = [(item.get("namespace"), item["name"]) for item in whole["output"]]
    assert called == [("agents", "spawn"), (None, "plain")]
    assert whole["tools"][1]["tools"][0]["name"] == "spawn"

    repeated = [{"role": "user", "content": "?"}, *whole["output"]]
    told = openai_responses.said(repeated, Reading())
    assert [call.name for call in told[1].tool_calls] == ["agents__spawn", "plain"]
    answer = ask(front, RESPONSES, input=repeated, tools=[group], max_output_tokens=4)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"enable_thinking": True}, "enable_thinking"),
        (CHAT, {"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
        (CHAT, {"chat_template_kwargs": {"magic": True}}, "chat_template_kwargs.magic"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (COUNT, {"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
def test_a_strict_gateway_refuses_thinking_that_the_model_cannot_apply_by_the_callers_word(
    strict: Front, path: str, change: dict[str, Any], field: str
) -> None:
    answer = ask(strict, path, **change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}: ")
    off = {CHAT: {"reasoning_effort": "none"}, RESPONSES: {"reasoning": {"effort": "none"}}}
    assert ask(strict, path, **off.get(path, {"thinking": {"type": "disabled"}})).status_code == 200


def test_two_tools_of_one_name_are_refused() -> None:
    function = {"type": "function", "name": "b__c"}
    groups = [{"type": "namespace", "name": "a", "tools": [function]}, {"type": "function", "name": "a__b__c"}]
    request = openai_responses.ResponsesRequest.model_validate({"model": MODEL, "input": "?", "tools": groups})
    with pytest.raises(InvalidArgument) as refused:
        request.turn(Reading())
    assert refused.value.field == "tools[1]"


def test_a_flood_of_fields_fills_neither_the_header_nor_the_log(front: Front) -> None:
    for number in range(3):
        answer = ask(front, CHAT, **{f"flood_{number}_{each}": each for each in range(300)})
        assert answer.status_code == 200, answer.text
        assert len(answer.headers["x-kvasir-ignored"]) < 1000
    assert front.gateway.log.count("request.ignored") <= 256


def test_more_fields_than_anybody_sends_are_refused_at_once(front: Front) -> None:
    began = time.monotonic()
    answer = ask(front, CHAT, **{f"flood_{each}": each for each in range(20_000)})
    assert answer.status_code == 400, answer.text
    assert time.monotonic() - began < 10, "each name is looked up, and not compared with all others"


@pytest.mark.parametrize("field", ["system", "regex", "stop_sequences", "enable_thinking"])
def test_a_field_that_says_what_the_reply_is_to_be_is_refused(front: Front, field: str) -> None:
    answer = ask(front, CHAT, **{field: "You answer in French."})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_schema_where_the_api_had_it_before_is_applied(front: Front) -> None:
    schema = {"type": "object", "properties": {"a": {"const": "b"}}, "required": ["a"], "additionalProperties": False}
    asked = {"output_format": {"type": "json_schema", "schema": schema}, "max_tokens": 32}
    told = ask(front, MESSAGES, **asked)
    assert json.loads(told.json()["content"][0]["text"]) == {"a": "b"}
    twice = ask(front, MESSAGES, **asked, output_config={"format": asked["output_format"]})
    assert twice.json()["error"]["message"].startswith("output_format: ")


def test_a_schema_where_another_server_has_it_is_refused(front: Front) -> None:
    answer = ask(front, CHAT, response_format={"type": "json_object", "schema": {"type": "object"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format.schema")
