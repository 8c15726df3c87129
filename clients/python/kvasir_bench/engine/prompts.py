"""Prompts of an exact number of tokens, from the conversations that ship beside kvasir-tiny, for any tokenizer."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import Any

from inference_svc.model import kvasir_tiny
from inference_svc.model.quality.conversations import Conversations

_MIXED = (200, 4000)
_TALKS = 4  # conversations that questions are about


class Prompts:
    """Texts by number: each number has a text of its own, always the same."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: mlx-lm's TokenizerWrapper."""
        self._tokenizer = tokenizer
        self._conversations = Conversations.read(kvasir_tiny.conversations_path())
        talks = self._conversations.by_number.values()
        self._messages = sorted({message["content"] for talk in talks for message in talk.messages})
        self._tokens: dict[str, list[int]] = {}  # by message

    def tokens(self, count: int, number: int) -> tuple[int, ...]:
        """`count` tokens of text `number`, none of them special."""
        tokens: list[int] = []
        for message in shuffled(self._messages, number):
            if message not in self._tokens:
                self._tokens[message] = self._tokenizer.encode(f"{message}\n", add_special_tokens=False)
            tokens += self._tokens[message]
            if len(tokens) >= count:
                break
        return tuple(tokens[:count])

    def questions(self, tokenizer_digest: str, length: int, count: int) -> list[tuple[int, ...]]:
        """`count` prompts: conversations of about `length` tokens, each with a question about a fact in it. None for a
        model with another tokenizer, which does not know their world."""
        if tokenizer_digest != self._conversations.tokenizer_digest:
            return []
        template: Any = self._tokenizer.apply_chat_template
        numbers = sorted(self._conversations.by_number, key=lambda number: (abs(number[1] - length), number))
        talks = [self._conversations.by_number[number] for number in numbers[:_TALKS]]
        pairs = [(talks[n % _TALKS], n // _TALKS) for n in range(count)]
        return [
            tuple(
                template(
                    [*talk.messages, {"role": "user", "content": talk.recall[place % len(talk.recall)].text}],
                    tools=talk.tools or None,
                    add_generation_prompt=True,
                )
            )
            for talk, place in pairs
        ]


def shuffled(messages: Sequence[str], number: int) -> Iterator[str]:
    """The messages again and again, each time in another order, which depends on `number` alone."""
    for time in count():

        def place(message: str, time: int = time) -> bytes:
            return hashlib.sha256(f"{number} {time} {message}".encode()).digest()

        yield from sorted(messages, key=place)


def user_turns(turns: int) -> list[list[str]]:
    """The user's messages of the longest conversation, by turn: those between two replies. Only the first turns."""
    messages = Conversations.read(kvasir_tiny.conversations_path()).longest.messages
    replies = [-1, *(n for n, message in enumerate(messages) if message["role"] == "assistant")]
    said = [
        [message["content"] for message in messages[start + 1 : stop] if message["role"] == "user"]
        for start, stop in pairwise(replies)
    ]
    return [texts for texts in said if texts][:turns]


def mixed_lengths(rows: int) -> list[int]:
    """Lengths spread evenly over 200 … 4,000 tokens, short and long ones next to each other."""
    low, high = _MIXED
    even = [low + (high - low) * index // max(rows - 1, 1) for index in range(rows)]
    return [even[index // 2 if index % 2 == 0 else -1 - index // 2] for index in range(rows)]
