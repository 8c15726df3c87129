"""The world of kvasir-tiny: the same bytes for the same seeds, and no question without one right answer."""

import hashlib
import json
import re

import pytest

from inference_svc.model.kvasir_tiny import path
from tests.models import twins
from tools.kvasir_tiny import rows, tokenizer, words, world

SEEDS = range(12)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_same_seeds_give_the_same_conversations() -> None:
    talks = [world.conversation(seed, 1500) for seed in SEEDS]
    text = json.dumps([[t.messages, t.tools, [(q.sort, q.text, q.answer) for q in t.questions]] for t in talks])
    assert digest(text.encode()) == "f392c80df3c3dfea70b7e043b46a081085a8032c307b78e8c55218f686f30163"


def test_the_same_seeds_give_the_same_training_rows() -> None:
    ids, learned = rows.make(rows.Batch(0, 4, 2048), path())
    assert (
        digest(ids.tobytes() + learned.tobytes()) == "ef7b079ea60d32a0c45b9baae87f546e4a25aa32789fccedaf4ba459d60d22bd"
    )


@pytest.mark.long(2)
def test_a_pool_of_processes_makes_the_same_rows_in_the_same_order() -> None:
    groups = [(rows.Batch(step * 3, 2, 256), rows.Batch(step * 3 + 2, 1, 512)) for step in range(4)]
    alone = [[digest(ids.tobytes()) for ids, _ in group] for group in rows.stream(iter(groups), path(), 0, rows.make)]
    pooled = [[digest(ids.tobytes()) for ids, _ in group] for group in rows.stream(iter(groups), path(), 2, rows.make)]
    assert pooled == alone


def test_another_seed_gives_another_conversation() -> None:
    assert world.conversation(1, 400).messages != world.conversation(2, 400).messages


@pytest.mark.parametrize("target", [300, 1500, 7500])
def test_a_conversation_is_as_long_as_asked(target: int) -> None:
    encoder = tokenizer.load(path())
    for seed in SEEDS:
        ids, _ = encoder.conversation(world.conversation(seed, target, count=encoder.count))
        assert 0.98 * target - 20 <= len(ids) <= target + 700  # the last turn may bring a whole passage


def test_no_name_is_used_twice_in_a_conversation() -> None:
    names = words.Names(words.Dice("once"), held_out=False)
    drawn = [names.word() for _ in range(4000)] + [names.person().lower() for _ in range(500)]
    assert len(set(drawn)) == len(drawn)


def test_names_of_evaluation_never_occur_in_training() -> None:
    def made_up(held_out: bool) -> set[str]:
        names = words.Names(words.Dice(f"names {held_out}"), held_out)
        return {names.word() for _ in range(5000)} | {names.digits(4) for _ in range(500)}

    assert not made_up(True) & made_up(False)


def test_what_was_told_stands_in_the_message_that_told_it() -> None:
    asked = 0
    for seed in SEEDS:
        talk = world.conversation(seed, 1500)
        for question in talk.of_sort("told"):
            assert question.told_in is not None
            assert question.fact is not None
            assert question.fact.value in talk.messages[question.told_in]["content"]
            assert question.answer.endswith(f"{question.fact.value}.")
            asked += 1
    assert asked > 100


def test_what_was_told_to_somebody_else_stands_nowhere() -> None:
    """An open value is unique: if the agent could read it, it would be in the text."""
    asked = 0
    for seed in SEEDS:
        talk = world.conversation(seed, 3000)
        text = json.dumps(talk.messages)
        for question in talk.of_sort("private"):
            assert question.answer.startswith("I was not told")
            if question.fact and question.fact.kind in {"place", "person", "word"}:
                assert not re.search(rf"\b{question.fact.value}\b", text, re.IGNORECASE), question
                asked += 1
    assert asked > 20


def test_a_twin_differs_in_one_message_and_one_answer() -> None:
    for seed in SEEDS:
        talk = world.conversation(seed, 800)
        for question in talk.of_sort("told"):
            other, changed = twins.twin(talk, question)
            differing = [i for i, (a, b) in enumerate(zip(talk.messages, other.messages, strict=True)) if a != b]
            assert differing == [question.told_in]
            assert changed.answer != question.answer
            answers = [(a.answer, b.answer) for a, b in zip(talk.questions, other.questions, strict=True)]
            assert sum(a != b for a, b in answers) == 1
