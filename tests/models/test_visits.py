"""First visits of kvasir-tiny's training and their exam: what one says the other does not, and each reply is right."""

import json
import re
from functools import cache

import jsonschema_rs
import pytest

from inference_svc.model.kvasir_tiny import path
from tools.kvasir_tiny import rows
from tools.kvasir_tiny.desk import Conversation
from tools.kvasir_tiny.everyday import spelling, structured, things, training, visits
from tools.kvasir_tiny.everyday.daily_life import draw_style
from tools.kvasir_tiny.everyday.visits import FACTS, VisitWriter
from tools.kvasir_tiny.exams import first_exam
from tools.kvasir_tiny.exams.first_exam import Exchange
from tools.kvasir_tiny.words import Dice, is_held_out

ENCODER = rows.encoder_of(path())


@cache
def talks() -> list[Conversation]:
    visits_of_all_sorts = [training.visit(seed, 500, ENCODER.count) for seed in range(150)]
    return visits_of_all_sorts + [training.recital(seed, 512, ENCODER.count) for seed in range(30)]


@pytest.fixture(scope="module")
def exam() -> list[Exchange]:
    """Four seconds of drawing words."""
    return list(first_exam.exchanges(ENCODER.count))


def visitor(seed: int) -> VisitWriter:
    return VisitWriter(seed, 300, ENCODER.count, False, draw_style(Dice(f"visitor {seed}"), 300))


@pytest.mark.long(7)
def test_the_exam_puts_four_hundred_different_exchanges(exam: list[Exchange]) -> None:
    assert len(exam) == sum(first_exam.ASKED.values()) == 400
    assert len({json.dumps([each.messages, each.question]) for each in exam}) > 390


@pytest.mark.long(12)
def test_no_sentence_of_the_exam_occurs_in_training(exam: list[Exchange]) -> None:
    """Greetings have few words: without the checksum of sentences they would be the same."""
    heard = {message["content"] for talk in talks() for message in talk.messages if message["role"] == "user"}
    told = {message["content"] for each in exam for message in each.messages if message["role"] == "user"}
    requested = {each.question for each in exam if each.group in ("greetings", "JSON", "calls")}
    assert len(told) > 900
    assert heard.isdisjoint(told | requested)
    assert all(is_held_out(text) for text in told | requested)


@pytest.mark.parametrize("kind", ["secret", "long_number", "titled", "phrase", "email"])
def test_no_value_of_the_exam_is_made_in_training(kind: str) -> None:
    for part in (False, True):
        dice = Dice(f"{kind} {part}")
        names = spelling.WideNames(dice, part)
        assert all(is_held_out(things.made(kind, dice, names)) == part for _ in range(100))


@pytest.mark.parametrize("name", FACTS)
def test_every_question_about_a_fact_has_its_value_or_a_yes(name: str) -> None:
    writer = visitor(5)
    for _ in range(12):
        fact = writer.fact(name, writer._nouns(), "Xy!7")
        assert "Xy!7" in fact.answer
        assert not re.search(r"[{}<>|]|//", fact.question + fact.answer.replace("Xy!7", "") + fact.not_told)
        assert "your" not in fact.clause


def test_a_secret_keeps_every_letter() -> None:
    writer = visitor(6)
    for _ in range(60):
        for fact in writer.tell("secret"):
            assert fact.value in writer.messages[-2]["content"]
            assert fact.answer.endswith(f"{fact.value}.")
        writer.known.clear()


def test_how_many_is_the_number_of_the_names() -> None:
    writer = visitor(7)
    for _ in range(20):
        facts = {fact.kind: fact for fact in writer.tell("many")}
        writer.known.clear()
        names = facts["many"].value.replace(" and ", ", ").split(", ")
        assert facts["many count"].value == ["one", "two", "three", "four"][len(names) - 1]


def test_a_correction_leaves_one_value_in_the_summary() -> None:
    corrected = 0
    for seed in range(30):
        writer = visitor(seed)
        old = writer.tell("live")[0]
        new = writer.correct()
        if new is not None:
            assert new.value in writer.summary()
            assert f"{old.value}." not in writer.summary().replace(new.value, "")
            corrected += 1
    assert corrected > 20


def test_braces_and_keys_of_a_schema_are_not_learned() -> None:
    reply, given = structured.written({"city": "Porto", "people": ["Ann"]}, True)
    assert "".join(reply[first:end] for first, end in given) == '{"city": "people": '
    ids, learned = ENCODER.encode(reply), ENCODER._learned(reply, given)
    said = ENCODER.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned])
    assert said == 'Porto", "["Ann"]}'
    assert all(ENCODER._learned(*structured.written({"city": "Porto"}, False)))


@pytest.mark.long(2)
def test_json_of_a_visit_is_of_its_schema_and_a_call_names_a_tool_of_it(exam: list[Exchange]) -> None:
    for each in exam:
        if each.schema:
            jsonschema_rs.validate(each.schema, json.loads(each.answer))
        if each.tools:
            assert json.loads(each.answer)["name"] in {tool.name for tool in each.tools}
    calls = re.findall(r"<tool_call>\s?(.*?)\s?</tool_call>", " ".join(_said_in_training()))
    assert len(calls) > 20
    assert all(set(json.loads(call)) == {"name", "arguments"} for call in calls)


def _said_in_training() -> list[str]:
    return [str(message["content"]) for talk in talks() for message in talk.messages if message["role"] == "assistant"]


def test_nobody_is_answered_in_templates() -> None:
    for text in _said_in_training():
        assert not re.search(r"\{v\}|\{\w+\}|<(pet|kin|many|office)>", text)
    assert visits.NOTHING in _said_in_training()
