"""The text of the demo: conversations of `stories.json`, cut into turns that end with a question."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.clients import message
from kvasir.common.v1 import message_pb2

_STORIES = Path(__file__).with_name("stories.json")
_SECRET_LEADS = ("Here is a secret: ", "This is a secret: ", "Tell nobody: ", "Keep this to yourself: ")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its one right answer, and the answer of an agent that does not know it."""

    text: str
    answer: str
    value: str
    not_told: str
    told_in: int  # index of the message with the fact


@dataclass(frozen=True, slots=True)
class Turn:
    """The messages of one turn; the last is the question."""

    messages: tuple[message_pb2.Message, ...]
    question: Question


@dataclass(frozen=True, slots=True)
class Story:
    """One agent's conversation: the turns it lives through, and questions left for later."""

    agent: str
    turns: tuple[Turn, ...]
    later: tuple[Question, ...]
    secret: Question | None
    text: str  # of all messages, to make sure that another story does not tell the same

    def ask(self, number: int) -> Turn:
        """A turn of one question alone, from those left for later."""
        return ask(self.later[number % len(self.later)])


def ask(question: Question) -> Turn:
    return Turn((message("user", question.text),), question)


def told_story(seed: int, tokens: int, turns: int) -> Story:
    """The story of a seed, about `tokens` long. Raises KeyError for one that does not ship."""
    stories = json.loads(_STORIES.read_text(encoding="utf-8"))["stories"]
    return story_of({(each["seed"], each["tokens"]): each for each in stories}[seed, tokens], turns)


def story_of(talk: dict[str, Any], turns: int) -> Story:
    """Cut a talk into turns of about equal length, each with a question. Raises ValueError for one without an agent."""
    if not talk["agent"]:
        raise ValueError("the agent of this talk has no name; take another seed")
    messages = talk["messages"]
    told = [_question(question) for question in talk["questions"] if question["sort"] == "told"]
    secret = next((each for each in told if messages[each.told_in]["content"].startswith(_SECRET_LEADS)), None)
    left = [question for question in told if question is not secret]
    lived: list[Turn] = []
    begin = 0
    for end in _cuts(messages, turns):
        # The oldest first: a fact from long ago is harder to remember.
        question = next(each for each in left if each.told_in < end)
        left.remove(question)
        asked = message("user", question.text)
        lived.append(Turn((*map(_message, messages[begin:end]), asked), question))
        begin = end
    text = "\n".join(message["content"] for message in messages)
    return Story(talk["agent"], tuple(lived), tuple(left), secret, text)


def _cuts(messages: Sequence[dict[str, Any]], turns: int) -> Iterator[int]:
    """Indexes where the talk is cut: behind a reply, at about equal amounts of text."""
    total = sum(len(each["content"]) for each in messages)
    said, cuts = 0, 0
    for index, each in enumerate(messages):
        said += len(each["content"])
        is_after_reply = each["role"] == "assistant" and (
            index + 1 == len(messages) or messages[index + 1]["role"] == "user"
        )
        if is_after_reply and (said >= total * (cuts + 1) / turns or index + 1 == len(messages)):
            cuts += 1
            yield index + 1


def _message(given: dict[str, Any]) -> message_pb2.Message:
    return message(given["role"], given["content"], name=given.get("name", ""))


def _question(question: dict[str, Any]) -> Question:
    return Question(question["text"], question["answer"], question["value"], question["not_told"], question["told_in"])
