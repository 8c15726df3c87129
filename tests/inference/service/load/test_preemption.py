"""People's turns take the room of background ones, with a real store: all are answered, rightly, and no agent is ever
seen at a version that it did not reach.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.clients import Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

# Some 1,700 tokens of KV: a background turn fits, a person's fits, both do not.
OPTIONS = ("--memory-gib", "0.000685")
PASSAGE = [{"role": "user", "content": "The archive lists every door by its key. " * 12}]
QUESTION = [{"role": "user", "content": "Which key is missing, and since when? " * 12}]
WORDS = "the seventh key was lost in the flood of spring. " * 40
BACKGROUND = pb.PRIORITY_BACKGROUND
ALONE = "alone"


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("preempted"), model, engine_options=OPTIONS) as house:
        yield house


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    yield shared
    shared.repair()


@pytest.fixture(scope="module")
def expected(shared: House) -> Reply:
    """What such a turn generates that nobody disturbs."""
    return Turn(shared, ALONE).start().end()


class Turn:
    """The second turn of a new background agent, read by a thread."""

    def __init__(self, house: House, agent: str, max_tokens: int = 250) -> None:
        self.agent = agent
        self.generates = threading.Event()
        self.reply = Reply()
        self._max_tokens = max_tokens
        self._client = house.client()
        self._client.reply(agent_id=agent, messages=PASSAGE, sampling={"max_tokens": 8}, priority=BACKGROUND)
        self._thread = threading.Thread(target=self._read)

    def start(self) -> "Turn":
        self._thread.start()
        assert self.generates.wait(60)
        return self

    def end(self) -> Reply:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()
        return self.reply

    def _read(self) -> None:
        settings = {"max_tokens": self._max_tokens}
        for event in self._client.generate(
            agent_id=self.agent, append_messages=QUESTION, sampling=settings, priority=BACKGROUND
        ):
            self.reply.add(event)
            if event.HasField("delta"):
                self.generates.set()


def person(house: House, agent: str = "", max_tokens: int = 4) -> Reply:
    with house.client() as client:
        return client.reply(agent_id=agent, prompt=f"{agent}: {WORDS}", sampling={"max_tokens": max_tokens})


def preemptions(house: House) -> int:
    with house.client() as client:
        return client.get_stats().engine.preemptions


def misses(house: House) -> dict[str, int]:
    with house.client() as client:
        [namespace] = client.get_stats().namespaces
        return dict(namespace.misses)


def until_preempted(house: House, before: int) -> None:
    eventually(lambda: preemptions(house) != before)


def versions(house: House, agent: str) -> list[int]:
    with house.store_client() as store:
        [line] = store.get_agent(agent).lines
        return [one.version for one in store.list_snapshots(agent, line.kv_identity_hash).snapshots]


def test_a_preempted_turn_goes_on_to_its_end_and_is_stored(house: House) -> None:
    before = preemptions(house)
    turn = Turn(house, "once", 120).start()
    person(house)
    assert preemptions(house) == before + 1
    reply = turn.end()
    assert len(reply.token_ids) == 120
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    assert versions(house, turn.agent) == [2, 1]


@pytest.mark.long(6)
def test_a_background_agent_and_many_people_all_get_their_right_replies(house: House, expected: Reply) -> None:
    before = preemptions(house)
    turn = Turn(house, "disturbed").start()
    people = [threading.Thread(target=person, args=(house, f"person {number}")) for number in range(4)]
    for one in people:
        one.start()
    until_preempted(house, before)
    assert versions(house, turn.agent) == [1]  # what was preempted is no version of it
    for one in people:
        one.join(60)
    reply = turn.end()
    assert (reply.text, reply.token_ids) == (expected.text, expected.token_ids)
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    assert versions(house, turn.agent) == [2, 1]
    assert reply.started.cached_tokens == expected.started.cached_tokens
    assert misses(house).get("blob_missing", 0) == 0
    third = [{"role": "user", "content": "And then?"}]
    with house.client() as client:
        greedy = {"max_tokens": 16}
        told = [
            client.reply(agent_id=agent, append_messages=third, sampling=greedy).text for agent in (ALONE, turn.agent)
        ]
    assert told[0] == told[1]


@pytest.mark.long(8)
def test_a_store_that_dies_while_a_turn_is_preempted_costs_time_and_no_word(house: House, expected: Reply) -> None:
    before, missed = preemptions(house), sum(misses(house).values())
    turn = Turn(house, "bereft").start()
    first = threading.Thread(target=person, args=(house, "", 250))
    first.start()
    until_preempted(house, before)
    time.sleep(0.1)  # its files are written
    house.store.kill()
    first.join(60)
    reply = turn.end()
    assert reply.token_ids == expected.token_ids
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    assert sum(misses(house).values()) > missed


@pytest.mark.long(2)
def test_a_turn_whose_files_no_store_takes_keeps_them_and_goes_on(house: House, expected: Reply) -> None:
    turn = Turn(house, "homeless").start()
    before, missed = preemptions(house), misses(house)
    house.store.kill()
    with house.client() as client:
        events = client.generate(prompt="The door", sampling={"max_tokens": 1300})  # room for many words
        assert next(events).HasField("started")
        assert preemptions(house) == before + 1
        events.close()
    assert turn.end().token_ids == expected.token_ids
    missed["new_agent"] = misses(house)["new_agent"]
    assert misses(house) == missed  # nothing was lost, though the store has none of it


@pytest.mark.long(4)
def test_who_goes_away_while_its_turn_is_preempted_leaves_the_agent_as_it_was(house: House) -> None:
    before = preemptions(house)
    turn = Turn(house, "fickle")
    with house.client() as client:
        # Long enough to be preempted however late a busy machine lets the person come; it is never heard to its end.
        events = client.generate(
            agent_id="fickle", append_messages=QUESTION, sampling={"max_tokens": 900}, priority=BACKGROUND
        )
        while not next(events).HasField("delta"):
            pass
        first = threading.Thread(target=person, args=(house, "", 150))
        first.start()
        until_preempted(house, before)
        events.close()
        first.join(60)
        assert versions(house, "fickle") == [1]
        again = turn.start().end()
        assert again.started.parent_version == 1
        assert again.started.cached_tokens > 0
        eventually(
            lambda: not (client.get_stats().engine.publishing_bytes or client.get_stats().engine.restoring_bytes), 60
        )
