"""Every turn after a rollback knows of it: with the engine well, frozen, killed, or cut off its store."""

import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest
from kvasir.clients import Reply
from kvasir.credentials import write_private_text
from kvasir.errors import FailedPrecondition, Unavailable
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.memory.store.answers import LEASE_TTL_S
from tests.campaigns.faults.faulty_link import Fault, FaultyLink
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.running.system_fixtures import ENGINE_SERVICE, House, Service, running_house

GREEDY = {"max_tokens": 4}


def say(house: House, agent: str, words: str, *, is_first: bool = False) -> Reply:
    message = [{"role": "user", "content": words}]
    with house.client() as client:
        if is_first:
            return client.reply(agent_id=agent, messages=message, sampling=GREEDY)
        return client.reply(agent_id=agent, append_messages=message, sampling=GREEDY)


def told_twice(house: House, agent: str) -> None:
    say(house, agent, "The first word is lantern.", is_first=True)
    assert say(house, agent, "The second word is harbour.").started.source == pb.CACHE_SOURCE_HOT


def roll_back(house: House, agent: str) -> float:
    """To the first turn; the seconds that it took."""
    began = time.monotonic()
    with house.store_client() as store:
        store.rollback_agent(agent, 1)
    return time.monotonic() - began


def remembered(house: House, agent: str) -> list[str]:
    with house.store_client() as store:
        _, data = store.get_snapshot(agent)
    return [message.content for message in manifests.parse(data).messages if message.role == "user"]


def test_a_healthy_engine_lets_go_at_once_and_its_next_turn_knows_nothing_of_what_was_taken_back(
    house: House, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    told_twice(house, agent)
    took_s = min(roll_back(house, agent) for _ in range(3))
    assert took_s < LEASE_TTL_S / 2, "not as long as a lease"
    reply = say(house, agent, "Which words?")
    assert reply.finished.snapshot.version == 6
    assert remembered(house, agent) == ["The first word is lantern.", "Which words?"]


@pytest.mark.long(5)
def test_a_frozen_engine_is_waited_for_as_long_as_its_lease_and_does_not_answer_from_what_is_gone(
    own_house: House,
) -> None:
    told_twice(own_house, "ada")
    own_house.engine.freeze()
    try:
        took_s = roll_back(own_house, "ada")
    finally:
        own_house.engine.thaw()
    assert took_s < LEASE_TTL_S + 2
    say(own_house, "ada", "Which words?")
    assert remembered(own_house, "ada") == ["The first word is lantern.", "Which words?"]


@pytest.mark.long(2)
def test_an_engine_that_was_killed_has_its_agents_at_once_and_need_not_wait_for_its_own_lease(own_house: House) -> None:
    told_twice(own_house, "ada")
    own_house.engine.kill()
    own_house.engine.start()
    reply = say(own_house, "ada", "Which words?")  # refused after a second, if another engine held the lease
    assert reply.started.source == pb.CACHE_SOURCE_WARM
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED


@pytest.mark.long(6)
def test_cut_off_its_store_a_hot_agent_goes_on_for_a_lease_and_is_then_refused_until_the_store_answers(
    model: Path, tmp_path: Path
) -> None:
    house = House(tmp_path, model, engine_options=("--store-budget-ms", "250", "--commit-wait-s", "0.2"))
    socket = Path(house.store.address.removeprefix("unix:"))
    link = FaultyLink(socket.with_name("f"), socket)
    house.engine.options += ["--store", link.address]
    try:
        house.start()
        told_twice(house, "ada")
        link.arm(Fault("hang"))
        hot = say(house, "ada", "The third word is window.")
        assert hot.started.source == pb.CACHE_SOURCE_HOT
        assert hot.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
        assert roll_back(house, "ada") < LEASE_TTL_S + 2
        with pytest.raises(Unavailable) as refused:
            say(house, "ada", "Which words?")
        assert refused.value.reason == "MEMORY_UNREADABLE"
        link.disarm()
        house.repair()
        give_up = time.monotonic() + 20
        while True:
            try:
                say(house, "ada", "Which words?")
                break
            except Unavailable:
                assert time.monotonic() < give_up
                time.sleep(0.1)
        assert remembered(house, "ada") == ["The first word is lantern.", "Which words?"]
    finally:
        link.close()
        house.close()


@pytest.mark.long(4)
def test_another_engine_gets_an_idle_agent_and_is_refused_before_it_computes_while_a_turn_runs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "sharpened", LLAMA)
    with running_house(tmp_path / "house", model) as house:
        socket = Path(house.engine.address.removeprefix("unix:")).with_name("e2")
        second = Service("second", "inference_svc", ENGINE_SERVICE, socket, tmp_path / "second.log")
        second.options = [*house.engine.options, "--state-dir", str(tmp_path / "state2")]
        second.start()
        first = house.engine
        try:
            told_twice(house, "ada")
            with house.client() as client:
                house.engine = second
                assert say(house, "ada", "Which words?").finished.snapshot.version == 3
                running = client.generate(
                    agent_id="ada",
                    append_messages=[{"role": "user", "content": "Go on."}],
                    # It does not end by itself, nor within the second that the other engine waits.
                    sampling={"max_tokens": 3000, "logit_bias": {LLAMA["eos_token_id"]: -100.0}},
                )
                while not next(running).HasField("delta"):
                    pass
                with pytest.raises(Unavailable) as refused:
                    say(house, "ada", "And I?")
                assert refused.value.reason == "AGENT_HELD_ELSEWHERE"
                assert refused.value.retry_after_s
                assert refused.value.metadata["owner"] == client.get_capabilities().lease_owner
                with house.client() as reader:  # a turn that changes nothing needs no right to change
                    asked = [{"role": "user", "content": "Which words?"}]
                    aside = reader.reply(
                        agent_id="ada",
                        append_messages=asked,
                        memory_mode=pb.MEMORY_MODE_READ_ONLY,
                        sampling=GREEDY,
                    )
                assert aside.started.cached_tokens > 0
                assert not next(running).HasField("finished")
                with house.client() as follower, futures.ThreadPoolExecutor(1) as beside:
                    follower.engines = [client]  # where the agent is: the turn goes there, and waits its turn
                    followed = beside.submit(
                        follower.reply,
                        agent_id="ada",
                        append_messages=[{"role": "user", "content": "And I?"}],
                        sampling=GREEDY,
                    )
                    while len(client.list_turns()) < 2:
                        assert not followed.done()
                        time.sleep(0.05)
                    running.close()
                    reply = followed.result(60)
                assert (reply.started.cached_tokens > 0, reply.finished.snapshot.version) == (True, 4)
        finally:
            house.engine = first
            second.kill()


