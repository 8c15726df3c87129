"""Prompts of an exact number of tokens, in the words of the world of kvasir-tiny, for any model's tokenizer. Pure."""

from typing import Any

from inference_svc.model.kvasir_tiny.world import conversation

_MIXED = (200, 4000)


class Prompts:
    """Every number gives another text, and always the same."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: mlx-lm's TokenizerWrapper."""
        self._tokenizer = tokenizer

    def tokens(self, count: int, number: int) -> tuple[int, ...]:
        """`count` tokens of text `number`, none of them special."""
        asked = count
        while True:
            tokens: list[int] = []
            for message in conversation(number, asked).messages:
                tokens += self._tokenizer.encode(f"{message['content']}\n", add_special_tokens=False)
                if len(tokens) >= count:
                    return tuple(tokens[:count])
            asked *= 2


def mixed_lengths(rows: int) -> list[int]:
    """Lengths spread evenly over 200 … 4,000 tokens, short and long ones next to each other."""
    low, high = _MIXED
    even = [low + (high - low) * index // max(rows - 1, 1) for index in range(rows)]
    return [even[index // 2 if index % 2 == 0 else -1 - index // 2] for index in range(rows)]
