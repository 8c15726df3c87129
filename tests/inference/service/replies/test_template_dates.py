"""A conversation goes on with the date that its template printed first, however late its next turn comes. The template
here prints milliseconds, so that every turn comes on another date.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.dated_model import date_of, dated
from tests.made_models.messages import by_user
from tests.running.system_fixtures import House, running_house

# Random weights say special words, which come back as plain text: none here, so that all of a reply is reused.
GREEDY = {"max_tokens": 24, "logit_bias": dict.fromkeys((0, 1, 2, 1022, 1023), -100.0)}
TALK = (
    "Remember this: the blue key opens the third door, and Marla keeps it in the tin box. " * 4,
    "Who keeps the key? Answer with a name, and say where it is kept. " * 6,
    "And what does it open? Think about the doors before you answer.",
    "Thanks. Tell it to Tomas.",
)


@pytest.fixture(scope="module")
def dated_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dated(model, tmp_path_factory.mktemp("dated") / "model")


@pytest.fixture(scope="module")
def dated_house(dated_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("house"), dated_model) as house:
        yield house


@pytest.fixture
def ada(dated_house: House) -> Iterator[InferenceClient]:
    with dated_house.client() as client:
        yield client


def say(client: InferenceClient, agent: str, text: str, **more: Any) -> Reply:
    return client.reply(agent_id=agent, append_messages=by_user(text), sampling=GREEDY, **more)


def remembered(client: InferenceClient, agent: str, version: int | None = None) -> manifest_pb2.Manifest:
    return manifest.parse(client.get_snapshot(agent, version=version)[1])


def goes_on_whole(before: Reply, reply: Reply) -> None:
    """All of the memory is reused, but the part of a character that a reply may end with; the date is told as kept."""
    started = reply.started
    if "\ufffd" not in started.difference.remembered:
        assert started.cached_tokens > before.finished.memory_tokens - 4
        assert not started.reason
    assert list(started.kept) == ["template-date"]


@pytest.mark.long(3)
def test_a_talk_over_midnights_is_reused_whole_and_equals_one_whose_clock_never_moved(
    dated_model: Path, model: Path, tmp_path: Path
) -> None:
    replies: list[Reply] = []
    with running_house(tmp_path / "moving", dated_model) as house:
        for number, text in enumerate(TALK):
            if number == 2:
                house.restart()
            with house.client() as client:
                replies.append(say(client, "ada", text))
                if number:
                    goes_on_whole(replies[-2], replies[-1])
                    source = pb.CACHE_SOURCE_WARM if number == 2 else pb.CACHE_SOURCE_HOT
                    assert replies[-1].started.source == source
        with house.client() as client:
            talk = remembered(client, "ada")
    date = date_of(talk.template_time_ms)
    assert not replies[0].started.kept
    assert talk.text.count(date) == talk.text.count("Today is") == 1
    with running_house(tmp_path / "still", dated(model, tmp_path / "model", date)) as house, house.client() as client:
        expected = [say(client, "ada", text) for text in TALK]
        still = remembered(client, "ada")
        assert (still.template_time_ms, still.text, still.token_ids) == (0, talk.text, talk.token_ids)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected]


@pytest.mark.long(10)
def test_whole_conversations_copies_and_warmed_ones_keep_the_date(ada: InferenceClient) -> None:
    first = say(ada, "kept", TALK[0])
    date = remembered(ada, "kept").template_time_ms
    said = [*by_user(TALK[0]), {"role": "assistant", "content": first.text}]
    whole = ada.reply(agent_id="kept", messages=[*said, *by_user(TALK[1])], sampling=GREEDY)
    goes_on_whole(first, whole)
    rewound = say(ada, "kept", TALK[2], base_version=1)
    assert rewound.started.cached_tokens > first.finished.memory_tokens - 4
    ada.fork_agent("kept", "copy", version=2)
    goes_on_whole(whole, say(ada, "copy", TALK[3]))
    archive = b"".join(ada.export_agent("copy"))
    ada.import_agent("brought", [archive])
    warm = ada.warm(agent_id="brought", append_messages=by_user(TALK[2]))
    assert warm.tokens - warm.cached_tokens < 40
    brought = say(ada, "brought", TALK[2])
    assert brought.started.prompt_tokens - brought.started.cached_tokens == 1
    assert {remembered(ada, agent).template_time_ms for agent in ("kept", "copy", "brought")} == {date}


@pytest.mark.long(2)
def test_a_new_conversation_gets_a_date_of_its_own(ada: InferenceClient) -> None:
    say(ada, "one", TALK[0])
    say(ada, "two", TALK[0])
    ones, twos = remembered(ada, "one"), remembered(ada, "two")
    assert ones.template_time_ms < twos.template_time_ms
    branch = ada.reply(agent_id="one", messages=by_user("Of something else."), sampling=GREEDY)
    assert branch.started.continuation == pb.CONTINUATION_BRANCHED
    assert not branch.started.kept
    ada.reply(agent_id="one", messages=by_user("Of something else."), replace_memory=True, sampling=GREEDY)
    replaced = remembered(ada, "one")
    assert replaced.template_time_ms > twos.template_time_ms
    for each in (ones, twos, replaced):
        assert date_of(each.template_time_ms) in each.text


@pytest.mark.long(3)
def test_whoever_wants_the_turns_own_date_gets_it_and_the_next_turn_keeps_that(ada: InferenceClient) -> None:
    say(ada, "renewed", TALK[0])
    before = remembered(ada, "renewed")
    renewed = say(ada, "renewed", TALK[1], volatile=pb.VolatileRules())
    assert renewed.started.match == pb.PREFIX_MATCH_DIVERGE
    assert renewed.started.miss == pb.MISS_REASON_TEXT_DIFFERS
    assert not renewed.started.kept
    after = remembered(ada, "renewed")
    assert after.template_time_ms > before.template_time_ms
    assert date_of(after.template_time_ms) in after.text
    goes_on_whole(renewed, say(ada, "renewed", TALK[2]))


@pytest.mark.long(3)
def test_prompts_and_templates_without_a_date_leave_none(ada: InferenceClient, client: InferenceClient) -> None:
    ada.reply(agent_id="raw", prompt="Once upon a time", sampling=GREEDY)
    say(client, "dateless", TALK[0])
    assert remembered(ada, "raw").template_time_ms == remembered(client, "dateless").template_time_ms == 0
    assert not say(client, "dateless", TALK[1]).started.kept


@pytest.mark.long(3)
def test_a_shortened_conversation_keeps_its_date(dated_model: Path, tmp_path: Path) -> None:
    drop = pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST)
    options = ("--context-tokens", "512")
    with running_house(tmp_path, dated_model, engine_options=options) as house, house.client() as client:
        for number in range(12):
            reply = say(client, "long", f"{number}: {TALK[2]}", on_full=drop)
            assert reply.started.kept == (["template-date"] if number else [])
        versions = [each.version for each in client.list_snapshots("long").snapshots]
        memories = [remembered(client, "long", version) for version in versions]
    assert any(memory.shortened.is_after_turn for memory in memories)
    (date,) = {memory.template_time_ms for memory in memories}
    assert all(date_of(date) in memory.text for memory in memories)
