"""Agents of models whose layers do not keep all tokens: remembered by real services, through a store, over restarts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.engine.families import GEMMA3, GRANITE_HYBRID, write_family
from tests.inference.service.memories.test_memory_survives import GREEDY, TALK, say, talk, tokens
from tests.running.system_fixtures import House, running_house

# The shipped template needs an end token to close replies with.
CONFIGS = {"sliding window": {**GEMMA3, "eos_token_id": 2}, "hybrid": {**GRANITE_HYBRID, "eos_token_id": 2}}


@pytest.fixture(params=CONFIGS)
def stateful_house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    model = write_family(tmp_path / "model" / "stateful", CONFIGS[request.param], seed=3)
    with running_house(tmp_path / "house", model) as house:
        yield house


@pytest.mark.long(11)
def test_the_next_turn_of_a_model_with_states_hits_hot_and_after_a_restart(stateful_house: House) -> None:
    """To the token: everything that was remembered is reused, or everything before the reply (LESSONS 18)."""
    house = stateful_house
    with house.client() as client:
        expected = tokens(talk(client, "never left", TALK))
        replies = talk(client, "restarted", TALK[:2])
    assert replies[1].started.source == pb.CACHE_SOURCE_HOT
    for number, text in enumerate(TALK[2:], start=1):
        before = replies[number]
        house.restart()
        with house.client() as client:
            replies.append(say(client, "restarted", text))
        started, usage = replies[-1].started, before.finished.usage
        assert started.source == pb.CACHE_SOURCE_WARM, started.reason
        end = usage.prompt_tokens + usage.completion_tokens
        at_end, before_reply = started.cached_tokens == end, usage.prompt_tokens - 12 < started.cached_tokens
        assert at_end or (before_reply and started.cached_tokens < usage.prompt_tokens)
        assert bool(started.reason) != at_end, "what was not reused is told, with its reason"
    assert tokens(replies) == expected
    with house.client() as client:
        again = client.reply(agent_id="never left", prompt="".join(TALK), sampling=GREEDY)
        repeated = client.reply(agent_id="never left", prompt="".join(TALK), sampling=GREEDY)
    assert repeated.started.cached_tokens == repeated.started.prompt_tokens - 1
    assert repeated.token_ids == again.token_ids
