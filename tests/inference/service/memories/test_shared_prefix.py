"""Agents with one prompt in common hold its KV once, in RAM as on disk: after their first turns and after a restart."""

from collections.abc import Callable

import pytest
from kvasir.clients import Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House

COMMON = "You keep the notes of a long journey by train, and answer in a few words. " * 60
AGENTS = 5


def used_bytes(house: House) -> int:
    with house.client() as client:
        return client.get_stats().engine.kv_memory_used_bytes


def prompt(house: House, agent: str, text: str) -> Reply:
    with house.client() as client:
        reply = client.reply(agent_id=agent, prompt=text, sampling={"max_tokens": 4})
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    return reply


@pytest.mark.long(6)
def test_agents_with_one_prompt_hold_it_once(own_house: House, new_agent: Callable[[], str]) -> None:
    agents = [new_agent() for _ in range(AGENTS)]
    first = prompt(own_house, agents[0], f"{COMMON} My name is 0.")
    whole = used_bytes(own_house)
    replies = [prompt(own_house, agent, f"{COMMON} My name is {n}.") for n, agent in enumerate(agents[1:], 1)]
    assert [reply.started.source for reply in replies] == [pb.CACHE_SOURCE_SHARED] * (AGENTS - 1)
    assert used_bytes(own_house) < 2 * whole, "a page or two more for each agent"
    own_house.engine.kill()
    own_house.engine.start()
    back = [prompt(own_house, agent, f"{COMMON} My name is {n}. And") for n, agent in enumerate(agents)]
    assert {reply.started.source for reply in back} == {pb.CACHE_SOURCE_WARM}
    assert used_bytes(own_house) < 2 * whole, "so also what was restored"
    assert first.started.source == pb.CACHE_SOURCE_COLD
