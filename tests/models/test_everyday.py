"""Everyday talk of kvasir-tiny's training: every fact can be asked, and no name of evaluation is in it."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inference_svc.model.kvasir_tiny import path
from inference_svc.text.kept_messages import SUMMARY_REQUEST
from tools.kvasir_tiny import rows
from tools.kvasir_tiny.desk import Conversation
from tools.kvasir_tiny.everyday import daily_life, fact, people, spelling, talk, training
from tools.kvasir_tiny.everyday.fact import EverydayFact
from tools.kvasir_tiny.exams import name_exam
from tools.kvasir_tiny.words import Dice

ALL = [fact.OWN_NAME, *(attribute for _, attribute in fact.ATTRIBUTES)]


def conversations(seeds: range, tokens: int) -> Iterator[Conversation]:
    count = rows.encoder_of(path()).count
    return (training.conversation(seed, tokens, count) for seed in seeds)


def made(attribute: fact.Attribute, subject: str) -> EverydayFact:
    dice = Dice(f"{attribute.name} {subject}")
    return fact.make(attribute, subject, dice, spelling.WideNames(dice, held_out=False))


def test_three_hundred_names_are_held_out_of_every_list_and_conversation() -> None:
    held_out = {people.folded(name) for name in people.HELD_OUT_NAMES}
    assert len(held_out) >= name_exam.NAMES == 300
    assert {"mary", "yuki", "tilda"} <= held_out  # what the first edition garbled
    for names in (people.GIVEN_NAMES, people.FAMILY_NAMES, people.TOWNS, people.LONG_TOWNS, spelling.COMMON_WORDS):
        assert held_out.isdisjoint(re.findall(r"\w+", people.folded(" ".join(names))))
    for conversation in conversations(range(150), 600):
        said = people.folded(" ".join(message["content"] for message in conversation.messages))
        assert held_out.isdisjoint(re.findall(r"\w+", said))


def test_the_examination_asks_each_held_out_name_once_where_it_was_told() -> None:
    count = rows.encoder_of(path()).count
    asked = []
    for conversation in name_exam.conversations(300, count):
        for question in conversation.questions:
            assert question.fact
            assert question.told_in is not None
            assert conversation.messages[question.told_in]["content"] == question.fact.told
            asked.append(question.fact.value)
    assert sorted(asked) == sorted(people.HELD_OUT_NAMES[:300])


@pytest.mark.parametrize("attribute", ALL, ids=lambda attribute: attribute.name)
def test_every_question_about_a_fact_has_its_value_or_asks_by_it(attribute: fact.Attribute) -> None:
    for subject in ("", "Anna", "my sister"):
        told = made(attribute, subject)
        assert told.value in told.told
        for number in range(12):
            asked = told.asked(Dice(f"asked {number}"))
            assert told.value in asked.answer
            assert asked.not_told.startswith("I was not told ")
            assert not re.search(r"[{}|]|//", asked.question + asked.answer + asked.not_told + told.told)


def test_an_answer_turns_to_the_one_who_asks() -> None:
    job = fact.make(fact.WORK, "my sister", dice := Dice("job"), spelling.WideNames(dice, held_out=False))
    assert {job.asked(Dice(str(number))).answer for number in range(9)} == {f"Your sister works as {job.value}."}
    questions = {job.asked(Dice(str(number))).question for number in range(40)}
    assert {"What is my sister's job?", "What does my sister do for a living?"} <= questions


def test_a_correction_holds() -> None:
    """Of two tellings of one fact, the last is what can be asked."""
    count = rows.encoder_of(path()).count
    corrected = 0
    for seed in range(20):
        style = replace(daily_life.draw_style(Dice(f"style {seed}"), 300), room=False, foreign_acks=False)
        writer = daily_life.DailyWriter(seed, 300, count, False, style, daily=1.0)
        writer.write()
        before = {each.key: each.value for each, _ in writer.open}
        if writer._correct():
            after = {each.key: each.value for each, _ in writer.open}
            ((key, value),) = set(after.items()) - set(before.items())
            assert before[key] != value
            assert value in writer.messages[-2]["content"]
            corrected += 1
    assert corrected > 5


def test_a_scene_asks_in_the_same_block_for_what_was_told_and_for_what_was_not() -> None:
    count = rows.encoder_of(path()).count
    told = unknown = 0
    for seed in range(10):
        messages = training.scene(seed, 700, count).messages
        for before, asked, answer in zip(messages, messages[1:], messages[2:], strict=False):
            if before.get("name") and answer["role"] == "assistant" and asked["content"].endswith("?"):
                if answer["content"].startswith("I was not told"):
                    unknown += 1
                else:
                    told += 1
    assert told > 10
    assert unknown > 10


def test_what_is_outside_the_small_world_is_said_to_be() -> None:
    dice = Dice("outside")
    names = spelling.WideNames(dice, held_out=False)
    questions = [talk.elsewhere(dice, names) for _ in range(300)]
    assert not any(re.search(r"\{\w\}", question) for question in questions)
    assert len(set(questions)) > 200


def test_a_summary_repeats_the_oldest_facts_as_they_were_told() -> None:
    assert daily_life.SUMMARY_REQUEST == SUMMARY_REQUEST
    found = 0
    for conversation in conversations(range(200), 900):
        for place, message in enumerate(conversation.messages):
            if message["content"] == SUMMARY_REQUEST:
                before = " ".join(other["content"].lower() for other in conversation.messages[:place])
                for sentence in re.split(r"(?<=\w)\. ", conversation.messages[place + 1]["content"].rstrip(".")):
                    assert sentence.lower().rstrip(".") in before
                found += 1
    assert found >= 5
