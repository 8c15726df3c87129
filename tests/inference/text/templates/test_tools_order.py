"""Tools in another order, or with the keys of their JSON in another order, are put as they were; others are not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.conversation import Tool, json_of_tools
from inference_svc.text.given_json import GivenJson
from inference_svc.text.templates.tools_order import in_order, order_of

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
KEYS = st.text(max_size=3)
VALUES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=4))
TOOLS = st.lists(
    st.builds(
        Tool,
        st.sampled_from(["look", "find", "write"]),
        st.sampled_from(["", "It looks."]),
        st.dictionaries(KEYS, VALUES, max_size=4).map(lambda value: json.dumps(value)),
    ),
    min_size=1,
    max_size=5,
)


def parsed(tools: list[Tool]) -> GivenJson:
    objects = GivenJson(json_of_tools(tools))
    objects.read()
    return objects


def as_rendered(tools: Any, objects: GivenJson) -> list[str]:
    """What a template may print of tools: everything, in its order."""
    return [json.dumps([each.name, each.description, objects.object(each.parameters_json)]) for each in tools]


def shuffled(data: st.DataObject, value: Any) -> Any:
    if isinstance(value, list):
        return [shuffled(data, each) for each in value]
    if isinstance(value, dict):
        return {key: shuffled(data, value[key]) for key in data.draw(st.permutations(list(value)))}
    return value


@pytest.mark.long(3)
@given(TOOLS, st.data())
def test_the_same_tools_in_any_order_are_rendered_as_they_were(tools: list[Tool], data: st.DataObject) -> None:
    before = parsed(tools)
    order = order_of(tools, before)
    assert order is not None
    others = [
        Tool(each.name, each.description, json.dumps(shuffled(data, json.loads(each.parameters_json)), indent=1))
        for each in data.draw(st.permutations(tools))
    ]
    found = in_order(others, parsed(others), order)
    assert found is not None
    assert as_rendered(*found) == as_rendered(tools, before)
    assert order_of(*found) == order


@pytest.mark.long(3)
@given(TOOLS, TOOLS)
def test_other_tools_stay_as_they_are(tools: list[Tool], others: list[Tool]) -> None:
    order = order_of(tools, parsed(tools))
    assert order is not None
    known, given = ([json.dumps([t.name, t.description, json.loads(t.parameters_json)], sort_keys=True) for t in some]
                    for some in (tools, others))  # fmt: skip
    assert (in_order(others, parsed(others), order) is None) == (sorted(known) != sorted(given))


NESTED = Tool("look", "", '{"b": {"y": 1, "x": [{"d": 1, "c": 2}]}, "a": 2}')
FEW = st.sampled_from(
    [[NESTED], [NESTED, Tool("find", "It looks.", "{}")], [Tool("write", "", '{"b": 1, "a": {}}')] * 2]
)


@given(FEW, st.lists(st.integers(0, 2) | st.integers(0, 1 << 31), max_size=12))
def test_an_order_that_cannot_be_is_none(tools: list[Tool], places: list[int]) -> None:
    objects = parsed(tools)
    order = order_of(tools, objects)
    assert order is not None
    forged = manifest_pb2.ToolsOrder(set_hash=order.set_hash, places=places)
    if (found := in_order(tools, objects, forged)) is not None:
        assert order_of(found[0], found[1]) == manifest_pb2.ToolsOrder(
            set_hash=order.set_hash, places=places[: len(order.places)]
        )


def test_no_tools_have_no_order_and_numbers_that_print_differently_are_others() -> None:
    assert order_of([], GivenJson()) is None
    one, other = [Tool("t", "", '{"most": 1}')], [Tool("t", "", '{"most": 1.0}')]
    order = order_of(one, parsed(one))
    assert order is not None
    assert in_order(other, parsed(other), order) is None
