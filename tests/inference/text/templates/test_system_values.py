"""Dates and clocks of systems texts: which are the same at another time, and what the model is told of the newest."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir import clocks
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.volatile import SYSTEM_CLOCK, SYSTEM_DATE

from inference_svc.text.templates.system_values import kept_values, without_notes

Message = manifest_pb2.Message
BOTH = (SYSTEM_DATE, SYSTEM_CLOCK)
DATES = [
    *("2026-11-24", "2026/1/4", "24.11.2026", "11/24/2026", "Nov 24, 2026", "November 24th, 2026", "24 November 2026"),
    *("Tuesday, November 24, 2026", "Tue Nov 24", "the 24th of November 2026", "2026年11月24日", "Wednesday"),
]
CLOCKS = ["10:47", "9:05 PM", "14:03:22", "14:03:22.123+01:00", "07:00 UTC", "1764012345", "1764012345123"]
NO_TIMES = [
    *("2.1.330", "10.0.0.1:8642", "16:9", "3 of 10", "May I?", "1.2.3", "a-b-c", "Mr. March", "0800 12 34"),
    *("src/main.py:12", "v2026", "12345678901234567890"),
]


def system(content: str) -> Message:
    return Message(role="system", content=content)


def user(content: str) -> Message:
    return Message(role="user", content=content)


def reply(content: str) -> Message:
    return Message(role="assistant", content=content)


def texts(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages]


@pytest.mark.parametrize("date", DATES)
def test_dates_are_found(date: str) -> None:
    assert clocks.without_dates(f"Today is {date}.").replace("the \0", "\0") == "Today is \0."
    assert clocks.without_clocks(f"Today is {date}.") == f"Today is {date}."


@pytest.mark.parametrize("clock", CLOCKS)
def test_clocks_are_found(clock: str) -> None:
    assert clocks.without_clocks(f"Now it is {clock}, and late.") == "Now it is \0, and late."
    assert clocks.without_dates(f"Now it is {clock}, and late.") == f"Now it is {clock}, and late."


@pytest.mark.parametrize("text", NO_TIMES)
def test_what_is_no_time_stays(text: str) -> None:
    assert clocks.without_times(f"Use {text} here.") == f"Use {text} here."


@pytest.mark.long(3)
@given(st.text(max_size=80))
def test_a_text_without_digits_and_days_stays(text: str) -> None:
    plain = "".join(char for char in text if not char.isdigit()).replace("day", "")
    assert clocks.without_times(plain) == plain


def test_the_first_values_stay_and_the_newest_are_reported_once() -> None:
    first = (system("Be kind. It is 10:30 on 2026-11-24. Think."), user("Hello"))
    memory: list[Message] = [*first, reply("Hi.")]
    later = (system("Be kind. It is 10:47 on 2026-11-24. Think."), user("Hello"), reply("Hi."), user("And now?"))
    kept = kept_values(later, memory, BOTH)
    assert texts(kept.messages) == [first[0].content, "Hello", "Hi.", "And now?"]
    assert kept.note is not None
    assert (kept.note.content, kept.rules) == ("It is 10:47 on 2026-11-24.", {SYSTEM_CLOCK})
    memory = [*kept.messages, kept.note, reply("Late.")]
    same = kept_values((*later, reply("Late."), user("Thanks")), memory, BOTH)
    assert texts(same.messages) == texts([*memory, user("Thanks")])
    assert same.note is None
    midnight = system(later[0].content.replace("10:47", "0:10").replace("24", "25"))
    new = kept_values((midnight, *later[1:], reply("Late."), user("Thanks")), memory, BOTH)
    assert new.note is not None
    assert (new.note.content, new.rules) == ("It is 0:10 on 2026-11-25.", set(BOTH))
    back = kept_values((*first, *later[2:], reply("Late."), user("Thanks")), memory, BOTH)
    assert back.note is not None
    assert back.note.content == "It is 10:30 on 2026-11-24."


def test_a_rule_alone_keeps_its_own_and_other_words_are_no_times() -> None:
    memory = [system("It is 10:30 on 2026-11-24."), user("Hello"), reply("Hi.")]
    for text, rules in (
        ("It is 10:30 on 2026-11-25.", (SYSTEM_CLOCK,)),
        ("It is 10:31 on 2026-11-24.", (SYSTEM_DATE,)),
        ("It was 10:31 on 2026-11-24.", BOTH),
    ):
        given = (system(text), *memory[1:], user("And?"))
        kept = kept_values(given, memory, rules)
        assert (kept.messages, kept.note, kept.rules) == (given, None, frozenset())


def test_users_words_never_change() -> None:
    memory = [system("Be kind."), user("It is 10:30."), reply("Hi."), system("At 9:00."), user("Go on."), reply("Yes.")]
    given = (system("Be kind."), user("It is 10:31."), reply("Hi."), system("At 9:01."), user("Go on."))
    assert kept_values(given, memory, BOTH).messages == given
    later = (*memory[:3], system("At 9:01."), *memory[4:], user("And?"))
    kept = kept_values(later, memory, BOTH)
    assert texts(kept.messages) == texts([*memory, user("And?")])
    assert kept.note is not None
    assert kept.note.content == "At 9:01."


def test_a_rewound_conversation_has_the_notes_before_its_point() -> None:
    talk = [system("It is 1:00."), user("One"), reply("1"), user("Two"), reply("2"), user("Three"), reply("3")]
    note = Message(role="system", content="It is 2:00.", is_note=True)
    memory = [*talk[:4], note, *talk[4:]]
    now = system("It is 2:00.")
    assert kept_values((now, *talk[1:4]), memory, BOTH).messages == tuple(talk[:4])
    assert kept_values((now, *talk[1:4]), memory, BOTH).note == note
    assert kept_values((now, *talk[1:6]), memory, BOTH).messages == tuple(memory[:7])
    other = (now, *talk[1:3], user("Else"), reply("E"), user("More"))
    assert without_notes(kept_values(other, memory, BOTH).messages) == kept_values(other, memory, BOTH).messages


@given(st.integers(0, 23), st.integers(0, 23), st.integers(0, 59), st.integers(1, 28), st.integers(1, 28), st.data())
def test_notes_are_short_and_say_the_newest(
    hour: int, later: int, minute: int, day: int, next_day: int, data: st.DataObject
) -> None:
    words = data.draw(st.lists(st.sampled_from(["ship", "a", "of", "wind,"]), max_size=300).map(" ".join))
    text = words + " Now {}:{:02} of 2026-11-{:02} " + words
    memory = [system(text.format(hour, minute, day)), user("Hello"), reply("Hi.")]
    given = (system(text.format(later, minute, next_day)), *memory[1:], user("And?"))
    kept = kept_values(given, memory, BOTH)
    assert kept.messages == (*memory, user("And?"))
    assert (kept.note is None) == (given[0] == memory[0])
    if kept.note is not None:
        assert len(kept.note.content) <= 200
        assert f"{later}:{minute:02} of 2026-11-{next_day:02}" in kept.note.content
