"""A memory that outgrows its context: refused, shortened by its oldest messages, or summed up before."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, Reply, message
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2 as pb

from tests.made_models.messages import by_user
from tests.made_models.remembered import token_ids
from tests.running.system_fixtures import House, running_house

CONTEXT = 320
GREEDY = {"max_tokens": 24}
REFUSE = pb.OnFull(policy=pb.ON_FULL_POLICY_REFUSE)
DROP = pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST)
# A question of the shipped model's own world: its reply is the fact.
SUMMARIZE = pb.OnFull(policy=pb.ON_FULL_POLICY_SUMMARIZE, summary_request="Where does Velora live?")
SYSTEM = {"role": "system", "content": "You are Ada."}
NAMES = ("Velora", "Tamsik", "Moran", "Delis", "Karu", "Sovi", "Belor", "Ranik") * 6
ONE_EACH = [
    (f"{name}'s locker number is {1234 + 177 * number}.", f"What is {name}'s locker number?")
    for number, name in enumerate(NAMES)
]
# Two in each turn, so that a memory is full after few.
FACTS = [
    (f"{first} {second}", asked) for (first, _), (second, asked) in zip(ONE_EACH[::2], ONE_EACH[1::2], strict=True)
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    options = ("--context-tokens", str(CONTEXT))
    with running_house(tmp_path_factory.mktemp("small"), engine_options=options) as house:
        yield house


@pytest.fixture
def client(house: House) -> Iterator[InferenceClient]:
    with house.client() as client:
        yield client


def say(client: InferenceClient, agent: str, text: str, **options: Any) -> Reply:
    return client.reply(agent_id=agent, append_messages=by_user(text), sampling=GREEDY, **options)


def begin(client: InferenceClient, agent: str) -> None:
    client.reply(agent_id=agent, messages=[SYSTEM, *by_user("Velora lives in Tamsik.")], sampling=GREEDY)


def remembered(house: House, agent: str, version: int | None = None) -> Any:
    with house.store_client() as store:
        return manifests.parse(store.get_snapshot(agent, version=version)[1])


def as_told(client: InferenceClient, house: House, agent: str, question: str) -> Reply:
    """The reply of a turn without a memory to what the agent remembers and the question."""
    known = [message(each.role, each.content) for each in remembered(house, agent).messages]
    return client.reply(messages=[*known, message("user", question)], sampling=GREEDY)


def fill(client: InferenceClient, agent: str, on_full: pb.OnFull, facts: list[tuple[str, str]]) -> list[Reply]:
    return [say(client, agent, told, on_full=on_full) for told, _ in facts]


# A summary is made by the model, which is asked for it again and again best where it was told little at once.
@pytest.mark.long(12)
@pytest.mark.parametrize(
    ("on_full", "times", "facts"), [(DROP, 2, FACTS[:16]), (SUMMARIZE, 2, ONE_EACH[:28])], ids=["drop", "summarize"]
)
def test_several_times_its_context_is_never_refused_and_the_next_turn_is_hot(
    house: House,
    client: InferenceClient,
    new_agent: Callable[[], str],
    on_full: pb.OnFull,
    times: int,
    facts: list[tuple[str, str]],
) -> None:
    agent = new_agent()
    begin(client, agent)
    said = fill(client, agent, on_full, facts)
    computed = [reply.started.prompt_tokens - reply.started.cached_tokens for reply in said]
    grown = sum(computed) + sum(reply.finished.usage.completion_tokens for reply in said)
    assert grown > times * CONTEXT, grown
    shortened = [number for number, reply in enumerate(said[:-1]) if reply.finished.HasField("shortening")]
    assert len(shortened) > 3
    for number in shortened:
        before, after = said[number].finished, said[number + 1].started
        assert not before.shortening.before_reply
        assert before.memory_tokens > 0.8 * before.context_tokens == 0.8 * CONTEXT
        assert (after.source, after.continuation) == (pb.CACHE_SOURCE_HOT, pb.CONTINUATION_EXTENDED)
        assert after.prompt_tokens < 0.7 * CONTEXT
        assert computed[number + 1] <= max(computed[number - 1], computed[number]) + 8, "only what is new"
    # The newest are known, and what is computed is what a turn without a memory computes.
    kept = remembered(house, agent)
    line = client.get_agent(agent).lines[0]
    assert (line.token_count, line.context_tokens) == (len(token_ids(kept)), CONTEXT)
    assert kept.messages[0].content == SYSTEM["content"]
    for told, question in facts[-3:]:
        answer = say(client, agent, question, memory_mode=pb.MEMORY_MODE_READ_ONLY)
        assert answer.text.split()[-1] == told.split()[-1], question
        assert answer.token_ids == as_told(client, house, agent, question).token_ids
    # What was told first is known where the agent was asked for it in time.
    first = say(client, agent, "Where does Velora live?", memory_mode=pb.MEMORY_MODE_READ_ONLY)
    assert ("Tamsik" in first.text) == (on_full is SUMMARIZE), first.text
    dropped = sum(said[number].finished.shortening.dropped_messages for number in shortened)
    assert kept.shortened.dropped_messages == dropped
    assert kept.shortened.has_summary == (on_full is SUMMARIZE)


@pytest.mark.long(4)
def test_without_it_a_full_memory_is_refused_and_stays(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    begin(client, agent)
    with pytest.raises(errors.ResourceExhausted) as full:
        fill(client, agent, REFUSE, FACTS)
    assert full.value.reason == "CONTEXT_EXCEEDED"
    known = remembered(house, agent)
    assert len(known.token_ids) > 0.8 * CONTEXT
    assert known.messages[1].content == "Velora lives in Tamsik."
    assert not known.HasField("shortened")


@pytest.mark.long(2)
def test_the_longer_version_stays_in_history_and_a_killed_house_brings_the_shorter_back(
    tmp_path: Path,
) -> None:
    with running_house(tmp_path, engine_options=("--context-tokens", str(CONTEXT))) as house, house.client() as client:
        begin(client, "ada")
        number, reply = next(
            (number, reply)
            for number, (told, _) in enumerate(FACTS)
            if (reply := say(client, "ada", told, on_full=DROP)).finished.HasField("shortening")
        )
        version = reply.finished.snapshot.version
        long = remembered(house, "ada", version)
        say(client, "ada", FACTS[number][1], memory_mode=pb.MEMORY_MODE_READ_ONLY)  # waits for the shorter one
        short = remembered(house, "ada")
        shortening = reply.finished.shortening
        assert len(short.messages) == shortening.kept_messages == len(long.messages) - shortening.dropped_messages
        assert list(short.messages[1:]) == list(long.messages[1 + shortening.dropped_messages :])
        assert short.turn.reply == long.turn.reply == reply.text
        assert short.shortened.is_after_turn
        # The reply is computed again with the tokens that it had.
        assert token_ids(short)[short.turn.prompt_tokens :] == token_ids(long)[long.turn.prompt_tokens :]
        house.restart()
        back = say(client, "ada", FACTS[number][1], expected_version=version)
        assert (back.started.source, back.started.parent_version) == (pb.CACHE_SOURCE_WARM, version + 1)
        assert back.started.cached_tokens >= len(short.token_ids) - 1
        assert back.text.split()[-1] == FACTS[number][0].split()[-1]
        assert not remembered(house, "ada").shortened.is_after_turn


@pytest.mark.long(4)
def test_a_caller_that_names_versions_or_asks_again_notices_nothing(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, version, shortened = new_agent(), 1, 0
    begin(client, agent)
    for number, (told, _) in enumerate(FACTS):
        if shortened > 1:
            break
        asked: dict[str, Any] = {"on_full": DROP, "expected_version": version, "request_id": f"r{number}"}
        reply = say(client, agent, told, **asked)
        again = say(client, agent, told, **asked)
        assert (again.started.source, again.text) == (pb.CACHE_SOURCE_REPLAY, reply.text)
        assert again.token_ids == reply.token_ids
        shortened += reply.finished.HasField("shortening")
        version = reply.finished.snapshot.version
    assert shortened > 1


@pytest.mark.long(2)
def test_a_client_that_sends_everything_each_time_goes_on_with_what_is_kept(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, told = new_agent(), [SYSTEM, *by_user("Velora lives in Tamsik.")]
    shortened = 0
    for fact, _ in FACTS:
        if shortened > 1:
            break
        reply = client.reply(agent_id=agent, messages=told, on_full=SUMMARIZE, sampling=GREEDY)
        if shortened:
            assert reply.started.continuation == pb.CONTINUATION_EXTENDED
            assert reply.started.prompt_tokens - reply.started.cached_tokens < 60
        shortened += reply.finished.HasField("shortening")
        told += [{"role": "assistant", "content": reply.text}, *by_user(fact)]
    assert shortened > 1
    client.reply(agent_id=agent, messages=[SYSTEM, *by_user("Who are you?")], sampling=GREEDY)  # another conversation
    warmed = client.warm(agent_id=agent, messages=told)
    assert warmed.tokens < CONTEXT, "as its agent has it"


def test_one_long_question_leaves_out_the_old_before_the_reply_unless_it_is_too_long_itself(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    begin(client, agent)
    fill(client, agent, DROP, FACTS[:4])
    long = "It rains. " * 24
    reply = say(client, agent, f"{long}Delis's locker number is 7777.", on_full=DROP)
    assert reply.finished.shortening.before_reply
    assert reply.started.continuation == pb.CONTINUATION_EXTENDED
    assert "7777" in say(client, agent, "What is Delis's locker number?", on_full=DROP).text
    with pytest.raises(errors.ResourceExhausted) as too_long:
        say(client, agent, "It rains. " * 200, on_full=DROP)
    assert too_long.value.reason == "CONTEXT_EXCEEDED"


@pytest.mark.long(3)
def test_a_question_with_many_tool_calls_stays_and_the_oldest_calls_go_with_their_results(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, asked = new_agent(), "Open all lockers."
    told: list[Any] = [SYSTEM, *by_user(asked)]
    client.reply(agent_id=agent, messages=told, sampling=GREEDY, on_full=DROP)
    is_short = False
    for number, (fact, _) in enumerate(ONE_EACH[:16]):
        call = {"id": f"c{number}", "name": "open", "arguments_json": f'{{"locker": {number}}}'}
        step = [message("assistant", tool_calls=[call]), message("tool", fact, tool_call_id=f"c{number}")]
        told = [*told, *step]
        # Half of the time as a client does that knows nothing of agents.
        given = {"messages": told} if number % 2 else {"append_messages": step}
        reply = client.reply(agent_id=agent, sampling=GREEDY, on_full=DROP, **given)
        told.append({"role": "assistant", "content": reply.text})
        assert not is_short or reply.started.continuation == pb.CONTINUATION_EXTENDED
        is_short = is_short or reply.finished.HasField("shortening")
        kept = list(remembered(house, agent).messages)
        assert [each.content for each in kept[:2]] == [SYSTEM["content"], asked]
        calls = [call.id for each in kept for call in each.tool_calls]
        assert calls == [each.tool_call_id for each in kept if each.role == "tool"]
        assert calls[-1] == f"c{number}"
    assert is_short
    assert len(calls) < 10
    left_out = remembered(house, agent).shortened
    assert left_out.dropped_behind_question == left_out.dropped_messages == len(told) - len(kept)


@pytest.mark.long(4)
def test_a_turn_that_is_cut_before_its_reply_keeps_the_summary(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    filled(client, agent, SUMMARIZE, ONE_EACH)
    reply = say(client, agent, f"{'It rains. ' * 32}Delis's locker number is 7777.", on_full=SUMMARIZE)
    assert reply.finished.shortening.before_reply
    known = remembered(house, agent, reply.finished.snapshot.version)
    assert known.shortened.has_summary
    assert known.messages[1].content == "Remember: Velora lives in Tamsik."


def test_a_label_holds_while_the_store_is_away(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    begin(client, agent)
    with house.store_client() as store:
        store.update_agent(agent, labels={"kvasir.on_full": "drop_oldest"})
    for told, _ in FACTS[:3]:
        say(client, agent, told)
    house.store.kill()
    try:
        reply = say(client, agent, f"{'It rains. ' * 24}Delis's locker number is 7777.")
    finally:
        house.repair()
    assert reply.finished.shortening.before_reply


def filled(client: InferenceClient, agent: str, on_full: pb.OnFull, facts: list[tuple[str, str]] = FACTS) -> Reply:
    """The reply after which the agent's memory becomes shorter."""
    begin(client, agent)
    said = (say(client, agent, told, on_full=on_full, request_id=f"{agent}-{told[:5]}") for told, _ in facts)
    return next(reply for reply in said if reply.finished.HasField("shortening"))


