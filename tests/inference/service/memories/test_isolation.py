"""What one agent leaves no other turn sees, and what is stored of an agent is its live memory, to the bit."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvasir.clients import Reply
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.sampling import first_and_in_turn
from tests.running.system_fixtures import House, running_house

GREEDY = {"max_tokens": 12}
STORY = "The market was full of people this morning. We cooked too much and gave the rest away. "
# One token each, whatever stands beside it.
FILL = "<|im_start|>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The model that ships: it says again what it was told."""
    with running_house(tmp_path_factory.mktemp("isolation")) as house:
        yield house


def stored(house: House, agent: str) -> list[str]:
    """Hashes of the blobs that hold the agent's newest memory."""
    with house.store_client() as store:
        _, data = store.get_snapshot(agent)
    parsed = manifest.parse(data)
    return [blob.hash for blob in (*parsed.blocks, *([parsed.tail] if parsed.HasField("tail") else []))]


def prompt(house: House, agent: str, text: str) -> Reply:
    with house.client() as client:
        reply = client.reply(agent_id=agent, prompt=text, sampling=GREEDY)
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    return reply


def say(house: House, agent: str, messages: Sequence[dict[str, str]]) -> Reply:
    with house.client() as client:
        reply = client.reply(agent_id=agent, messages=messages, sampling=GREEDY)
    assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    return reply


@pytest.mark.parametrize("is_hot", first_and_in_turn([True, False], seconds=2))
def test_a_trim_leaves_nothing_that_a_later_turn_sees(tiny: House, is_hot: bool) -> None:
    """(LESSONS 1) The agent that had a tail and was cut is, to the bit, the one that never had it."""
    agent = f"trimmed {is_hot}"
    kept = FILL * 512
    prompt(tiny, agent, f"{kept} My password is wudrothi. {STORY}")
    if not is_hot:
        tiny.engine.kill()
        tiny.engine.start()
    cut = prompt(tiny, agent, f"{kept}user\nWhat is my password?<|im_end|>\n{FILL}assistant\n")
    assert cut.started.match == pb.PREFIX_MATCH_DIVERGE
    assert cut.started.source == (pb.CACHE_SOURCE_HOT if is_hot else pb.CACHE_SOURCE_WARM)
    assert cut.started.cached_tokens == 512
    never = f"never had it {is_hot}"
    fresh = prompt(tiny, never, f"{kept}user\nWhat is my password?<|im_end|>\n{FILL}assistant\n")
    assert cut.token_ids == fresh.token_ids
    assert "wudrothi" not in cut.text
    assert stored(tiny, agent) == stored(tiny, never)


@pytest.mark.long(4)
def test_the_memory_of_a_turn_that_began_with_a_siblings_prefix_is_stored_as_it_is(tiny: House) -> None:
    """Never half of its own blocks, generated word by word, and half of the sibling's, which were prefilled."""
    first = [{"role": "user", "content": "My password is wudrothi."}]
    said = say(tiny, "own", first)
    second = [*first, {"role": "assistant", "content": said.text}, {"role": "user", "content": STORY * 12}]
    answered = say(tiny, "own", second)
    third = [*second, {"role": "assistant", "content": answered.text}, {"role": "user", "content": STORY * 30}]
    sibling = say(tiny, "sibling", third)
    assert sibling.started.source == pb.CACHE_SOURCE_COLD
    shared = say(tiny, "own", third)
    assert shared.started.source == pb.CACHE_SOURCE_SHARED
    assert shared.started.cached_tokens > 512
    assert stored(tiny, "own") == stored(tiny, "sibling")


@pytest.mark.long(9)
def test_live_memory_and_what_is_stored_of_it_share_nothing_under_load(tiny: House) -> None:
    """(LESSONS 6) Agents go on, are cut and written over while what they were is being stored and restored."""

    def live(agent: str) -> list[list[str]]:
        text, seen = f"{FILL}user\nI am {agent}. {STORY * 6}<|im_end|>\n{FILL}assistant\n", []
        for _ in range(3):
            reply = prompt(tiny, agent, text)
            seen.append(stored(tiny, agent))
            # Cut into what was just stored, and go on from there.
            text = f"{(text + reply.text)[:-20]} {STORY * 3}"
        return seen

    names = [f"busy {number}" for number in range(4)]
    alone = [live(name) for name in names]
    with tiny.store_client() as store:
        for name in names:
            store.delete_agent(name)
    tiny.engine.kill()
    tiny.engine.start()
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(live, names))
    assert together == alone
