"""What an agent remembers ends with a token that no file holds: each way back computes it with the next prompt."""

from collections.abc import Callable
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import archive, manifest
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.service.memories.test_brought_memories import exported
from tests.running.system_fixtures import House

REPLY = 6
# No end token, and none that begins a special one: each reply has all its tokens.
SAMPLING: dict[str, Any] = {"max_tokens": REPLY, "logit_bias": {0: -100.0, 2: -100.0}}
PROMPT = [40 + place % 400 for place in range(600)]


def begun(client: InferenceClient, agent: str, tokens: int, **more: Any) -> list[int]:
    """What the agent remembers after a turn: so many tokens, if its reply ends with a whole character."""
    ids = PROMPT[: tokens - REPLY]
    reply = client.reply(agent_id=agent, prompt=ids, sampling=SAMPLING, **more)
    return [*ids, *reply.token_ids][: reply.finished.memory_tokens]


def gone_on(client: InferenceClient, agent: str, known: list[int]) -> Reply:
    return client.reply(agent_id=agent, prompt=[*known, *range(500, 520)], sampling={**SAMPLING, "max_tokens": 24})


def test_a_memory_of_any_length_goes_on_alike_hot_forked_moved_by_archive_and_after_a_kill(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    lengths, known = [255, 256, 257, 258, 512, 513], {}
    ways = {length: {way: new_agent() for way in ("hot", "killed", "forked", "archived")} for length in lengths}
    expected = {}
    with own_house.client() as client, own_house.store_client() as store:
        for length, agents in ways.items():
            known[length] = begun(client, agents["hot"], length)
            assert begun(client, agents["killed"], length) == known[length]
            stored = manifest.parse(store.get_snapshot(agents["killed"])[1])
            assert [*stored.token_ids, stored.pending.id] == known[length]
            assert store.get_agent(agents["killed"]).lines[0].token_count == len(known[length])
            assert (len(stored.blocks), stored.HasField("tail")) == (
                (len(known[length]) - 1) // 256,
                (len(known[length]) - 1) % 256 > 0,
            )
            store.fork_agent(agents["killed"], agents["forked"])
            store.import_agent(agents["archived"], store.export_agent(agents["killed"]))
            hot = gone_on(client, agents["hot"], known[length])
            assert (hot.started.source, hot.started.cached_tokens) == (pb.CACHE_SOURCE_HOT, len(known[length]) - 1)
            expected[length] = hot.token_ids
    own_house.restart()
    with own_house.client() as client:
        for length, agents in ways.items():
            for way in ("killed", "forked", "archived"):
                warm = gone_on(client, agents[way], known[length])
                assert (warm.started.source, warm.started.miss) == (pb.CACHE_SOURCE_WARM, pb.MISS_REASON_UNSPECIFIED)
                assert warm.started.cached_tokens == len(known[length]) - 1
                assert warm.token_ids == expected[length], (length, way)
    with own_house.store_client() as store:
        for agents in ways.values():
            one, *others = (manifest.parse(store.get_snapshot(agent)[1]) for agent in agents.values())
            assert all((each.blocks, each.tail) == (one.blocks, one.tail) for each in others)


@pytest.mark.long(4)
def test_a_memory_of_an_earlier_release_has_kv_of_its_last_token_and_goes_on(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    """Its manifest is that of a reply without the token behind it, and names no pending one."""
    agent, warmed, restored = new_agent(), new_agent(), new_agent()
    with own_house.client() as client, own_house.store_client() as store:
        known = begun(client, agent, 300)[:-1]
        message, content = exported(own_house, agent)
        message.ClearField("pending")
        blobs = {Digest.of(data): data for data in content.values()}
        for each in (warmed, restored):
            store.import_agent(each, archive.pack(message, blobs, agent_id=each))
        assert client.warm(agent_id=warmed).tokens == len(known)
        hot = gone_on(client, warmed, known)
        assert (hot.started.source, hot.started.cached_tokens) == (pb.CACHE_SOURCE_HOT, len(known))
    own_house.restart()
    with own_house.client() as client:
        warm = gone_on(client, restored, known)
    assert (warm.started.source, warm.started.cached_tokens) == (pb.CACHE_SOURCE_WARM, len(known))
    assert warm.token_ids == hot.token_ids


@pytest.mark.long(4)
def test_a_memory_that_is_warmed_as_it_is_goes_on_as_one_that_is_not(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    """By its text no token is computed, and by its tokens the last one."""
    plain, by_text, by_ids = new_agent(), new_agent(), new_agent()
    with own_house.client() as client:
        known = [begun(client, agent, 300) for agent in (plain, by_text, by_ids)]
    assert known[0] == known[1] == known[2]
    own_house.restart()
    with own_house.client() as client:
        warmed = client.warm(agent_id=by_text)
        assert (warmed.tokens, warmed.cached_tokens) == (299, 299)
        warmed = client.warm(agent_id=by_ids, prompt=known[0])
        assert (warmed.tokens, warmed.cached_tokens) == (300, 299)
        replies = [gone_on(client, agent, known[0]) for agent in (plain, by_text, by_ids)]
    assert [each.started.cached_tokens for each in replies] == [299, 299, 300]
    assert replies[0].token_ids == replies[1].token_ids == replies[2].token_ids


@pytest.mark.long(3)
def test_a_retry_after_a_kill_is_answered_with_the_token_that_no_file_holds(
    own_house: House, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    with own_house.client() as client:
        known = begun(client, agent, 300, request_id="once")
    own_house.restart()
    with own_house.client() as client:
        again = client.reply(agent_id=agent, prompt=PROMPT[: 300 - REPLY], sampling=SAMPLING, request_id="once")
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert again.token_ids == known[300 - REPLY :]


@pytest.mark.long(3)
@pytest.mark.parametrize(
    ("forged", "miss"),
    [
        (manifest_pb2.PendingToken(id=2**32 - 1, text="a"), pb.MISS_REASON_MANIFEST_INVALID),
        (manifest_pb2.PendingToken(id=7, text="a" * 100_000), pb.MISS_REASON_TEXT_DIFFERS),
        (manifest_pb2.PendingToken(), pb.MISS_REASON_UNSPECIFIED),
    ],
    ids=["a token that the model lacks", "a long text", "no text"],
)
def test_a_brought_memory_with_another_last_token_serves_what_is_true(
    house: House, new_agent: Callable[[], str], forged: manifest_pb2.PendingToken, miss: pb.MissReason
) -> None:
    agent, copy = new_agent(), new_agent()
    with house.client() as client, house.store_client() as store:
        known = begun(client, agent, 300)
        message, content = exported(house, agent)
        message.pending.CopyFrom(forged)
        store.import_agent(copy, archive.pack(message, {Digest.of(d): d for d in content.values()}, agent_id=copy))
        brought, own = gone_on(client, copy, known), gone_on(client, agent, known)
        assert brought.token_ids == own.token_ids
        assert brought.started.miss == miss
        assert gone_on(client, copy, [*known, *range(500, 520), *brought.token_ids]).finished.snapshot
