"""The texts and questions for a model: conversations, or a canary for any other model.

Token ids only, made once and put to every rung alike; seeds are fixed.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvasir.errors import InvalidArgument

from inference_svc.model.quality.conversations import Conversation, Conversations, QuestionAnswer
from inference_svc.model.quality.findings import RECALL, TOOL_CALLS
from inference_svc.model.quality.tasks import Task


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens to put behind the text, and the only right reply, its end token included."""

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
    task: str = ""  # its scored part is the answer to a task of this name
    scores_text: bool = True  # whether its next tokens count as text


@dataclass(frozen=True, slots=True)
class Extent:
    lengths: tuple[int, ...]  # tokens of each conversation, by its number
    recall_each: int
    tools_each: int
    canaries: int  # repetitions, and as many texts of the model's own
    canary_tokens: int
    tasks: int = 0  # of those that ship, a third of them of each kind


FULL = Extent((*(600,) * 5, *(1500,) * 4, 4000), 20, 10, canaries=4, canary_tokens=256, tasks=24)
QUICK = Extent((300,), 6, 4, canaries=1, canary_tokens=128, tasks=3)
# The questions of `auto` at load.
AT_LOAD = Extent((600, 600, 2000), 16, 10, canaries=2, canary_tokens=256, tasks=12)

# (beginning, tokens, seed) -> beginning and so many tokens more, sampled from the model.
GoOn: TypeAlias = Callable[[tuple[int, ...], int, int], tuple[int, ...]]
_BEGINNING_TOKENS = 8


def conversation_sheets(conversations: Conversations, tokenizer: Any, extent: Extent) -> Iterator[Sheet]:
    """Conversations with questions, for a model that has their tokenizer."""
    for number_and_tokens in enumerate(extent.lengths):
        yield _sheet(tokenizer, conversations.by_number[number_and_tokens], extent)


def task_sheet(task: Task, tokenizer: Any, *, scores_text: bool = False) -> Sheet:
    """A task, whose answer is the scored part. `scores_text`: whether the answer's tokens count as text, too. Raises
    InvalidArgument if the model's template or tokenizer cannot take it.
    """
    if task.messages:
        try:
            asked = tokenizer.apply_chat_template(
                list(task.messages), tools=list(task.tools) or None, add_generation_prompt=True
            )
        except Exception as error:  # noqa: BLE001 - a template is a program from outside and may raise anything
            raise InvalidArgument(f"the chat template raises {type(error).__name__}", field="tasks.messages") from None
        reply = tokenizer.encode(task.answer, add_special_tokens=False)
        ids, begins_at = (*asked, *reply, tokenizer.eos_token_id), len(asked)
    else:
        ids, prompt = tuple(tokenizer.encode(task.prompt + task.answer)), tokenizer.encode(task.prompt)
        # The prompt's last characters may merge with the answer's first into one token.
        differ = (place for place, (one, other) in enumerate(zip(prompt, ids, strict=False)) if one != other)
        begins_at = next(differ, min(len(prompt), len(ids)))
    if not 0 < begins_at < len(ids):
        raise InvalidArgument("the prompt or the answer has no token of its own", field="tasks.prompt")
    return Sheet(ids, scored_from=begins_at, task=task.name, scores_text=scores_text)


def repetitions(vocabulary: Sequence[int], extent: Extent) -> Iterator[Sheet]:
    """Random tokens, twice: a model that keeps the first half well can predict the second."""
    for seed in range(extent.canaries):
        half = _random_tokens(f"kvasir quality {seed}", vocabulary, extent.canary_tokens)
        yield Sheet(half + half, scored_from=len(half) + 1, is_repetition=True)


def own_texts(vocabulary: Sequence[int], extent: Extent, go_on: GoOn) -> Iterator[Sheet]:
    """Texts that the model itself writes behind a few random tokens."""
    for seed in range(extent.canaries):
        beginning = _random_tokens(f"kvasir quality own {seed}", vocabulary, _BEGINNING_TOKENS)
        yield Sheet(go_on(beginning, extent.canary_tokens, seed), scored_from=_BEGINNING_TOKENS + 1)


def plain_tokens(tokenizer: Any, vocabulary_size: int) -> list[int]:
    """Ids of the tokenizer's tokens that are not special."""
    special = set(tokenizer.all_special_ids)
    return [token for token in range(min(len(tokenizer), vocabulary_size)) if token not in special]


def _random_tokens(seed: str, vocabulary: Sequence[int], count: int) -> tuple[int, ...]:
    # `random()` alone, so that every Python version draws the same tokens.
    draw = random.Random(seed).random  # noqa: S311 - no secret: every model is given the same
    return tuple(vocabulary[int(draw() * len(vocabulary))] for _ in range(count))


def _sheet(tokenizer: Any, conversation: Conversation, extent: Extent) -> Sheet:
    template: Any = tokenizer.apply_chat_template

    def question(task: str, asked: QuestionAnswer) -> Question:
        ids = template([{"role": "user", "content": asked.text}], add_generation_prompt=True)
        reply = tokenizer.encode(asked.answer, add_special_tokens=False)
        return Question(task, tuple(ids), (*reply, tokenizer.eos_token_id))

    told = conversation.recall
    take = min(extent.recall_each, len(told))
    return Sheet(
        tuple(template(conversation.messages, tools=conversation.tools)),
        questions=(
            *(question(RECALL, told[index * len(told) // take]) for index in range(take)),
            *(question(TOOL_CALLS, asked) for asked in conversation.tool_calls[: extent.tools_each]),
        ),
    )
