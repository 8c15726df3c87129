"""Thoughts over the turns of a running engine: told, remembered, sent back by callers, dropped by templates."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.errors import InvalidArgument
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.system_fixtures import House, running_house
from tests.thinking_models import THOUGHT, write_thinking_model

ASKED = [{"role": "user", "content": "How much does a lamp cost? Look it up, and think about it first."}]
RESULT = {"role": "tool", "content": "7 coins", "name": "shop_price"}
# Thoughts end at some time, and the reply by its length.
ENDING = {"max_tokens": 48, "temperature": 1.0, "seed": 3, "logit_bias": {THOUGHT: 5.0, 2: -100.0, 1022: -100.0}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Thoughts stay behind the last question, and are dropped before it."""
    model = write_thinking_model(tmp_path_factory.mktemp("model") / "thinking", "deepseek-v3.2")
    with running_house(tmp_path_factory.mktemp("house"), model) as house:
        yield house


@pytest.fixture
def ada(thinking: House) -> Iterator[InferenceClient]:
    with thinking.client() as client:
        yield client


def remembered(client: InferenceClient, agent: str) -> manifest_pb2.Manifest:
    return manifests.parse(client.get_snapshot(agent)[1])


def begun(client: InferenceClient, agent: str, **more: Any) -> Reply:
    reply = client.reply(agent_id=agent, messages=ASKED, sampling=ENDING, **more)
    assert reply.text
    assert reply.reasoning_text
    return reply


def sent_back(reply: Reply) -> dict[str, Any]:
    """As callers repeat what they were told."""
    return {"role": "assistant", "content": reply.text, "reasoning": reply.reasoning_text}


def test_thoughts_are_told_apart_and_remembered_apart(ada: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    reply = begun(ada, agent)
    said = remembered(ada, agent)
    raw = ada.reply(prompt=said.text[: said.turn.prompt_chars], sampling=ENDING)
    assert (raw.reasoning_text, raw.token_ids) == ("", reply.token_ids)
    assert raw.text == said.turn.reply == f"{reply.reasoning_text}</think>{reply.text}"
    assert (said.messages[-1].content, said.messages[-1].reasoning) == (reply.text, reply.reasoning_text)
    assert said.messages[-1].is_reply


def test_in_a_tool_loop_thoughts_that_come_back_equal_those_that_never_left(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    """Token for token, and nothing is computed twice."""
    stays, returns, strips = new_agent(), new_agent(), new_agent()
    replies = {agent: begun(ada, agent) for agent in (stays, returns, strips)}
    history = [*ASKED, sent_back(replies[returns]), RESULT]
    never_left = ada.reply(agent_id=stays, append_messages=[RESULT], sampling=ENDING)
    came_back = ada.reply(agent_id=returns, messages=history, sampling=ENDING)
    assert never_left.token_ids == came_back.token_ids
    for reply in (never_left, came_back):
        assert reply.started.cached_tokens == replies[stays].finished.memory_tokens
        assert reply.started.match == pb.PREFIX_MATCH_EXTEND
    stripped = [*ASKED, {"role": "assistant", "content": replies[strips].text}, RESULT]
    without = ada.reply(agent_id=strips, messages=stripped, sampling=ENDING)
    assert without.started.match == pb.PREFIX_MATCH_DIVERGE
    assert without.started.cached_tokens == replies[strips].started.prompt_tokens


def test_where_the_template_drops_thoughts_the_prompt_is_a_cold_one_and_all_before_them_is_reused(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, other = new_agent(), new_agent()
    first, _ = begun(ada, agent), begun(ada, other)
    question = {"role": "user", "content": "And a lantern?"}
    goes_on = ada.reply(agent_id=agent, append_messages=[question], sampling=ENDING)
    whole = ada.reply(agent_id=other, messages=[*ASKED, sent_back(first), question], sampling=ENDING)
    cold = ada.reply(messages=[*ASKED, {"role": "assistant", "content": first.text}, question], sampling=ENDING)
    assert goes_on.token_ids == whole.token_ids == cold.token_ids
    assert goes_on.started.prompt_tokens == whole.started.prompt_tokens == cold.started.prompt_tokens
    for reply in (goes_on, whole):
        assert reply.started.source == pb.CACHE_SOURCE_HOT
        # All but the marker that opened the thoughts.
        assert reply.started.cached_tokens == first.started.prompt_tokens - 1
    assert remembered(ada, agent).text == remembered(ada, other).text


def test_a_retry_tells_the_thoughts_again_and_other_thoughts_are_another_turn(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    first, again = (begun(ada, agent, request_id="thought") for _ in range(2))
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert (again.text, again.reasoning_text) == (first.text, first.reasoning_text)
    histories = [[*ASKED, {**sent_back(first), "reasoning": text}, RESULT] for text in ("One.", "Two.")]
    replies = [ada.reply(agent_id=agent, messages=each, request_id="r", sampling=ENDING) for each in histories]
    assert all(reply.started.source != pb.CACHE_SOURCE_REPLAY for reply in replies)


def test_only_an_assistants_message_has_thoughts(ada: InferenceClient) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ada.reply(messages=[{**ASKED[0], "reasoning": "hm"}])
    assert refused.value.field == "messages.messages[0].reasoning"
