"""Conversations with questions for a model, as they ship beside kvasir-tiny: texts to read, questions, answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.model.quality.tasks import Task, task_of


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools as a chat template takes them, and questions for when they are read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    recall: tuple[QuestionAnswer, ...]  # about told facts, in the order in which they were told
    tool_calls: tuple[QuestionAnswer, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """By number and length in tokens. Only a model with this tokenizer knows their language."""

    tokenizer_digest: str
    by_number: Mapping[tuple[int, int], Conversation]
    tasks: tuple[Task, ...] = ()

    @classmethod
    def read(cls, file: Path) -> "Conversations":
        """From the file that `python -m tools.kvasir_tiny.ship` writes."""
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            content["tokenizer_digest"],
            {(each["number"], each["tokens"]): _conversation(each) for each in content["conversations"]},
            tuple(task_of(each, file.name) for each in content["tasks"]),
        )

    @classmethod
    def read_for(cls, file: Path | None, tokenizer_digest: str) -> "Conversations | None":
        """The file's, if there is one and it is written for this tokenizer."""
        found = cls.read(file) if file else None
        return found if found and found.tokenizer_digest == tokenizer_digest else None

    @property
    def longest(self) -> Conversation:
        return self.by_number[max(self.by_number, key=lambda number_and_tokens: number_and_tokens[1])]


def _conversation(content: Mapping[str, Any]) -> Conversation:
    return Conversation(
        content["messages"],
        content["tools"],
        tuple(QuestionAnswer(*pair) for pair in content["recall"]),
        tuple(QuestionAnswer(*pair) for pair in content["tool_calls"]),
    )
