"""A memory that cannot be read now is never written over: what a turn was to it is decided once it can be read."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir import errors
from kvasir.clients import Reply, StoreClient
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.memory.store.answers import LEASE_TTL_S
from tests.made_models.messages import user
from tests.made_models.sampling import first_and_in_turn
from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

GREEDY = {"max_tokens": 6}
TITLE = [{"role": "user", "content": "Write a title for this chat."}]


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    options = ("--store-budget-ms", "1000", "--commit-wait-s", "1")
    with running_house(tmp_path_factory.mktemp("unread"), model, engine_options=options) as house:
        yield house


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    """A house in order, before and after."""
    yield shared
    shared.store.thaw()
    shared.repair()


def say(house: House, agent: str, text: str) -> Reply:
    with house.client() as client:
        return client.reply(agent_id=agent, append_messages=[user(text)], sampling=GREEDY)


def made_cold(house: House) -> None:
    """No memory is hot, and the engine follows the store's events."""
    house.engine.kill()
    house.engine.start()
    say(house, "somebody else", "Hello.")


def versions(store: StoreClient, agent: str) -> list[int]:
    return [each.version for each in store.list_snapshots(agent).snapshots]


def nothing_owed(house: House) -> None:
    """Wait until what was on its way to the store is stored, or is refused."""
    with house.client() as client:
        eventually(lambda: not any(each.owed_memories for each in client.get_stats().namespaces))


@pytest.mark.parametrize("failure", first_and_in_turn(["dead", "hung"], seconds=2))
def test_no_other_conversation_takes_a_memorys_place_while_the_store_is_away(house: House, failure: str) -> None:
    agent, twin = f"ada {failure}", f"twin {failure}"
    told = [say(house, name, "I live in Porto, by the old bridge.") for name in (agent, twin, f"left alone {failure}")]
    undisturbed = say(house, f"left alone {failure}", "And I keep bees.")
    going_on = [user("I live in Porto, by the old bridge."), {"role": "assistant", "content": told[0].text}]
    made_cold(house)
    house.store.kill() if failure == "dead" else house.store.freeze()
    with house.client() as client:
        side = client.reply(agent_id=agent, messages=TITLE, sampling=GREEDY)
        also = client.reply(agent_id=twin, messages=[*going_on, user("And I keep bees.")], sampling=GREEDY)
    assert side.started.continuation == also.started.continuation == pb.CONTINUATION_UNDECIDED
    assert side.finished.snapshot.state == also.finished.snapshot.state == pb.SNAPSHOT_STATE_PENDING
    house.store.start() if failure == "dead" else house.store.thaw()
    house.repair()
    nothing_owed(house)
    with house.store_client() as store:
        assert versions(store, agent) == [1]
        assert versions(store, twin) == [2, 1]  # its conversation went on
    again = say(house, agent, "And I keep bees.")
    assert (again.started.continuation, again.started.cached_tokens) == (
        pb.CONTINUATION_EXTENDED,
        undisturbed.started.cached_tokens,
    )
    assert again.token_ids == undisturbed.token_ids


@pytest.mark.long(6)
def test_a_side_call_beside_a_memory_that_was_hot_is_a_branch_though_the_store_is_away(house: House) -> None:
    """Its lease has ended, so the memory cannot be proven to be the newest; what it is about is known all the same."""
    told = say(house, "eve", "I live in Porto.")
    house.store.freeze()
    time.sleep(LEASE_TTL_S)
    with house.client() as client:
        side = client.reply(agent_id="eve", messages=TITLE, sampling=GREEDY)
    assert side.started.continuation == pb.CONTINUATION_BRANCHED
    assert side.finished.snapshot.state == pb.SNAPSHOT_STATE_NONE
    house.store.thaw()
    house.repair()
    again = say(house, "eve", "And I keep bees.")
    assert (again.started.source, again.started.parent_version) == (pb.CACHE_SOURCE_HOT, told.finished.snapshot.version)


@pytest.mark.long(2)
def test_a_damaged_manifest_is_not_written_over_unless_that_is_requested(house: House) -> None:
    say(house, "mia", "I live in Porto.")
    with house.store_client() as store:
        snapshot, _ = store.get_snapshot("mia")
    house.kill()
    [path] = house.data_dir.rglob(snapshot.manifest.hash)
    path.unlink()
    house.start()
    whole = {"agent_id": "mia", "messages": [user("I live in Porto.")], "sampling": GREEDY}
    with house.client() as client, house.store_client() as store:
        beside = client.reply(**whole)  # type: ignore[arg-type]
        assert beside.started.continuation == pb.CONTINUATION_BRANCHED
        assert (beside.finished.snapshot.state, beside.finished.snapshot.version) == (pb.SNAPSHOT_STATE_NONE, 1)
        assert "cannot be read" in beside.finished.snapshot.reason
        for ahead in (lambda: client.warm(agent_id="mia", prompt="Once upon a time"), lambda: client.sleep("mia")):
            with pytest.raises(errors.FailedPrecondition) as refused:  # a caller that retries would never end
                ahead()
            assert refused.value.reason == "MEMORY_DAMAGED"
        assert versions(store, "mia") == [1]
        instead = client.reply(**whole, replace_memory=True)  # type: ignore[arg-type]
        assert (instead.started.continuation, instead.finished.snapshot.version) == (pb.CONTINUATION_REPLACED, 2)
