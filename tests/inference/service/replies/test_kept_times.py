"""Dates and clocks of systems' texts cost no memory where that is asked for: the first values stay, and the newest
follow the history. The reply is that of a conversation whose messages said just that.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.volatile import LABEL, SYSTEM_CLOCK, SYSTEM_DATE, TOOLS_ORDER

from tests.inference.service.replies.test_moved_tools import TOOLS, moved
from tests.made_models.messages import user
from tests.made_models.sampling import sampled
from tests.running.system_fixtures import House, running_house

GREEDY = {"max_tokens": 8}
RULES = pb.VolatileRules(names=[SYSTEM_CLOCK, SYSTEM_DATE, TOOLS_ORDER])
SYSTEM = "You look after a harbour. Now it is {}. Be careful with what you say. " + "Ships come and go. " * 20


def system(time: str) -> dict[str, str]:
    return {"role": "system", "content": SYSTEM.format(time)}


def note(time: str) -> dict[str, str]:
    return {"role": "system", "content": f"Now it is {time}."}


def assistant(reply: Reply) -> dict[str, str]:
    return {"role": "assistant", "content": reply.text}


def say(client: InferenceClient, agent: str, messages: list[dict[str, str]], **more: Any) -> Reply:
    return client.reply(agent_id=agent, messages=messages, sampling=GREEDY, **{"volatile": RULES} | more)


def remembered(client: InferenceClient, agent: str) -> manifest_pb2.Manifest:
    return manifest.parse(client.get_snapshot(agent)[1])


def goes_on_whole(before: Reply, reply: Reply) -> None:
    assert reply.started.cached_tokens > before.finished.memory_tokens - 4  # a reply may end inside a character
    assert not reply.started.HasField("difference")


@pytest.mark.long(6)
def test_turns_at_other_times_are_those_of_a_talk_that_says_so(own_house: House) -> None:
    with own_house.client() as client:
        said = [user("Which ships lie at the quay?")]
        first = say(client, "ada", [system("10:30"), *said])
        assert not first.started.kept
        said += [assistant(first), user("And which leave?")]
        second = say(client, "ada", [system("10:47"), *said])
        assert list(second.started.kept) == [SYSTEM_CLOCK]
        goes_on_whole(first, second)
        seconds = remembered(client, "ada")
        own_house.restart()
        said += [assistant(second), user("And which stay?")]
        third = say(client, "ada", [system("10:47"), *said])
        assert third.started.source == pb.CACHE_SOURCE_WARM
        goes_on_whole(second, third)
        thirds = remembered(client, "ada")
        said += [assistant(third), user("Thanks.")]
        fourth = say(client, "ada", [system("11:02, on 2026-11-24"), *said])
        assert fourth.started.HasField("difference")  # the system says more than another time
        talk = remembered(client, "ada")
        notes = [message.content for message in talk.messages if message.is_note]
        assert notes == ["Now it is 10:47.", "Now it is 11:02, on 2026-11-24."]

        told = [system("10:30"), user("Which ships lie at the quay?"), assistant(first), user("And which leave?")]
        told += [note("10:47")]
        for number, (memory, reply) in enumerate(((seconds, second), (thirds, third))):
            say(client, f"twin {number}", told, volatile=pb.VolatileRules())
            twin = remembered(client, f"twin {number}")
            assert memory.text[: memory.turn.prompt_chars] == twin.text[: twin.turn.prompt_chars]
            told += [assistant(reply), user("And which stay?")]


def test_without_the_rules_the_miss_names_them(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    agent, said = new_agent(), [user("Hello")]
    said += [assistant(say(client, agent, [system("10:30 on 2026-11-24"), *said])), user("And?")]
    for time, what, rules in (
        ("10:31 on 2026-11-24", "clock", [SYSTEM_CLOCK]),
        ("10:30 on 2026-11-25", "date", [SYSTEM_DATE]),
        ("10:31 on 2026-11-25", "date and clock", [SYSTEM_CLOCK, SYSTEM_DATE]),
    ):
        aside = say(
            client, agent, [system(time), *said], volatile=None, memory_mode=pb.MEMORY_MODE_READ_ONLY
        ).started.difference
        assert (aside.message, aside.role, aside.what, list(aside.rules)) == (0, "system", what, rules)


def test_a_users_date_is_named_and_stays_and_the_conversation_goes_on(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent = new_agent()
    said = [system("10:30"), user("Today is 2026-11-23."), user("Hello")]
    first = say(client, agent, said, volatile=None)
    said[1] = user("Today is 2026-11-24.")
    alone = say(client, agent, said, volatile=None)
    assert alone.started.continuation == pb.CONTINUATION_BRANCHED  # nothing says that it is the same talk
    said = [said[0], user("Today is 2026-11-23."), assistant(first), user("And?")]
    second = say(client, agent, [said[0], said[1], *said[2:]], volatile=None, replace_memory=True)
    said = [said[0], user("Today is 2026-11-24."), *said[2:], assistant(second), user("Thanks.")]
    exact = say(client, agent, said, volatile=pb.VolatileRules(), memory_mode=pb.MEMORY_MODE_READ_ONLY)
    assert exact.started.continuation == pb.CONTINUATION_BRANCHED
    third = say(client, agent, said, volatile=None)
    assert third.started.continuation == pb.CONTINUATION_REWOUND
    place = third.started.difference
    assert (place.message, place.role, place.what, list(place.rules)) == (1, "user", "date", [])
    assert "2026-11-24" in remembered(client, agent).text


def test_a_label_chooses_and_appended_messages_a_fork_and_a_shorter_memory_go_on(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    agent, said = new_agent(), [user("Hello")]
    first = say(client, agent, [system("10:30"), *said])
    with house.store_client() as store:
        store.update_agent(agent, labels={LABEL: f"{SYSTEM_CLOCK},{SYSTEM_DATE}"})
    said += [assistant(first), user("And?")]
    second = say(client, agent, [system("10:47"), *said], volatile=None)
    assert list(second.started.kept) == [SYSTEM_CLOCK]
    appended = client.reply(agent_id=agent, append_messages=[user("More.")], sampling=GREEDY)
    goes_on_whole(second, appended)
    copy = client.fork_agent(agent, new_agent()).agent_id
    said += [assistant(second), user("More."), assistant(appended), user("Thanks.")]
    forked = say(client, copy, [system("10:47"), *said])
    goes_on_whole(appended, forked)
    assert [message.content for message in remembered(client, copy).messages if message.is_note] == ["Now it is 10:47."]


@pytest.mark.long(3)
def test_a_shortened_talk_goes_on_with_its_callers_whole_list(model: Path, tmp_path: Path) -> None:
    said: list[dict[str, str]] = []
    replies: list[Reply] = []
    drop = pb.OnFull(policy=pb.ON_FULL_POLICY_DROP_OLDEST, keep=0.5)
    with running_house(tmp_path, model, engine_options=("--context-tokens", "768")) as house, house.client() as client:
        for number in range(12):
            said += [user(f"Question {number}: " + "what of the ships? " * 8)]
            replies.append(say(client, "ada", [system(f"{10 + number // 2}:30"), *said], on_full=drop))
            said += [assistant(replies[-1])]
        talk = remembered(client, "ada")
    assert any(reply.finished.HasField("shortening") for reply in replies)
    assert all(reply.started.continuation == pb.CONTINUATION_EXTENDED for reply in replies[1:])
    assert sum(reply.started.cached_tokens > 256 for reply in replies) > 9
    kept = [message.content for message in talk.messages if not message.is_note][1:]
    assert kept[:-1] == [each["content"] for each in said[int(talk.shortened.dropped_messages) : -1]]
    assert any(message.is_note for message in talk.messages)


LATER = "{%- if message.role == 'system' and not loop.first %}"
TEMPLATES = {
    "refuses": LATER + "{{- raise_exception('system first') }}{%- endif %}",
    "leaves out": LATER + "{%- continue %}{%- endif %}",
}


@pytest.mark.long(2)
@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_that_takes_no_system_there_is_not_told_and_says_so(form: str, model: Path, tmp_path: Path) -> None:
    strict = shutil.copytree(model, tmp_path / "strict")
    file = strict / "chat_template.jinja"
    loop = "{%- for message in messages %}"
    assert file.read_text().count(loop) == 1
    file.write_text(file.read_text().replace(loop, loop + TEMPLATES[form]))
    with running_house(tmp_path / "house", strict) as house, house.client() as client:
        said = [user("Hello")]
        first = say(client, "ada", [system("10:30"), *said])
        said += [assistant(first), user("And?")]
        second = say(client, "ada", [system("10:47"), *said])
        goes_on_whole(first, second)
        assert (list(second.started.kept), second.started.is_time_untold) == ([SYSTEM_CLOCK], True)
        assert "10:47" not in remembered(client, "ada").text


@pytest.fixture(scope="module")
def exact_house(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Where what is computed token by token has the bits of what is computed at once."""
    with running_house(tmp_path_factory.mktemp("exact"), model, engine_options=("--kv-policy", "fp")) as house:
        yield house