@pytest.mark.long(3)
def test_a_turn_of_an_agent_that_has_moved_is_refused_before_it_computes_and_a_reader_goes_on(
    model: Path, tmp_path: Path
) -> None:
    house = House(tmp_path, model)
    peers = tmp_path / "peers.toml"
    write_private_text(peers, '[[peer]]\nname = "owner"\naddress = "unix:/nowhere"\ngives = ["default=move"]\n')
    house.store.options += ["--peers-file", str(peers)]
    try:
        house.start()
        told_twice(house, "ada")
        with house.store_client() as store, house.client() as client:
            store.offer_agent("ada", "0" * 16, 0)  # the engine is asked, and lets go of its lease
            with pytest.raises(FailedPrecondition) as refused:
                say(house, "ada", "Which words?")
            assert refused.value.reason == "AGENT_MOVING"
            store.hand_over_agent("ada", "0" * 16, 1)
            for is_first in (False, True):
                with pytest.raises(FailedPrecondition) as refused:
                    say(house, "ada", "Which words?", is_first=is_first)
                assert (refused.value.reason, refused.value.metadata["owner"]) == ("AGENT_MOVED", "owner")
            asked = [{"role": "user", "content": "Which words?"}]
            read_only = pb.MEMORY_MODE_READ_ONLY
            client.reply(agent_id="ada", append_messages=asked, memory_mode=read_only, sampling=GREEDY)
            assert store.get_agent("ada").lines[0].version == 2
            store.claim_agent("ada", force=True)
            assert say(house, "ada", "Which words?").finished.snapshot.version == 3
    finally:
        house.close()
