"""A store that answers with an older version than this engine committed or read is not believed: it lies, or an older
copy of its data was put back. No turn goes on from the older memory until its caller or its owner has chosen that.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import cachestore_pb2 as store_pb
from kvasir.clients import Reply
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.service.lies.lying_store import LyingStore, lying_store
from tests.made_models.messages import user
from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 4}
WORDS = ("The first word is lantern.", "The second word is harbour.", "The third word is window.")


def say(house: House, agent: str, text: str, *, base_version: int | None = None) -> Reply:
    with house.client() as client:
        return client.reply(agent_id=agent, append_messages=[user(text)], sampling=GREEDY, base_version=base_version)


def told(house: House, agent: str) -> None:
    """Of three words, in three turns."""
    for words in WORDS:
        assert say(house, agent, words).finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED


def remembered(house: House, agent: str) -> list[str]:
    with house.store_client() as store:
        _, data = store.get_snapshot(agent)
    return [message.content for message in manifests.parse(data).messages if message.role == "user"]


def refused(house: House, agent: str) -> errors.FailedPrecondition:
    with pytest.raises(errors.FailedPrecondition) as refusal:
        say(house, agent, "Which words?")
    assert refusal.value.reason == "AGENT_WENT_BACK"
    return refusal.value


def lend_line(house: House, agent: str, kv_identity_hash: str) -> None:
    """Another engine has the agent's line for a moment: this one drops its hot memory."""
    give_up = time.monotonic() + 10
    with house.store_client() as store:
        while True:
            try:
                lease = store.acquire_lease(agent, kv_identity_hash, "another", asks=True).lease
                break
            except errors.FailedPrecondition:
                assert time.monotonic() < give_up
                time.sleep(0.05)
        store.release_lease(agent, kv_identity_hash, lease)


@pytest.fixture(scope="module")
def liar(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, LyingStore]]:
    house = House(tmp_path_factory.mktemp("liar"), model)
    real = house.engine.options[1]
    house.engine.options[1] = f"{real}x"
    try:
        house.store.start()
        with lying_store(f"{real}x", real) as lying:
            house.engine.start()
            yield house, lying
    finally:
        house.close()


@pytest.mark.parametrize("is_hot", [True, False])
def test_a_store_that_names_an_older_version_gets_no_reply_from_it(
    liar: tuple[House, LyingStore], *, is_hot: bool
) -> None:
    house, store = liar
    agent = f"ada, {'hot' if is_hot else 'cold'}"
    with house.store_client() as honest:
        told(house, agent)
        older, _ = honest.get_snapshot(agent, version=2)
    if not is_hot:
        lend_line(house, agent, older.kv_identity_hash)

    def lie(answer: store_pb.GetAgentResponse) -> store_pb.GetAgentResponse:
        answer.agent.lines[0].CopyFrom(older)
        return answer

    store.lie = lie
    try:
        refusal = refused(house, agent)
        assert refusal.metadata == {"agent_id": agent, "version": "3", "head_version": "2"}
        with house.client() as client:  # its text is the caller's own, so its reply is right
            whole = client.reply(agent_id=agent, messages=[user("Another talk.")], sampling=GREEDY)
            assert whole.started.cached_tokens == 0
    finally:
        store.lie = None
    say(house, agent, "Which words?")
    assert remembered(house, agent) == [*WORDS, "Which words?"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_store_that_names_an_older_version_than_was_only_read_gets_no_reply_from_it(
    liar: tuple[House, LyingStore], *, is_there: bool
) -> None:
    house, store = liar
    source, agent = f"read {is_there}", f"eve {is_there}"
    told(house, source)
    with house.store_client() as honest:
        honest.fork_agent(source, agent, version=3)
        older, _ = honest.get_snapshot(agent)
        honest.rollback_agent(agent, older.version)
    for _ in range(2):  # an event of before that comes late lets the engine forget the first
        with house.client() as client:
            read = client.reply(
                agent_id=agent,
                append_messages=[user("Which words?")],
                sampling=GREEDY,
                memory_mode=pb.MEMORY_MODE_READ_ONLY,
            )
        assert read.started.cached_tokens

    def lie(answer: store_pb.GetAgentResponse) -> store_pb.GetAgentResponse:
        del answer.agent.lines[:]
        if is_there:
            answer.agent.lines.append(older)
        return answer

    store.lie = lie
    try:
        assert refused(house, agent).metadata == {"agent_id": agent, "version": "2", "head_version": str(int(is_there))}
    finally:
        store.lie = None
    say(house, agent, "Which words?")
    assert remembered(house, agent) == [*WORDS, "Which words?"]


@pytest.mark.long(2)
def test_beside_an_older_copy_that_was_put_back_a_turn_names_its_base(own_house: House) -> None:
    house, agents = own_house, ("ada", "bob", "eve")
    for agent in agents:
        told(house, agent)
    house.store.stop()
    copy = house.root / "copy"
    shutil.copytree(house.data_dir, copy)
    house.store.start()
    house.repair()
    for agent in agents:
        say(house, agent, "The fourth word is bridge.")
    house.store.kill()
    shutil.rmtree(house.data_dir)
    copy.rename(house.data_dir)
    house.store.options.append("--accept-older")
    house.repair()

    for agent in agents:
        assert refused(house, agent).metadata["head_version"] == "3"
    # A caller names the version.
    assert say(house, "ada", "Which words?", base_version=3).finished.snapshot.version == 4
    # The owner takes the agent back to it.
    with house.store_client() as store:
        store.rollback_agent("bob", 3)
    assert say(house, "bob", "Which words?").finished.snapshot.version == 5
    for agent in ("ada", "bob"):
        assert remembered(house, agent) == [*WORDS, "Which words?"]
        say(house, agent, "And the last?")
    # The whole conversation is the caller's own. It is stored once the engine follows the store's events again.
    whole, give_up = [*WORDS, "The fourth word is bridge.", "Which words?"], time.monotonic() + 10
    with house.client() as client:
        while remembered(house, "eve") != whole:
            assert time.monotonic() < give_up
            client.reply(agent_id="eve", messages=[user(each) for each in whole], sampling=GREEDY)
    say(house, "eve", "And the last?")


@pytest.mark.long(2)
@pytest.mark.parametrize("is_forked", [False, True])
def test_an_agent_that_was_deleted_goes_on_at_once_though_the_event_is_late(
    liar: tuple[House, LyingStore], *, is_forked: bool
) -> None:
    house, store = liar
    told(house, "the source")
    agent = f"bob {is_forked}"
    told(house, agent)
    store.silent_before = time.monotonic()
    try:
        with house.store_client() as honest:
            honest.delete_agent(agent)
            if is_forked:
                honest.fork_agent("the source", agent, version=1)
        assert say(house, agent, "Which words?").finished.snapshot.version == 1 + is_forked
    finally:
        store.silent_before = 0.0
    assert remembered(house, agent) == [*WORDS[:is_forked], "Which words?"]