TIMES = st.sampled_from(["10:30", "10:31", "23:59 on 2026-11-24", "0:00 on 2026-11-25", "0:01 on 2026-11-25"])
TURNS = st.lists(st.tuples(TIMES, st.booleans(), st.sampled_from(["", "rewind"])), min_size=2, max_size=4)


@pytest.mark.long(3)
@settings(max_examples=sampled(3, of=100))
@given(TURNS, st.randoms())
def test_reuse_with_rules_is_a_cold_prompt_with_the_same_rules(
    exact_house: House, turns: list[tuple[str, bool, str]], chance: Any
) -> None:
    """Each turn of a talk whose times and tools change equals, token for token, the memory's own prompt without it."""
    agent = f"talk {chance.random()}"
    with exact_house.client() as client:
        said: list[dict[str, str]] = []
        for number, (time, turned, how) in enumerate(turns):
            asked = said[:-2] if how and len(said) > 2 else said
            messages = [system(time), *asked, user(f"Question {number}?")]
            reply = say(client, agent, messages, tools=moved(TOOLS) if turned else TOOLS)
            talk = remembered(client, agent)
            cold = client.reply(prompt=list(talk.token_ids[: talk.turn.prompt_tokens]), sampling=GREEDY)
            assert cold.token_ids == reply.token_ids
            said = [*asked, user(f"Question {number}?"), assistant(reply)]