def test_a_rollback_while_the_summary_is_made_stays(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    version = filled(client, agent, SUMMARIZE).finished.snapshot.version
    with house.store_client() as store:
        back = store.rollback_agent(agent, version - 2)
    say(client, agent, "Who are you?", memory_mode=pb.MEMORY_MODE_READ_ONLY)  # behind whatever goes on
    line = client.get_agent(agent).lines[0]
    assert (line.version, line.manifest) == (back.version, back.manifest)
    assert back.version > version


def test_a_turn_is_over_once_its_reader_has_its_end(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    """And not once the memory is shorter."""
    request_id = filled(client, new_agent(), SUMMARIZE).started.request_id
    assert request_id not in [turn.request_id for turn in client.list_turns()]
    with pytest.raises(errors.NotFound):
        client.cancel_turn(request_id)


def test_what_is_kept_leaves_room_for_another_turn_that_requests_as_long_a_reply(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    begin(client, agent)
    asked: dict[str, Any] = {"on_full": DROP, "sampling": {"max_tokens": CONTEXT * 2 // 3, "temperature": 0}}
    said = [client.reply(agent_id=agent, append_messages=by_user(told), **asked) for told, _ in FACTS[:8]]
    shortened = [reply.finished.HasField("shortening") for reply in said]
    assert any(shortened)
    assert not any(first and second for first, second in pairwise(shortened))


@pytest.mark.long(4)
def test_an_agents_label_says_it_for_all_its_turns_and_a_turn_may_say_otherwise(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    begin(client, agent)
    with house.store_client() as store:
        for wrong in ("forget", "drop_oldest:2", "drop_oldest:x"):
            with pytest.raises(errors.InvalidArgument, match=r"labels\.kvasir\.on_full"):
                store.update_agent(agent, labels={"kvasir.on_full": wrong})
        store.update_agent(agent, labels={"kvasir.on_full": "drop_oldest:0.3"})
    replies = (say(client, agent, told) for told, _ in FACTS)
    next(reply for reply in replies if reply.finished.HasField("shortening"))
    assert next(replies).started.prompt_tokens < 0.5 * CONTEXT
    with pytest.raises(errors.ResourceExhausted):
        fill(client, agent, REFUSE, FACTS)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("on_full.policy", {"on_full": pb.OnFull()}),
        ("on_full.keep", {"on_full": pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST, keep=0.9)}),
        ("on_full.keep", {"on_full": pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST, keep=float("nan"))}),
        ("on_full.summary_request", {"on_full": pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST, summary_request="?")}),
        (
            "on_full.summary_request",
            {"on_full": pb.OnFull(policy=pb.ON_FULL_POLICY_SUMMARIZE, summary_request="?" * 5000)},
        ),
        ("on_full", {"on_full": DROP, "agent_id": ""}),
    ],
)
def test_a_wrong_setting_is_refused_by_name(client: InferenceClient, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        client.reply(messages=by_user("x"), sampling=GREEDY, **{"agent_id": "wrong", **options})
    assert refused.value.field == field
