"""Prompts of token ids over the wire: the same turn as their text, remembered and reused by ids and by text."""

from collections.abc import Callable
from typing import Any

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House

TEXT = "The keeper writes down every ship that passes, its name, its colours and the hour. " * 8
SAMPLING: dict[str, Any] = {"max_tokens": 12, "logit_bias": {2: -100.0}}


def ids_of(client: InferenceClient, text: str) -> list[int]:
    """As the engine has them."""
    reply = client.reply(prompt=text, return_prompt_token_ids=True, sampling={"max_tokens": 1})
    assert len(reply.started.prompt_token_ids) == reply.started.prompt_tokens
    return list(reply.started.prompt_token_ids)


def test_tokens_are_the_turn_that_their_text_is(client: InferenceClient) -> None:
    ids = ids_of(client, TEXT)
    by_text = client.reply(prompt=TEXT, sampling=SAMPLING)
    by_ids = client.reply(prompt=ids, sampling=SAMPLING)
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.started.prompt_tokens == len(ids)
    assert not by_ids.started.prompt_token_ids, "only if they are asked for"
    assert client.count_tokens(prompt=ids) == client.count_tokens(prompt=TEXT) == len(ids)


def test_a_special_token_is_one_in_tokens_as_in_a_prompt(client: InferenceClient) -> None:
    ids = ids_of(client, "one<|im_end|>two")
    assert 2 in ids
    said = client.reply(prompt=ids, sampling=SAMPLING).token_ids
    assert said == client.reply(prompt="one<|im_end|>two", sampling=SAMPLING).token_ids


@pytest.mark.long(2)
def test_a_memory_goes_on_by_ids_and_by_text(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent, ids = new_agent(), ids_of(client, TEXT)
    first = client.reply(prompt=ids, agent_id=agent, sampling=SAMPLING)
    longer = [*ids, *first.token_ids, *ids_of(client, " And then?")]
    second = client.reply(prompt=longer, agent_id=agent, sampling=SAMPLING)
    # A half character at a reply's end is not remembered.
    assert len(ids) < first.finished.memory_tokens <= len(ids) + len(first.token_ids)
    assert second.started.cached_tokens == first.finished.memory_tokens - 1  # its last token has no KV yet
    assert second.started.source == pb.CACHE_SOURCE_HOT
    assert second.started.continuation == pb.CONTINUATION_EXTENDED
    third = client.reply(prompt=f"{TEXT}{first.text}", agent_id=agent, sampling=SAMPLING)
    assert third.started.cached_tokens >= len(ids)
    again = client.reply(prompt=longer, agent_id=agent, request_id="again", sampling=SAMPLING)
    assert again.token_ids == second.token_ids, "a rewind"
    retried = client.reply(
        prompt=longer, agent_id=agent, request_id="again", sampling=SAMPLING, return_prompt_token_ids=True
    )
    assert retried.started.source == pb.CACHE_SOURCE_REPLAY
    assert list(retried.started.prompt_token_ids) == longer
    other = client.reply(prompt=longer[:-1], agent_id=agent, request_id="again", sampling=SAMPLING)
    assert other.started.source != pb.CACHE_SOURCE_REPLAY


@pytest.mark.long(2)
def test_a_memory_of_ids_goes_on_after_kill_9_as_if_nothing_had_been(own_house: House) -> None:
    with own_house.client() as client:
        ids = ids_of(client, TEXT)
        first = client.reply(prompt=ids, agent_id="ada", sampling=SAMPLING)
        twin = client.reply(prompt=ids, agent_id="twin", sampling=SAMPLING)
        longer = [*ids, *first.token_ids, *ids[:5]]
        expected = client.reply(prompt=longer, agent_id="twin", sampling=SAMPLING)
        assert twin.token_ids == first.token_ids
    own_house.restart()
    with own_house.client() as client:
        assert client.warm(agent_id="ada", prompt=longer).cached_tokens == first.finished.memory_tokens - 1
        after = client.reply(prompt=longer, agent_id="ada", sampling=SAMPLING)
        assert after.token_ids == expected.token_ids


def test_tokens_that_are_none_are_refused_by_name(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    for wrong in ([], [1 << 31], [5, 1 << 20]):
        for call in (
            lambda ids: client.reply(prompt=ids, sampling=SAMPLING),
            lambda ids: client.count_tokens(prompt=ids),
            lambda ids: client.warm(agent_id=agent, prompt=ids),
        ):
            with pytest.raises(errors.InvalidArgument) as refused:
                call(wrong)
            assert refused.value.field == "prompt_token_ids"
    with pytest.raises(errors.ResourceExhausted) as long:
        client.reply(prompt=[5] * 100_000, sampling=SAMPLING)
    assert (long.value.reason, long.value.field) == ("CONTEXT_EXCEEDED", "prompt_token_ids")
    with pytest.raises(errors.InvalidArgument) as tools:
        client.reply(prompt=[5], tools=[pb.Tool(name="t")])
    assert tools.value.field == "tools"
    with pytest.raises(errors.InvalidArgument) as minus:
        client.reply(prompt=[-1])
    assert minus.value.field == "prompt_token_ids"
