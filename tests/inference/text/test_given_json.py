"""JSON of a request: bounded before it is parsed, parsed once, refused with its field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.clients import message
from kvasir.common.v1 import message_pb2
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.edge.messages import turn_request
from inference_svc.text import given_json
from inference_svc.text.conversation import dialogue, render
from inference_svc.text.given_json import MAX_BYTES, MAX_DEPTH, MAX_VALUES, GivenJson, is_bounded
from inference_svc.text.literal_text import Specials
from inference_svc.text.replies.reply_parts import tool_calls

HALF = '{"a": "\\ud800"}'  # half of a surrogate pair: JSON can spell it, UTF-8 cannot


def nested(levels: int) -> str:
    return '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


def refused_field(objects: GivenJson) -> str:
    try:
        objects.check_size()
        objects.read()
    except InvalidArgument as refused:
        return str(refused.field)
    raise AssertionError("it was taken")


@pytest.mark.parametrize(
    "text",
    [
        *("[1]", "null", "{", "{'a': 1}", '{"a": 1} {', HALF, '{"\\udfff": 1}', '{"a": ' + "9" * 5000 + "}"),
        *("x" * (MAX_BYTES + 1), "[" * 5000, nested(MAX_DEPTH + 1), '{"a": [' + "0," * MAX_VALUES + "0]}"),
    ],
)
def test_what_is_no_bounded_object_is_refused_with_its_place(text: str) -> None:
    assert refused_field(GivenJson([("good", '{"a": 1}'), ("none", ""), ("bad", text)])) == "bad"


def test_the_bounds_are_of_all_fields_together() -> None:
    half = json.dumps({"a": "x" * (MAX_BYTES // 2)})
    assert refused_field(GivenJson([("first", half), ("second", half)])) == "second"
    many = json.dumps({"a": [0] * (MAX_VALUES - 10)})
    assert refused_field(GivenJson([("first", many), ("second", many)])) == "second"
    assert refused_field(GivenJson([("first", half)]).also([("remembered", half)])) in ("first", "remembered")


def test_text_in_strings_is_neither_depth_nor_values() -> None:
    rows = "\n".join('a,"b",{[' for _ in range(MAX_VALUES))
    objects = GivenJson([("x", json.dumps({"rows": rows})), ("y", nested(MAX_DEPTH))])
    objects.check_size()
    objects.read()
    assert objects.object(json.dumps({"rows": rows})) == {"rows": rows}


def test_nothing_is_parsed_that_is_too_long_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(given_json.json, "loads", lambda text: parsed.append(text) or loads(text))
    refused_field(GivenJson([("x", json.dumps({"a": "x" * MAX_BYTES}))]))
    refused_field(GivenJson([("x", nested(MAX_DEPTH + 1))]))
    assert parsed == []
    objects = GivenJson([("x", '{"a": 1}'), ("y", '{"a": 1}')])
    objects.read()
    more = objects.also([("z", '{"b": 2}')])
    more.read()
    objects.read()
    assert parsed == ['{"a": 1}', '{"b": 2}']


def test_a_call_that_a_model_wrote_is_parsed_only_if_it_is_bounded() -> None:
    parsed: list[str] = []
    assert not is_bounded(nested(MAX_DEPTH + 1))
    assert tool_calls(nested(MAX_DEPTH + 1), parsed.append, "", 0) == []
    assert parsed == []
    assert [call.name for call in tool_calls('{"name": "n"}', json.loads, "", 0)] == ["n"]


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
hostile = st.one_of(
    st.text(max_size=30),
    values.map(json.dumps),
    st.dictionaries(st.text(max_size=3), values, max_size=3).map(json.dumps),
    st.text('[]{}",:\\u0d8e1 ', max_size=60),
    st.integers(0, 3 * MAX_DEPTH).map(nested),
    st.sampled_from([HALF, "[" * 100_000, '{"a":' * 100_000, '"' * 1001, "9" * 5000, "{" + " " * MAX_BYTES + "}"]),
)


@given(hostile, hostile, hostile, st.text(max_size=4), st.booleans())
def test_hostile_json_is_refused_with_its_field_or_rendered(
    first: str, second: str, parameters: str, name: str, is_append: bool
) -> None:
    calls = [message_pb2.ToolCall(name=name, arguments_json=each) for each in (first, second)]
    given_messages = pb.MessageList(messages=[message("assistant", name, tool_calls=calls)])
    request = pb.GenerateRequest(
        agent_id="a",
        tools=[pb.Tool(name=name, parameters_json=parameters)],
        **{"append_messages" if is_append else "messages": given_messages},
    )
    try:
        checked = turn_request(
            request,
            namespace="n",
            caller="c",
            max_prompt_bytes=8 << 20,
            new_request_id=lambda: "r",
            new_seed=lambda: 0,
        )
        checked.prompt.objects.read()
    except InvalidArgument as refused:
        kind = "append_messages" if is_append else "messages"
        assert refused.field in {  # noqa: PT017
            "tools[0].name",
            "tools[0].parameters_json",
            "tools",
            *(f"{kind}.messages[0].tool_calls[{number}].arguments_json" for number in (0, 1)),
        }
        return
    told = dialogue(checked.input.messages, checked.prompt.tools, checked.prompt.objects, Specials(["<s>"]))  # type: ignore[union-attr]
    render(lambda messages, tools, _: json.dumps([messages, tools], ensure_ascii=False), told)
