"""Calls over the wire, forced or bound once they begin or beside a format: any logits make calls that fit."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.sampling import sampled

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [pb.Tool(name=name, parameters_json=json.dumps(SCHEMA)) for name in ("weather", "tides")]
REQUIRED = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_REQUIRED, one_call=True)
NO_SCHEMA = json.dumps({"properties": {"days": {"type": "integer", "maximum": "9"}}})
CALL = 1022  # the token <tool_call>
TIDES = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="tides")
NO_CALL = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NONE)


def forced(engine: InferenceClient, seed: int, choice: pb.ToolChoice = REQUIRED, **options: Any) -> Reply:
    said = [{"role": "user", "content": f"Where is key {seed}?"}]
    sampling = {"max_tokens": 150, "temperature": 2.0, "seed": seed}
    return engine.reply(messages=said, tools=TOOLS, tool_choice=choice, sampling=sampling, **options)


@pytest.mark.long(4)
def test_any_logits_become_one_call_beside_others_as_alone(client: InferenceClient) -> None:
    seeds = range(sampled(8, of=1000))
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(lambda seed: forced(client, seed), seeds))
    for seed, reply in zip(seeds, beside, strict=True):
        (call,) = reply.finished.tool_calls
        assert (reply.text, reply.finished.reason) == ("", pb.FINISH_REASON_TOOL_CALLS)
        assert call.name in ("weather", "tides")
        jsonschema_rs.validate(SCHEMA, json.loads(call.arguments_json))
        if seed % 4 == 0:
            assert forced(client, seed).choices[0].token_ids == reply.choices[0].token_ids


def test_a_named_tool_is_the_one_called_and_the_agent_goes_on_from_it(client: InferenceClient) -> None:
    reply = forced(client, 1, TIDES, agent_id="sailor")
    (call,) = reply.finished.tool_calls
    assert call.name == "tides"
    used = reply.finished.usage
    result = [{"role": "tool", "tool_call_id": call.id, "content": "high"}]
    after = client.reply(
        append_messages=result,
        agent_id="sailor",
        tools=TOOLS,
        tool_choice=TIDES,
        sampling={"max_tokens": 150, "seed": 2},
    )
    assert after.started.cached_tokens >= used.prompt_tokens + used.completion_tokens - 1
    assert [call.name for call in after.finished.tool_calls] == ["tides"]


def begun(engine: InferenceClient, seed: int, choice: pb.ToolChoice | None, **options: Any) -> Reply:
    """A reply whose model wants nothing so much as to begin a call."""
    sampling = {"max_tokens": 90, "temperature": 1.0, "seed": seed, "logit_bias": {CALL: 100.0}}
    said = [{"role": "user", "content": f"Where is key {seed}?"}]
    return engine.reply(messages=said, tool_choice=choice, sampling=sampling, **options)


@pytest.mark.long(3)
def test_a_call_is_bound_once_it_begins_and_is_the_last_where_only_one_may_be(client: InferenceClient) -> None:
    strict = [pb.Tool(name=tool.name, parameters_json=tool.parameters_json, strict=True) for tool in TOOLS]
    for seed in range(sampled(2, of=200)):
        (call,) = begun(client, seed, pb.ToolChoice(one_call=True), tools=strict).finished.tool_calls
        jsonschema_rs.validate(SCHEMA, json.loads(call.arguments_json))
        several = begun(client, seed, None, tools=strict)
        for call in several.finished.tool_calls:
            jsonschema_rs.validate(SCHEMA, json.loads(call.arguments_json))
        only = begun(client, seed, pb.ToolChoice(names=["tides"]), tools=strict)
        assert {call.name for call in only.finished.tool_calls} <= {"tides"}
        assert len(several.finished.tool_calls) + len(only.finished.tool_calls) > 1
        assert not begun(client, seed, None, tools=TOOLS).finished.tool_calls, "they are as the model writes them"


def test_without_calls_the_tools_stay_in_the_prompt(client: InferenceClient) -> None:
    loose = begun(client, 1, None, tools=TOOLS)
    reply = begun(client, 1, NO_CALL, tools=TOOLS)
    assert reply.started.prompt_tokens == loose.started.prompt_tokens
    assert (CALL in loose.token_ids, CALL in reply.token_ids) == (True, False)
    assert not reply.finished.tool_calls
    formatted = begun(client, 1, NO_CALL, tools=TOOLS, regex="yes|no")
    assert formatted.text in ("yes", "no")
    assert formatted.started.prompt_tokens == loose.started.prompt_tokens


@pytest.mark.long(2)
def test_beside_a_format_a_reply_is_calls_or_its_text(client: InferenceClient) -> None:
    format_: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 20]}}, "required": ["n"]}
    format_["additionalProperties"] = False
    seeds, kinds = range(sampled(8, of=1000)), set()

    def asked(seed: int) -> Reply:
        said = [{"role": "user", "content": f"Where is key {seed}?"}]
        sampling = {"max_tokens": 200, "temperature": 2.0, "seed": seed, "logit_bias": {CALL: 3.0}}
        return client.reply(messages=said, tools=TOOLS, json_schema=format_, sampling=sampling)

    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(asked, seeds))
    for seed, reply in zip(seeds, beside, strict=True):
        kinds.add(bool(reply.finished.tool_calls))
        for call in reply.finished.tool_calls:
            jsonschema_rs.validate(SCHEMA, json.loads(call.arguments_json))
            assert not reply.text.strip()
        if not reply.finished.tool_calls:
            jsonschema_rs.validate(format_, json.loads(reply.text))
        if seed % 4 == 0:
            assert asked(seed).token_ids == reply.token_ids
    assert kinds == {True, False}


def test_a_reply_beside_a_format_is_replayed_as_it_was(client: InferenceClient) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Which?"}],
        "tools": TOOLS,
        "regex": "<too(l_call|_lcall)>x</too(l_call|_lcall)>",  # the markers' letters are text here
        "sampling": {"max_tokens": 60, "logit_bias": {CALL: -100.0}},
        "agent_id": "chooser",
        "request_id": "r",
    }
    first, again = client.reply(**asked), client.reply(**asked)
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert first.text == again.text
    assert first.text.startswith("<too")
    assert not (*first.finished.tool_calls, *again.finished.tool_calls)


@pytest.mark.parametrize(
    ("choice", "options", "field"),
    [
        (pb.ToolChoice(kind=9), {}, "tool_choice.kind"),  # type: ignore[arg-type]
        (pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="moon"), {}, "tool_choice.name"),
        (pb.ToolChoice(name="tides"), {}, "tool_choice.name"),
        (pb.ToolChoice(one_call=True), {"tools": ()}, "tool_choice"),
        (pb.ToolChoice(names=["tides", "moon"]), {}, "tool_choice.names[1]"),
        (pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="tides", names=["tides"]), {}, "tool_choice.names"),
        (pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="tides", one_call=True), {}, "tool_choice.one_call"),
        (pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NONE, one_call=True), {}, "tool_choice.one_call"),
        (pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NONE, name="tides"), {}, "tool_choice.name"),
        (NO_CALL, {"tools": ()}, "tool_choice"),
        (None, {"tools": [pb.Tool(name="f g", parameters_json="{}", strict=True)]}, "tools[0]"),
        (None, {"json_schema": '{"type": "objekt"}'}, "response_format"),
        (REQUIRED, {"tools": ()}, "tool_choice"),
        (REQUIRED, {"regex": "a"}, "tool_choice"),
        (REQUIRED, {"tools": [pb.Tool(name="f g", parameters_json="{}")]}, "tools[0]"),
        (REQUIRED, {"tools": [pb.Tool(name="f", parameters_json="[")]}, "tools[0].parameters_json"),
        (REQUIRED, {"tools": [pb.Tool(name="f", parameters_json=NO_SCHEMA)]}, "tools[0]"),
    ],
)
def test_a_choice_that_cannot_be_applied_is_refused(
    client: InferenceClient, choice: pb.ToolChoice | None, options: dict[str, Any], field: str
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, **options}
    with pytest.raises(errors.InvalidArgument) as refused:
        client.reply(**asked, tool_choice=choice)
    assert refused.value.field == field


@pytest.mark.parametrize("is_other", [False, True])
def test_a_call_that_comes_back_in_another_spelling_is_not_computed_again(
    client: InferenceClient, new_agent: Callable[[], str], is_other: bool
) -> None:
    """As some clients write JSON: names in another order, no spaces. With other values it is another call."""
    agent = new_agent()
    said: list[dict[str, Any]] = [{"role": "user", "content": f"Where is the key of {agent}?"}]
    sampling, options = {"max_tokens": 150, "seed": 1}, {"agent_id": agent, "tools": TOOLS, "tool_choice": TIDES}
    for turn in range(2):
        reply = client.reply(messages=said, sampling=sampling, **options)
        (call,) = reply.finished.tool_calls
        arguments = {"days": 99} if is_other else dict(reversed(json.loads(call.arguments_json).items()))
        spelled = json.dumps(arguments, separators=(",", ":"))
        again = {"id": call.id, "name": call.name, "arguments_json": spelled}
        said.append({"role": "assistant", "content": "", "tool_calls": [again]})
        said.append({"role": "tool", "tool_call_id": call.id, "content": f"high {turn}"})
        known = reply.finished.usage.prompt_tokens + reply.finished.usage.completion_tokens - 1
        after = client.reply(messages=said, sampling=sampling, memory_mode=pb.MEMORY_MODE_READ_ONLY, **options)
        assert (after.started.cached_tokens >= known) is not is_other
