"""Titles of conversations: the first words of a person, kept as the agent's label `title`."""

import re
from collections.abc import Sequence

from kvasir_gateway.turn import Said

TITLE = "title"
_MOST_CHARS = 60
_MOST_READ = 20_000  # characters of a message
# What clients write around a person's first words: a reminder, the date, the surroundings.
_BLOCK = re.compile(r"<([\w-]+)>.*?</\1>", re.DOTALL)


def title_of(messages: Sequence[Said]) -> str:
    """The title of a conversation that begins so; empty where there is no word."""
    texts = (first_words(message.content) for message in messages if message.role == "user")
    return next(filter(None, texts), "")


def first_words(text: str) -> str:
    """The beginning of a text on a line, without the blocks that programs write before it."""
    text = text[:_MOST_READ].strip()
    while text.startswith("<") and (block := _BLOCK.match(text)) is not None and text[block.end() :].strip():
        text = text[block.end() :].strip()
    line = " ".join("".join(each if each.isprintable() else " " for each in text[:1000]).split())
    if len(line) <= _MOST_CHARS:
        return line
    begin, _, rest = line[: _MOST_CHARS - 1].rpartition(" ")
    return f"{begin or rest}…"
