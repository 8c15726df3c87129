"""Replies to messages, told in their parts by a running engine: calls, reasoning, answer; remembered as they were."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.engine.tiny_models import LLAMA, VOCABULARY, write_model
from tests.system_fixtures import House, running_house
from tools.kvasir_tiny.tools import schema

SHOP = schema("shop_price")["function"]
TOOLS = [pb.Tool(name=SHOP["name"], description=SHOP["description"], parameters_json=json.dumps(SHOP["parameters"]))]
ASKED = [{"role": "user", "content": "How much does a lamp cost?"}]
THINK, THOUGHT = VOCABULARY, VOCABULARY + 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceClient]:
    with running_house(tmp_path_factory.mktemp("tiny")) as house, house.client() as client:
        yield client


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A random model whose tokenizer knows markers of reasoning."""
    directory = write_model(tmp_path_factory.mktemp("model") / "thinking", {**LLAMA, "vocab_size": VOCABULARY + 2})
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    added = {**tokenizer["added_tokens"][-1], "special": False}
    tokenizer["added_tokens"] += [
        {**added, "id": THINK, "content": "<think>"},
        {**added, "id": THOUGHT, "content": "</think>"},
    ]
    path.write_text(json.dumps(tokenizer))
    with running_house(tmp_path_factory.mktemp("house"), directory) as house:
        yield house
    shutil.rmtree(directory)


def test_a_call_is_told_at_the_end_and_not_as_text(tiny: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    reply = tiny.reply(agent_id=agent, messages=ASKED, tools=TOOLS, sampling={"max_tokens": 60})
    assert reply.finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert [call.name for call in reply.finished.tool_calls] == ["shop_price"]
    assert set(json.loads(reply.finished.tool_calls[0].arguments_json)) == {"item"}
    assert reply.text == ""
    result = {"role": "tool", "content": json.dumps({"price": "7 coins"})}
    after = tiny.reply(agent_id=agent, append_messages=[result], tools=TOOLS, sampling={"max_tokens": 30})
    assert after.started.cached_tokens == reply.started.prompt_tokens + reply.finished.usage.completion_tokens
    assert after.finished.reason == pb.FINISH_REASON_STOP
    assert after.text


def test_a_call_that_is_told_again_is_told_in_its_parts_again(
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


def thought(client: InferenceClient, agent: str, **asked: Any) -> Reply:
    bias = {THINK: 6.0, THOUGHT: 6.0, 2: -100.0, 1022: -100.0}
    settings = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "logit_bias": bias}
    return client.reply(agent_id=agent, sampling=settings, **asked)


def test_reasoning_is_told_apart_and_remembered_as_it_was(thinking: House, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    with thinking.client() as client, thinking.store_client() as store:
        reply = thought(client, agent, messages=ASKED)
        said = manifests.parse(store.get_snapshot(agent)[1])
        raw = thought(client, "", prompt=said.text[: said.turn.prompt_chars])
    assert said.turn.reply == said.messages[-1].content == raw.text
    assert raw.reasoning_text == ""
    assert raw.token_ids == reply.token_ids
    reasoning = re.findall("<think>(.*?)(?:</think>|$)", raw.text, re.DOTALL)
    assert len(reasoning) > 1
    assert reply.reasoning_text == "".join(reasoning)
    assert reply.text == re.sub("<think>.*?(</think>|$)", "", raw.text, flags=re.DOTALL)
