"""Thoughts over the turns of a running engine: told, remembered, sent back by callers, dropped by templates."""

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.errors import InvalidArgument
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.thinking_models import THINK, THOUGHT, write_thinking_model
from tests.running.system_fixtures import House, running_house

ASKED = [{"role": "user", "content": "How much does a lamp cost? Look it up, and think about it first."}]
RESULT = {"role": "tool", "content": "7 coins", "name": "shop_price"}
# Thoughts end at some time, and the reply by its length.
UNENDING = {"max_tokens": 40, "logit_bias": {THINK: -100.0, THOUGHT: -100.0, 2: -100.0, 1022: -100.0}}
ENDING = {"max_tokens": 48, "temperature": 1.0, "seed": 3, "logit_bias": {THOUGHT: 8.0, 2: -100.0, 1022: -100.0}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Thoughts stay behind the last question, and are dropped before it."""
    model = write_thinking_model(tmp_path_factory.mktemp("model") / "thinking", "deepseek-v3.2")
    with running_house(tmp_path_factory.mktemp("house"), model) as house:
        yield house


@pytest.fixture
def ada(thinking: House) -> Iterator[InferenceClient]:
    with thinking.client() as client:
        yield client


def remembered(client: InferenceClient, agent: str) -> manifest_pb2.Manifest:
    return manifests.parse(client.get_snapshot(agent)[1])


def begun(client: InferenceClient, agent: str, **more: Any) -> Reply:
    """A reply whose thoughts end once."""
    more = {"thinking": pb.Thinking(budget_tokens=9), "sampling": UNENDING, **more}
    reply = client.reply(agent_id=agent, messages=ASKED, **more)
    assert reply.text
    assert reply.reasoning_text
    return reply


def sent_back(reply: Reply) -> dict[str, Any]:
    """As callers repeat what they were told."""
    return {"role": "assistant", "content": reply.text, "reasoning": reply.reasoning_text}


@pytest.mark.long(5)
def test_thoughts_are_distinguished_and_remembered_apart(ada: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    reply = ada.reply(agent_id=agent, messages=ASKED, sampling=ENDING)
    assert reply.text
    assert reply.reasoning_text
    said = remembered(ada, agent)
    raw = ada.reply(prompt=said.text[: said.turn.prompt_chars], sampling=ENDING)
    assert (raw.reasoning_text, raw.token_ids) == ("", reply.token_ids)
    assert raw.text == said.turn.reply == f"{reply.reasoning_text}</think>{reply.text}"
    assert (said.messages[-1].content, said.messages[-1].reasoning) == (reply.text, reply.reasoning_text)
    assert said.messages[-1].is_reply


@pytest.mark.long(2)
def test_in_a_tool_loop_thoughts_that_come_back_equal_those_that_never_left(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    """Token for token, and nothing is computed twice."""
    stays, returns, strips = new_agent(), new_agent(), new_agent()
    replies = {agent: begun(ada, agent) for agent in (stays, returns, strips)}
    history = [*ASKED, sent_back(replies[returns]), RESULT]
    never_left = ada.reply(agent_id=stays, append_messages=[RESULT], sampling=ENDING)
    came_back = ada.reply(agent_id=returns, messages=history, sampling=ENDING)
    assert never_left.token_ids == came_back.token_ids
    for reply in (never_left, came_back):
        assert reply.started.cached_tokens == replies[stays].finished.memory_tokens - 1
        assert reply.started.match == pb.PREFIX_MATCH_EXTEND
    stripped = [*ASKED, {"role": "assistant", "content": replies[strips].text}, RESULT]
    without = ada.reply(agent_id=strips, messages=stripped, sampling=ENDING)
    assert without.started.match == pb.PREFIX_MATCH_DIVERGE
    assert without.started.cached_tokens == replies[strips].started.prompt_tokens


@pytest.mark.long(3)
def test_where_the_template_drops_thoughts_the_prompt_is_a_cold_one_and_all_before_them_is_reused(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, other = new_agent(), new_agent()
    first, _ = begun(ada, agent), begun(ada, other)
    question = {"role": "user", "content": "And a lantern?"}
    goes_on = ada.reply(agent_id=agent, append_messages=[question], sampling=ENDING)
    whole = ada.reply(agent_id=other, messages=[*ASKED, sent_back(first), question], sampling=ENDING)
    cold = ada.reply(messages=[*ASKED, {"role": "assistant", "content": first.text}, question], sampling=ENDING)
    assert goes_on.token_ids == whole.token_ids == cold.token_ids
    assert goes_on.started.prompt_tokens == whole.started.prompt_tokens == cold.started.prompt_tokens
    for reply in (goes_on, whole):
        assert reply.started.source == pb.CACHE_SOURCE_HOT
        # All but the marker that opened the thoughts.
        assert reply.started.cached_tokens == first.started.prompt_tokens - 1
    assert remembered(ada, agent).text == remembered(ada, other).text


@pytest.mark.long(2)
def test_a_retry_tells_the_thoughts_again_and_other_thoughts_are_another_turn(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    first, again = (begun(ada, agent, request_id="thought") for _ in range(2))
    assert again.started.source == pb.CACHE_SOURCE_REPLAY
    assert (again.text, again.reasoning_text) == (first.text, first.reasoning_text)
    histories = [[*ASKED, {**sent_back(first), "reasoning": text}, RESULT] for text in ("One.", "Two.")]
    replies = [ada.reply(agent_id=agent, messages=each, request_id="r", sampling=ENDING) for each in histories]
    assert all(reply.started.source != pb.CACHE_SOURCE_REPLAY for reply in replies)


@pytest.mark.long(3)
def test_a_budget_ends_the_thoughts_by_the_templates_end_and_the_reply_goes_on(
    ada: InferenceClient, new_agent: Callable[[], str]
) -> None:
    """Counted to the token; a tool loop extends the memory of such a reply too."""
    for budget in (0, 1, 9):
        agent, thinking = new_agent(), pb.Thinking(budget_tokens=budget)
        reply = ada.reply(agent_id=agent, messages=ASKED, thinking=thinking, sampling=UNENDING)
        assert reply.token_ids.index(THOUGHT) == budget
        assert len(reply.token_ids) == UNENDING["max_tokens"]
        assert bool(reply.reasoning_text) == bool(budget)
        assert reply.text
        after = ada.reply(agent_id=agent, messages=[*ASKED, sent_back(reply), RESULT], sampling=UNENDING)
        assert after.started.cached_tokens == reply.finished.memory_tokens - 1


def test_a_budget_beside_other_turns_changes_no_token_of_any(ada: InferenceClient, thinking: House) -> None:
    asked: list[dict[str, Any]] = [
        {"messages": ASKED, "sampling": UNENDING, "thinking": pb.Thinking(budget_tokens=number)} for number in (2, 5)
    ]
    asked += [{"messages": ASKED, "sampling": ENDING}, {"messages": ASKED, "sampling": {"max_tokens": 40}}]
    alone = [ada.reply(**each).token_ids for each in asked]
    with futures.ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: ada.reply(**each).token_ids, asked))
    assert together == alone


def test_thinking_off_is_another_prompt_and_shows_as_one(ada: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent, off = new_agent(), pb.Thinking(mode=pb.THINKING_MODE_OFF)
    first = begun(ada, agent)
    without = ada.reply(agent_id=agent, messages=ASKED, thinking=off, sampling=ENDING)
    assert without.started.match == pb.PREFIX_MATCH_DIVERGE
    assert without.reasoning_text == ""
    said = remembered(ada, agent)
    assert said.text[: said.turn.prompt_chars].endswith("</think>")
    assert (said.messages[-1].content, said.messages[-1].reasoning) == (without.text, "")
    after = ada.reply(agent_id=agent, append_messages=[RESULT], thinking=off, sampling=ENDING)
    assert after.started.cached_tokens == without.finished.memory_tokens - 1  # its last token has no KV yet
    by_name = ada.reply(messages=ASKED, template_settings={"thinking": False}, sampling=ENDING)
    assert by_name.token_ids == without.token_ids != first.token_ids


def test_a_retry_with_another_budget_is_another_turn(ada: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent = new_agent()
    replies = [
        begun(ada, agent, request_id="budget", thinking=pb.Thinking(budget_tokens=budget)) for budget in (3, 4, 4)
    ]
    is_replayed = [reply.started.source == pb.CACHE_SOURCE_REPLAY for reply in replies]
    assert is_replayed == [False, False, True]
    assert replies[1].reasoning_text == replies[2].reasoning_text


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"thinking": pb.Thinking(effort="low")}, "thinking.effort"),
        ({"thinking": pb.Thinking(budget_tokens=3), "regex": "a+"}, "thinking.budget_tokens"),
        ({"template_settings": {"magic": 1}}, "template_settings.magic"),
        ({"template_settings": {"messages": "x"}}, "template_settings.messages"),
        ({"template_settings": {"tokenize": True}}, "template_settings.tokenize"),
    ],
)
def test_what_the_model_cannot_apply_is_refused_or_left_out_and_named(
    ada: InferenceClient, asked: dict[str, Any], field: str
) -> None:
    given = {"messages": ASKED, "sampling": {"max_tokens": 2}, **asked}
    with pytest.raises(InvalidArgument) as refused:
        ada.reply(**given)
    assert refused.value.field == field
    reply = ada.reply(**given, ignore_unread_settings=True)
    assert list(reply.started.ignored_settings) == [field]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"thinking": pb.Thinking(budget_tokens=-1)}, "thinking.budget_tokens"),
        ({"thinking": pb.Thinking(budget_tokens=1, mode=pb.THINKING_MODE_OFF)}, "thinking.budget_tokens"),
        ({"thinking": pb.Thinking(effort="a little")}, "thinking.effort"),
        ({"thinking": pb.Thinking(mode=9)}, "thinking.mode"),  # type: ignore[arg-type]
        ({"template_settings": {"a b": 1}}, "template_settings"),
        ({"template_settings": {"thinking": "x" * 300}}, "template_settings.thinking"),
        ({"template_settings": {f"s{number}": 1 for number in range(17)}}, "template_settings"),
        ({"template_settings": {"thinking": float("nan")}}, "template_settings.thinking"),
    ],
)
def test_settings_out_of_range_are_refused_by_every_service(
    ada: InferenceClient, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ada.reply(messages=ASKED, ignore_unread_settings=True, **asked)
    assert refused.value.field == field
    with pytest.raises(InvalidArgument, match="only with messages"):
        ada.reply(prompt="x", thinking=pb.Thinking(budget_tokens=1))


def test_only_an_assistants_message_has_thoughts(ada: InferenceClient) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ada.reply(messages=[{**ASKED[0], "reasoning": "hm"}])
    assert refused.value.field == "messages.messages[0].reasoning"
