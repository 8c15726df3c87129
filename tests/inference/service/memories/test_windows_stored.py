"""Models with windows, served by real processes: what a turn writes, what is shared, and what a damaged file costs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import manifest
from kvasir.formats.layer_groups import row_groups
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.engine.families import FAMILIES, write_family
from tests.made_models.sampling import one_of
from tests.running.system_fixtures import House, running_house

# The shipped template needs an end token to close replies with.
CONFIGS = {name: {**FAMILIES[name], "eos_token_id": 2} for name in ("gemma3", "gpt_oss")}
COMMON = "".join(
    f"Rule {n}: the blue key of room {n} opens door {n + 3}, and nobody else may have it. " for n in range(24)
)


@pytest.fixture
def windowed_house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    model = write_family(tmp_path / "model" / "windowed", CONFIGS[request.param], seed=3)
    with running_house(tmp_path / "house", model) as house:
        yield house


def told(client: InferenceClient, agent: str, prompt: str, max_tokens: int = 16) -> Reply:
    reply = client.reply(agent_id=agent, prompt=prompt, sampling={"temperature": 0, "max_tokens": max_tokens})
    if agent:
        assert reply.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED, reply.finished.snapshot.reason
    return reply


def written(house: House) -> int:
    with house.store_client() as store:
        return int(store.get_stats().counters["blobs_written"])


def stored(house: House, agent: str) -> manifest.manifest_pb2.Manifest:
    with house.store_client() as store:
        return manifest.parse(store.get_snapshot(agent)[1])


@pytest.mark.long(5)
@pytest.mark.parametrize("windowed_house", one_of(CONFIGS, 0), indirect=True)
def test_a_short_turn_writes_at_most_a_block_and_a_tail_of_each_group_and_a_manifest(windowed_house: House) -> None:
    house, text = windowed_house, COMMON
    with house.client() as client:
        text += told(client, "ada", text).text
        groups = len(row_groups(stored(house, "ada").kv_identity))
        assert groups == 2
        for number in range(8):
            before, tokens = written(house), len(stored(house, "ada").token_ids)
            text += f" And what opens door {number}? Say it."
            reply = told(client, "ada", text, 20)
            assert reply.started.source == pb.CACHE_SOURCE_HOT
            kept = reply.started.cached_tokens
            assert kept >= tokens - 2, "a reply may end inside a character"
            text += reply.text
            found = stored(house, "ada")
            filled = len(found.token_ids) // 256 - kept // 256
            tails = bool(len(found.token_ids) % 256)
            assert len(found.token_ids) - tokens < 80
            assert written(house) - before <= groups * (filled + tails) + 1
            assert filled <= 1


@pytest.mark.long(3)
@pytest.mark.parametrize("windowed_house", one_of(CONFIGS, 1), indirect=True)
def test_a_prefix_is_shared_by_agents_and_gives_what_a_cold_run_gives(windowed_house: House) -> None:
    house = windowed_house
    prompts = [f"{COMMON}Now answer number {number}, please." for number in range(3)]
    with house.client() as client:
        cold = [told(client, "", prompt).token_ids for prompt in prompts]
        assert told(client, "ada", prompts[0]).token_ids == cold[0]
        # From the pages of an agent that is hot.
        hot = told(client, "bob", prompts[1])
        assert hot.started.source == pb.CACHE_SOURCE_SHARED
        assert hot.token_ids == cold[1]
    house.restart()
    with house.client() as client:
        # From the store, by block hashes.
        shared = told(client, "carol", prompts[2])
        assert shared.started.source == pb.CACHE_SOURCE_SHARED, shared.started.reason
        assert shared.started.cached_tokens == hot.started.cached_tokens >= 512
        assert shared.started.cached_tokens % 256 == 0
        assert shared.token_ids == cold[2]


@pytest.mark.long(3)
@pytest.mark.parametrize("windowed_house", one_of(CONFIGS, 2), indirect=True)
def test_a_memory_that_came_back_goes_back_into_its_last_reply(windowed_house: House) -> None:
    house = windowed_house
    with house.client() as client:
        first = told(client, "ada", COMMON)
        edited = COMMON + first.text[: len(first.text) // 2] + " No, wait."
        expected = told(client, "hot", COMMON), told(client, "hot", edited)
    house.restart()
    with house.client() as client:
        found = told(client, "ada", edited)
        assert found.started.source == pb.CACHE_SOURCE_WARM, found.started.reason
        assert found.started.cached_tokens >= expected[1].started.cached_tokens - 1 > first.started.prompt_tokens
        assert found.token_ids == expected[1].token_ids


@pytest.mark.long(5)
@pytest.mark.parametrize("windowed_house", one_of(CONFIGS, 3), indirect=True)
def test_behind_a_long_reply_the_prompt_is_shared_and_serves_when_the_last_file_of_a_window_is_gone(
    windowed_house: House,
) -> None:
    """From the store, after a restart: the manifest lists what the window saw at the prompt's edge."""
    house = windowed_house
    common = COMMON[: COMMON.index("Rule 23")]  # ends far behind an edge of a block, so that little more is decoded
    ask, other = f"{common}Tell me a long story.", f"{common}Or a short one."
    with house.client() as client:
        cold = told(client, "", other).token_ids
        text = ask + told(client, "ada", ask, 140).text + " And then?"
    runs = stored(house, "ada").windows
    assert [run.window for run in runs] == [runs[0].window] * 2, "one at the prompt's edge, and the last one"
    house.restart()
    with house.client() as client:
        shared = told(client, "bob", other)
        assert shared.started.source == pb.CACHE_SOURCE_SHARED, shared.started.reason
        assert shared.token_ids == cold
    house.restart()
    (path,) = house.data_dir.rglob(runs[1].tail.hash)
    path.unlink()
    with house.client() as client:
        found = told(client, "ada", text)
    assert found.started.source == pb.CACHE_SOURCE_WARM, found.started.reason
    assert found.started.cached_tokens == 256 * (runs[0].first_block + len(runs[0].blocks))
    assert found.started.cached_tokens == shared.started.cached_tokens
