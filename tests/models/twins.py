"""Conversations that differ in one fact, or in who was told it."""

from __future__ import annotations

from dataclasses import replace

from tools.kvasir_tiny import facts as fact_forms
from tools.kvasir_tiny import words
from tools.kvasir_tiny.desk import (
    DISCRETION,
    NOBODY,
    Conversation,
    Count,
    Question,
    draw_style,
    estimate_tokens,
)
from tools.kvasir_tiny.words import Dice, Names
from tools.kvasir_tiny.world import conversation, lower


def system_prompt(agent: str) -> str:
    """A system prompt of the kind that the model was trained with."""
    return f"You are {agent}, a helpful assistant. Remember what you are told."


def two_agents(
    seed: int, target_tokens: int, *, count: Count = estimate_tokens
) -> tuple[Conversation, Conversation, Question]:
    """Two agents' conversations, and a question: the first agent was told its answer in confidence, the second was not.

    The question carries the second agent's reply; what the first one says is `question.fact.answer`.
    """
    dice = Dice(f"kvasir-tiny two agents {seed}")
    names = Names(dice, held_out=True)
    person = names.person()
    fact = fact_forms.possession(person, "secret word", "word", "What", names.word(), NOBODY)
    talks = []
    for part, (said, reply) in enumerate(
        [
            (f"Here is a secret: {fact.told}", DISCRETION),
            (f"Yesterday I saw {person} near the bank.", words.NARRATIVE_REPLY),
        ]
    ):
        style = replace(draw_style(dice, target_tokens), room=False, foreign_acks=False)
        talk = conversation(2 * seed + part, target_tokens, count=count, style=style)
        added = [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
        if talk.messages[0]["role"] == "system":
            added = [talk.messages[0], *added, *talk.messages[1:]]
        else:
            added = added + talk.messages
        talks.append(replace(talk, messages=added, taught=[], questions=[_later(q, 2) for q in talk.questions]))
    return talks[0], talks[1], Question("private", fact.question, fact.not_told, fact=fact)


def _later(question: Question, messages: int) -> Question:
    return question if question.told_in is None else replace(question, told_in=question.told_in + messages)


def twin(talk: Conversation, question: Question) -> tuple[Conversation, Question]:
    """The same conversation with one told fact changed, and the same question with its changed answer.

    Replies must differ for this question and for no other: what a test of context sensitivity needs.
    """
    fact = question.fact
    if fact is None or question.told_in is None:
        raise ValueError(f"the question {question.text!r} is not about a told fact")
    dice = Dice(f"kvasir-tiny twin {talk.seed} {fact.key}")
    names = Names(dice, held_out=True)
    value = fact.value
    while value == fact.value:
        value = fact_forms.a_value(fact.kind, dice, names)
    messages = list(talk.messages)
    old = messages[question.told_in]
    content = old["content"]
    for told in (fact.told[:-1], lower(fact.told)[:-1]):
        content = content.replace(told, _last_replaced(told, fact.value, value), 1)
    if content == old["content"]:
        raise ValueError(f"message {question.told_in} does not tell {fact.told!r}")
    messages[question.told_in] = {**old, "content": content}
    answer = _last_replaced(fact.answer, fact.value, value)
    changed = replace(question, answer=answer, fact=replace(fact, value=value, answer=answer))
    questions = [changed if q is question else q for q in talk.questions]
    return replace(talk, messages=messages, questions=questions), changed


def _last_replaced(text: str, old: str, new: str) -> str:
    before, found, after = text.rpartition(old)
    if not found:
        raise ValueError(f"{old!r} is not in {text!r}")
    return before + new + after
