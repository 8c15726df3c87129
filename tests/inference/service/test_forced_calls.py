"""Forced calls over the wire: a model says calls of the tools and nothing else, beside other turns as alone."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.sampling import sampled

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
TIDES = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="tides")


def forced(engine: InferenceClient, seed: int, choice: pb.ToolChoice = REQUIRED, **options: Any) -> Reply:
    said = [{"role": "user", "content": f"Where is key {seed}?"}]
    sampling = {"max_tokens": 150, "temperature": 2.0, "seed": seed}
    return engine.reply(messages=said, tools=TOOLS, tool_choice=choice, sampling=sampling, **options)


def test_any_logits_become_one_call_beside_others_as_alone(client: InferenceClient) -> None:
    seeds = range(sampled(12, of=1000))
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


@pytest.mark.parametrize(
    ("choice", "options", "field"),
    [
        (pb.ToolChoice(kind=9), {}, "tool_choice.kind"),  # type: ignore[arg-type]
        (pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name="moon"), {}, "tool_choice.name"),
        (pb.ToolChoice(name="tides"), {}, "tool_choice.name"),
        (pb.ToolChoice(one_call=True), {}, "tool_choice.one_call"),
        (REQUIRED, {"tools": ()}, "tool_choice"),
        (REQUIRED, {"regex": "a"}, "tool_choice"),
        (REQUIRED, {"tools": [pb.Tool(name="f g", parameters_json="{}")]}, "tools[0]"),
        (REQUIRED, {"tools": [pb.Tool(name="f", parameters_json="[")]}, "tools[0].parameters_json"),
    ],
)
def test_a_choice_that_cannot_be_applied_is_refused(
    client: InferenceClient, choice: pb.ToolChoice, options: dict[str, Any], field: str
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, **options}
    with pytest.raises(errors.InvalidArgument) as refused:
        client.reply(**asked, tool_choice=choice)
    assert refused.value.field == field
