"""What a model is given to read and is asked: conversations of kvasir-tiny's world, or a canary for any other model.

Token ids only, made once and put to every rung alike; seeds are fixed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from inference_svc.model.kvasir_tiny import tools, world
from inference_svc.model.kvasir_tiny.words import Dice, Names
from inference_svc.model.quality.findings import RECALL, TOOL_CALLS


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens put behind what was read, and the only right reply, its end token included."""

    task: str
    ids: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """One text to read, and questions about it. Next tokens are compared from position `scored_from` on."""

    ids: tuple[int, ...]
    scored_from: int = 1
    questions: tuple[Question, ...] = ()
    is_repetition: bool = False  # its scored part repeats what came before


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is read and asked."""

    lengths: tuple[int, ...]  # tokens of each conversation
    recall_each: int
    tools_each: int
    canaries: int  # repetitions, and as many texts of the model's own
    canary_tokens: int


FULL = Extent((*(600,) * 5, *(1500,) * 4, 4000), 20, 10, canaries=4, canary_tokens=256)
QUICK = Extent((300, 300), 6, 4, canaries=1, canary_tokens=128)
# What `auto` asks at load.
AT_LOAD = Extent((600, 600, 2000), 16, 10, canaries=2, canary_tokens=256)


# Conversations of this number on are used nowhere else.
_FIRST_SEED = 10**7
# (beginning, tokens, seed) -> beginning and so many tokens more, drawn from the model.
GoOn: TypeAlias = Callable[[tuple[int, ...], int, int], tuple[int, ...]]
_BEGINNING_TOKENS = 8


def world_sheets(tokenizer: Any, extent: Extent) -> Iterator[Sheet]:
    """Held-out conversations of the world, for a model that has kvasir-tiny's tokenizer."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for seed, length in enumerate(extent.lengths):
        style = world.draw_style(Dice(f"kvasir quality {seed} {length}"), length)
        style = replace(style, room=False, with_tools=True, ask=min(style.ask, 0.35))
        talk = world.conversation(_FIRST_SEED + seed, length, count=count, style=style)
        yield _sheet(tokenizer, talk, extent)


def repetitions(vocabulary: Sequence[int], extent: Extent) -> Iterator[Sheet]:
    """Random tokens, twice: who keeps the first half well can say the second."""
    for seed in range(extent.canaries):
        half = _random_tokens(f"kvasir quality {seed}", vocabulary, extent.canary_tokens)
        yield Sheet(half + half, scored_from=len(half) + 1, is_repetition=True)


def own_texts(vocabulary: Sequence[int], extent: Extent, go_on: GoOn) -> Iterator[Sheet]:
    """Texts of the model's own behind a few random tokens."""
    for seed in range(extent.canaries):
        beginning = _random_tokens(f"kvasir quality own {seed}", vocabulary, _BEGINNING_TOKENS)
        yield Sheet(go_on(beginning, extent.canary_tokens, seed), scored_from=_BEGINNING_TOKENS + 1)


def plain_tokens(tokenizer: Any, vocabulary_size: int) -> list[int]:
    """Ids of the tokenizer's tokens that are not special."""
    special = set(tokenizer.all_special_ids)
    return [token for token in range(min(len(tokenizer), vocabulary_size)) if token not in special]


def _random_tokens(seed: str, vocabulary: Sequence[int], count: int) -> tuple[int, ...]:
    dice = Dice(seed)
    return tuple(vocabulary[dice.below(len(vocabulary))] for _ in range(count))


def _sheet(tokenizer: Any, talk: world.Conversation, extent: Extent) -> Sheet:
    template: Any = tokenizer.apply_chat_template

    def asked(task: str, text: str, answer: str) -> Question:
        ids = template([{"role": "user", "content": text}], add_generation_prompt=True)
        reply = tokenizer.encode(answer, add_special_tokens=False)
        return Question(task, tuple(ids), (*reply, tokenizer.eos_token_id))

    told = talk.of_sort("told")
    take = min(extent.recall_each, len(told))
    questions = [told[index * len(told) // take] for index in range(take)]
    return Sheet(
        tuple(template(talk.messages, tools=talk.tools)),
        questions=(
            *(asked(RECALL, each.text, each.answer) for each in questions),
            *(asked(TOOL_CALLS, use.question, use.call_text) for use in _tool_uses(talk, extent.tools_each)),
        ),
    )


def _tool_uses(talk: world.Conversation, count: int) -> Iterator[tools.ToolUse]:
    """Questions for the conversation's own tools, with names that no training saw."""
    names = [tool["function"]["name"] for tool in talk.tools]
    for number in range(count):
        dice = Dice(f"kvasir quality tools {talk.seed} {number}")
        yield tools.a_use(names[number % len(names)], dice, Names(dice, held_out=True))
