"""Blocks leave for the store while their turn still decodes. However the turn ends, each memory is of a whole
turn, and blobs that no version names are swept.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.messages import by_user
from tests.running.system_fixtures import House

TOLD = "Remember this: the blue key opens the third door, and Marla keeps it in the tin box. " * 4
STORY, QUESTION = "Tell me all of it, at length.", "Who keeps the key?"
GREEDY = {"max_tokens": 16}
# It fills a block at least, and there is time to act when that has left.
LONG = {"max_tokens": 500, "stop_token_ids": []}
GRACE_S = 1.0
_BLOB = re.compile(r"[0-9a-f]{64}")


@pytest.fixture(scope="module")
def sweeping(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house whose store soon sweeps blobs that nothing names."""
    house = House(tmp_path_factory.mktemp("sweeping"), model)
    house.store.options += ["--grace-period-s", str(GRACE_S)]
    try:
        house.start()
        yield house
    finally:
        house.close()


def begin(client: InferenceClient, *agents: str) -> None:
    for agent in agents:
        client.reply(agent_id=agent, messages=by_user(TOLD), sampling=GREEDY)


def ask(client: InferenceClient, agent: str) -> Reply:
    return client.reply(agent_id=agent, append_messages=by_user(QUESTION), sampling=GREEDY)


def blobs(house: House) -> set[str]:
    return {path.name for path in house.data_dir.glob("namespaces/*/blobs/??/*") if _BLOB.fullmatch(path.name)}


def story_whose_block_has_left(house: House, client: InferenceClient, agent: str, **more: Any) -> Any:
    """The rest of a long reply's events, once a block of its own is in the store."""
    before = blobs(house)
    given = {"append_messages": by_user(STORY), "sampling": LONG, **more}
    events = client.generate(agent_id=agent, **given)
    for event in events:
        assert event.WhichOneof("event") != "finished", "no block left before the end"
        if blobs(house) - before:
            return events
    raise AssertionError


def until_swept(house: House, expected: set[str]) -> None:
    """Whole passes of the sweep remove all that no version names, and nothing else."""
    give_up = time.monotonic() + 30
    with house.store_client() as store:
        while (found := blobs(house)) != expected:
            assert found > expected
            assert time.monotonic() < give_up, found - expected
            store.collect_garbage()
            time.sleep(GRACE_S / 4)


@pytest.mark.long(4)
def test_after_a_kill_of_both_in_the_middle_the_agent_goes_on_from_its_last_whole_turn(own_house: House) -> None:
    with own_house.client() as client:
        begin(client, "never left", "killed")
        expected = ask(client, "never left").token_ids
        story_whose_block_has_left(own_house, client, "killed")
        own_house.kill()
    own_house.start()
    with own_house.client() as client:
        reply = ask(client, "killed")
        assert (reply.started.source, reply.started.parent_version) == (pb.CACHE_SOURCE_WARM, 1)
        assert reply.token_ids == expected


@pytest.mark.long(5)
def test_a_turn_goes_on_and_is_stored_whole_where_the_store_was_killed_after_blocks_had_left(own_house: House) -> None:
    with own_house.client() as client:
        begin(client, "never left", "left")
        rest = story_whose_block_has_left(own_house, client, "left")
        own_house.store.kill()
        own_house.store.start()
        *_, last = rest
        assert last.finished.snapshot.version == 2, last.finished.snapshot
        client.reply(agent_id="never left", append_messages=by_user(STORY), sampling=LONG)
        expected = ask(client, "never left").token_ids
    own_house.restart()
    with own_house.client() as client:
        reply = ask(client, "left")
        assert (reply.started.source, reply.started.parent_version) == (pb.CACHE_SOURCE_WARM, 2)
        assert reply.token_ids == expected


