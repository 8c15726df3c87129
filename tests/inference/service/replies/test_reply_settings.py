"""How a reply is chosen, over the wire: forms, choices, penalties, biases, log probabilities, refusals."""

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply
from kvasir.inference.v1 import inference_pb2 as pb

from tests.running.system_fixtures import House, running_house
from tests.running.waiting import eventually

END = 2  # the models' end token
HOT: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
PLACE = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Oslo", "Bergen", "Žilina"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["place", "count", "tags"],
    "additionalProperties": False,
}
SAID = [{"role": "user", "content": "Where is the brass key?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house with the model that ships."""
    with running_house(tmp_path_factory.mktemp("tiny")) as house:
        yield house


@pytest.fixture
def tiny_client(tiny: House) -> Iterator[InferenceClient]:
    with tiny.client() as client:
        yield client


def told(reply: Reply, choice: int = 0) -> tuple[str, list[int]]:
    return reply.choices[choice].text, reply.choices[choice].token_ids


@pytest.mark.long(5)
@pytest.mark.parametrize("sampling", [{"seed": 1}, {"temperature": 1.0, "seed": 2}, {"temperature": 2.0, "seed": 3}])
@pytest.mark.parametrize("given", [{"messages": SAID}, {"prompt": "count: "}])
def test_a_reply_is_json_that_the_schema_describes(
    given: dict[str, Any], sampling: dict[str, Any], tiny_client: InferenceClient
) -> None:
    reply = tiny_client.reply(**given, json_schema=PLACE, sampling=pb.Sampling(max_tokens=120, **sampling))
    assert reply.finished.reason == pb.FINISH_REASON_STOP
    value = json.loads(reply.text)
    assert list(value) == ["place", "count", "tags"]
    assert value["place"] in ("Oslo", "Bergen", "Žilina")
    assert 0 <= value["count"] <= 99
    assert len(value["tags"]) <= 2
    assert all(isinstance(tag, bool) for tag in value["tags"])


@pytest.mark.long(3)
@pytest.mark.parametrize("regex", [r"[a-f]{3,6}-[0-9]{2}(é|ü)", "yes|no|perhaps", "([a-z]{1,4} ){2}end[.]"])
def test_a_reply_matches_all_of_a_regex(regex: str, tiny_client: InferenceClient, client: InferenceClient) -> None:
    for engine in (tiny_client, client):
        for seed in range(3):
            reply = engine.reply(prompt="x", regex=regex, sampling={"max_tokens": 80, "temperature": 1.0, "seed": seed})
            assert reply.finished.reason == pb.FINISH_REASON_STOP
            assert re.fullmatch(regex, reply.text)


@pytest.mark.long(2)
def test_a_form_may_be_cut_by_max_tokens_and_reports_it(tiny_client: InferenceClient) -> None:
    reply = tiny_client.reply(prompt="x", json_schema=json.dumps(PLACE), sampling={"max_tokens": 3})
    assert reply.finished.reason == pb.FINISH_REASON_LENGTH
    assert reply.text.startswith("{")


def test_an_agent_remembers_what_it_said_in_form_and_goes_on(
    tiny_client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    first = tiny_client.reply(agent_id=agent, messages=SAID, json_schema=PLACE, sampling={"max_tokens": 120})
    second = tiny_client.reply(agent_id=agent, append_messages=SAID, sampling={"max_tokens": 8})
    said = first.started.prompt_tokens + first.finished.usage.completion_tokens
    assert second.started.cached_tokens == said - 1  # the last token drawn is computed with the prompt behind it
    assert second.started.match == pb.PREFIX_MATCH_EXTEND


@pytest.mark.long(4)
@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("json_schema", '{"type": "objekt"}'),
        ("json_schema", "not json"),
        ("json_schema", '{"type":"string","description":"' + "x" * (64 << 10) + '"}'),
        ("json_schema", ""),
        ("regex", "(["),
        ("regex", "a" * (16 << 10) + "b"),
        ("json_schema", '{"type": "integer", "multipleOf": 1000003}'),
    ],
)
def test_a_form_that_is_none_is_refused_by_name_and_others_go_on(
    field: str, text: str, tiny_client: InferenceClient
) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        tiny_client.reply(prompt="x", **{field: text})
    assert refused.value.field == field
    assert tiny_client.reply(prompt="x", regex="ab", sampling={"max_tokens": 9}).text == "ab"


def test_a_client_cannot_ask_for_two_forms(client: InferenceClient) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        client.reply(prompt="x", json_schema={}, regex="a")
    assert refused.value.field == "response_format"


@pytest.mark.long(3)
def test_choices_are_what_their_seeds_say_alone(client: InferenceClient) -> None:
    together = client.reply(prompt="the old door", sampling={**HOT, "seed": 40, "n": 8})
    alone = [client.reply(prompt="the old door", sampling={**HOT, "seed": 40 + i}) for i in range(8)]
    assert [told(together, i) for i in range(8)] == [told(reply) for reply in alone]
    assert len({choice.text for choice in together.choices}) > 1
    assert [choice.finished.usage.completion_tokens for choice in together.choices] == [
        reply.finished.usage.completion_tokens for reply in alone
    ]


def test_choices_of_the_last_seed_begin_again_at_the_first(client: InferenceClient) -> None:
    together = client.reply(prompt="x", sampling={**HOT, "seed": 2**64 - 1, "n": 2})
    assert told(together, 1) == told(client.reply(prompt="x", sampling={**HOT, "seed": 0}))


def test_a_stream_of_choices_begins_once_and_ends_each_once(client: InferenceClient) -> None:
    events = list(client.generate(prompt="door " * 300, sampling={**HOT, "seed": 4, "n": 3}))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds.count("started") == 1
    assert sorted(event.finished.choice for event in events if event.HasField("finished")) == [0, 1, 2]
    assert kinds[-1] == "finished"
    progress = [event.prefill_progress.tokens_done for event in events if event.HasField("prefill_progress")]
    assert progress == sorted(set(progress))


def test_a_cancel_ends_all_choices(own_house: House) -> None:
    forever = {"max_tokens": 3000, "n": 8, "logit_bias": {END: -100.0}}
    with own_house.client() as client:
        events = client.generate(prompt="door " * 40, sampling=forever)
        speaking: set[int] = set()
        while len(speaking) < 8:
            speaking.update([event.delta.choice] if (event := next(events)).HasField("delta") else [])
        used_bytes = client.get_stats().engine.kv_memory_used_bytes
        events.close()
        eventually(lambda: not client.get_stats().engine.kv_memory_used_bytes, 60)
        assert used_bytes > 0


def test_a_bias_bans_and_forces(client: InferenceClient) -> None:
    free = client.reply(prompt="the old door", sampling={"max_tokens": 12})
    banned = free.token_ids[0]
    without = client.reply(prompt="the old door", sampling={"max_tokens": 12, "logit_bias": {banned: -100.0}})
    assert banned not in without.token_ids
    forced = client.reply(
        prompt="the old door", sampling={**HOT, "temperature": 2.0, "seed": 1, "logit_bias": {77: 100.0}}
    )
    assert set(forced.token_ids) == {77}


def test_what_is_left_out_is_the_models_own_setting_and_a_zero_is_not_left_out(client: InferenceClient) -> None:
    settings = {"temperature": 2.0, "max_tokens": 24, "seed": 3}
    assert client.get_model().sampling_defaults == pb.Sampling(top_k=20)
    absent, own, off = (
        told(client.reply(prompt="the old door", sampling={**settings, **more}))
        for more in ({}, {"top_k": 20}, {"top_k": 0})
    )
    assert absent == own
    assert absent != off


@pytest.mark.long(2)
def test_penalties_count_the_reply_alone_and_batch_mates_change_none(client: InferenceClient) -> None:
    settings: dict[str, Any] = {"max_tokens": 40, "logit_bias": {77: 4.0, 78: 3.5}, "seed": 5}
    again = client.reply(prompt="door", sampling=settings)
    for penalty in ("frequency_penalty", "presence_penalty"):
        less = client.reply(prompt="door", sampling={**settings, penalty: 2.0})
        assert less.token_ids[0] == again.token_ids[0]
        assert len(set(less.token_ids)) > len(set(again.token_ids))
        more = client.reply(prompt="door", sampling={**settings, penalty: -2.0})
        assert len(set(more.token_ids)) <= len(set(again.token_ids))
    hot = {"temperature": 1.0, "max_tokens": 24, "seed": 9, "frequency_penalty": 0.75, "presence_penalty": -0.5}
    together = client.reply(prompt="the old door", sampling={**hot, "n": 4})
    alone = [client.reply(prompt="the old door", sampling={**hot, "seed": 9 + i}) for i in range(4)]
    assert [told(together, i) for i in range(4)] == [told(reply) for reply in alone]


def test_a_penalty_makes_a_model_repeat_less(client: InferenceClient) -> None:
    again = client.reply(prompt="door", sampling={"max_tokens": 60, "logit_bias": {77: 3.0}})
    less = client.reply(
        prompt="door",
        sampling={"max_tokens": 60, "logit_bias": {77: 3.0}, "repetition_penalty": 2.0, "repetition_tokens": 64},
    )
    assert less.token_ids.count(77) < again.token_ids.count(77)


def test_each_token_has_its_log_probability_and_the_likeliest_beside_it(client: InferenceClient) -> None:
    settings = {**HOT, "seed": 5}
    plain = client.reply(prompt="the old door", sampling=settings)
    reply = client.reply(prompt="the old door", sampling={**settings, "logprobs": True, "top_logprobs": 20})
    assert told(reply) == told(plain)
    assert plain.logprobs == []
    assert len(reply.logprobs) == len(reply.token_ids)
    for token, each in zip(reply.token_ids, reply.logprobs, strict=True):
        values = [top.logprob for top in each.top]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        known = {top.token_id: top.logprob for top in each.top}
        assert each.logprob == known.get(token, each.logprob)
        assert each.logprob <= values[0]
    alone = client.reply(prompt="the old door", sampling={**settings, "logprobs": True})
    assert [each.logprob for each in alone.logprobs] == [each.logprob for each in reply.logprobs]
    assert not any(each.top for each in alone.logprobs)


def test_a_retry_with_other_settings_is_another_turn(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    """The input's digest covers every setting that was given, and the form."""
    agent, seen = new_agent(), []
    for more in (
        {},
        {"sampling": {"logit_bias": {5: 1.0, 9: 2.0}}},
        {"sampling": {"logit_bias": {5: 1.0, 9: 3.0}}},
        {"sampling": {"repetition_penalty": 1.5}},
        {"sampling": {"presence_penalty": 1.5}},
        {"sampling": {"logprobs": True}},
        {"regex": "a+b"},
        {"json_schema": "{}"},
    ):
        settings = {"max_tokens": 3, **more.pop("sampling", {})}  # type: ignore[dict-item]
        asked: dict[str, Any] = {"agent_id": agent, "prompt": "x", "request_id": "same", "sampling": settings, **more}
        first, again = client.reply(**asked), client.reply(**asked)
        assert first.started.source != pb.CACHE_SOURCE_REPLAY
        assert again.started.source == pb.CACHE_SOURCE_REPLAY
        assert again.text == first.text
        seen.append(first.finished.snapshot.version)
    assert seen == list(range(1, len(seen) + 1))


@pytest.mark.long(2)
def test_a_reply_that_repeats_itself_is_drafted_and_counted(tiny_client: InferenceClient) -> None:
    asked: dict[str, Any] = {"prompt": "Say it.", "regex": "(The door's code is 48213[.] ){30}", "max_tokens": 120}
    tried = tiny_client.reply(**asked, sampling={"most_drafts": 16})
    plain = tiny_client.reply(**asked, sampling={"most_drafts": 0})
    assert tried.text == plain.text
    assert 0 < tried.finished.usage.accepted_draft_tokens <= tried.finished.usage.drafted_tokens
    assert plain.finished.usage.drafted_tokens == 0
