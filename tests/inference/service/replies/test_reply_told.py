"""Replies to messages, told in their parts by a running engine: calls apart from the answer."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvasir.clients import InferenceClient
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import running_house
from tools.kvasir_tiny.tools import schema

SHOP = schema("shop_price")["function"]
TOOLS = [pb.Tool(name=SHOP["name"], description=SHOP["description"], parameters_json=json.dumps(SHOP["parameters"]))]
ASKED = [{"role": "user", "content": "How much does a lamp cost?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceClient]:
    with running_house(tmp_path_factory.mktemp("tiny")) as house, house.client() as client:
        yield client


@pytest.mark.long(4)
def test_a_call_is_reported_at_the_end_and_not_as_text(tiny: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    reply = tiny.reply(agent_id=agent, messages=ASKED, tools=TOOLS, sampling={"max_tokens": 60})
    assert reply.finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert [call.name for call in reply.finished.tool_calls] == ["shop_price"]
    assert set(json.loads(reply.finished.tool_calls[0].arguments_json)) == {"item"}
    assert reply.text == ""
    result = {"role": "tool", "content": json.dumps({"price": "7 coins"})}
    after = tiny.reply(agent_id=agent, append_messages=[result], tools=TOOLS, sampling={"max_tokens": 30})
    assert after.started.cached_tokens == reply.started.prompt_tokens + reply.finished.usage.completion_tokens - 1
    assert after.finished.reason == pb.FINISH_REASON_STOP
    assert after.text


def test_a_call_that_is_told_again_is_reported_in_its_parts_again(
    tiny: InferenceClient, new_agent: Callable[[], str]
) -> None:
    asked: dict[str, Any] = {"agent_id": new_agent(), "messages": ASKED, "tools": TOOLS, "request_id": "twice"}
    first, again = (tiny.reply(**asked, sampling={"max_tokens": 60}) for _ in range(2))
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert (again.text, again.token_ids) == (first.text, first.token_ids)
    assert list(again.finished.tool_calls) == list(first.finished.tool_calls)


def test_calls_of_several_choices_have_names_of_their_own(tiny: InferenceClient) -> None:
    reply = tiny.reply(messages=ASKED, tools=TOOLS, sampling={"max_tokens": 60, "n": 3})
    ids = [call.id for choice in reply.choices for call in choice.finished.tool_calls]
    assert len(set(ids)) == len(ids) == 3