@pytest.mark.long(4)
def test_blocks_of_a_turn_that_was_cut_are_swept_and_the_memory_before_it_stays(
    sweeping: House, new_agent: Callable[[], str]
) -> None:
    with sweeping.client() as client:
        twin, left, late = (new_agent() for _ in range(3))
        begin(client, twin, left, late)
        expected = ask(client, twin).token_ids
        before = blobs(sweeping)
        longer = {**LONG, "max_tokens": 1500}
        story_whose_block_has_left(sweeping, client, left, sampling=longer).close()
        with pytest.raises(errors.DeadlineExceeded):
            list(story_whose_block_has_left(sweeping, client, late, sampling=longer, timeout_s=1.5))
        while client.list_turns():
            time.sleep(0.02)
        assert blobs(sweeping) > before
        until_swept(sweeping, before)
        for agent in (left, late):
            reply = ask(client, agent)
            assert (reply.started.source, reply.started.parent_version) == (pb.CACHE_SOURCE_HOT, 1)
            assert reply.token_ids == expected


@pytest.mark.long(6)
def test_an_agent_that_is_deleted_meanwhile_gets_none_of_the_blocks(
    sweeping: House, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    with sweeping.client() as client, sweeping.store_client() as store:
        before = blobs(sweeping)
        begin(client, agent)
        rest = story_whose_block_has_left(sweeping, client, agent)
        store.delete_agent(agent)
        *_, last = rest
        assert last.finished.snapshot.state == pb.SNAPSHOT_STATE_FAILED
        with pytest.raises(errors.NotFound):
            store.get_agent(agent)
        until_swept(sweeping, before)


@pytest.mark.long(8)
def test_an_agent_that_is_rolled_back_meanwhile_is_what_it_was_and_the_blocks_are_swept(
    sweeping: House, new_agent: Callable[[], str]
) -> None:
    agent, twin = new_agent(), new_agent()
    with sweeping.client() as client, sweeping.store_client() as store:
        begin(client, agent, twin)
        expected = ask(client, twin).token_ids
        ask(client, agent)
        before = blobs(sweeping)
        rest = story_whose_block_has_left(sweeping, client, agent)
        assert store.rollback_agent(agent, 1).version == 3
        *_, last = rest
        assert last.finished.snapshot.state == pb.SNAPSHOT_STATE_FAILED
        until_swept(sweeping, before)
        assert ask(client, agent).token_ids == expected


@pytest.mark.long(6)
def test_a_fork_made_meanwhile_is_of_the_version_before_and_the_turn_is_stored_as_if_nobody_had_forked(
    own_house: House,
) -> None:
    with own_house.client() as client, own_house.store_client() as store:
        begin(client, "short", "alone", "forked")
        of_the_version_before = ask(client, "short").token_ids
        rest = story_whose_block_has_left(own_house, client, "forked")
        store.fork_agent("forked", "fork")
        assert ask(client, "fork").token_ids == of_the_version_before
        *_, last = rest
        assert (last.finished.snapshot.state, last.finished.snapshot.version) == (pb.SNAPSHOT_STATE_COMMITTED, 2)
        client.reply(agent_id="alone", append_messages=by_user(STORY), sampling=LONG)
        of_the_story = ask(client, "alone").token_ids
    own_house.restart()
    with own_house.client() as client:
        reply = ask(client, "forked")
        assert (reply.started.source, reply.started.parent_version) == (pb.CACHE_SOURCE_WARM, 2)
        assert reply.token_ids == of_the_story


@pytest.mark.long(11)
def test_a_turn_that_nobody_keeps_uploads_nothing(sweeping: House, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    with sweeping.client() as client:
        begin(client, agent)
        before = blobs(sweeping)
        for mode in (pb.MEMORY_MODE_READ_ONLY, pb.MEMORY_MODE_NONE):
            named = {"agent_id": agent} if mode == pb.MEMORY_MODE_READ_ONLY else {}
            given = "append_messages" if named else "messages"
            client.reply(**named, **{given: by_user(STORY)}, sampling=LONG, memory_mode=mode)  # type: ignore[arg-type]
        branch = client.reply(agent_id=agent, messages=by_user("Something else."), sampling=LONG)
        assert branch.finished.snapshot.state == pb.SNAPSHOT_STATE_NONE
        assert blobs(sweeping) == before
