"""Writes what programs need of the world: conversations.json and stories.json; `python -m tools.kvasir_tiny.ship`."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference_svc.model import kvasir_tiny
from inference_svc.model.model_identity import tokenizer_digest
from inference_svc.model.quality.material import AT_LOAD, FULL, QUICK
from tools.kvasir_tiny import desk, skills, tokenizer, tools, world
from tools.kvasir_tiny.words import Dice, Names

STORIES_PATH = Path(__file__).parents[2] / "clients/python/kvasir/cli/demo/stories.json"
# (seed, tokens): those that the demo names.
STORIES = ((8, 4400), (12, 2200), (15, 1100), (12, 500))
# Conversations of this number on are used nowhere else.
_FIRST_SEED = 10**7
_MOST_TOOL_CALLS = max(extent.tools_each for extent in (FULL, QUICK, AT_LOAD))


def conversations() -> dict[str, Any]:
    """The content of conversations.json."""
    encoder = tokenizer.load(kvasir_tiny.path())
    places = sorted({place for extent in (FULL, QUICK, AT_LOAD) for place in enumerate(extent.lengths)})
    return {
        "made_by": "python -m tools.kvasir_tiny.ship",
        "tokenizer_digest": tokenizer_digest(kvasir_tiny.path()),
        "tasks": list(skills.tasks(encoder.count)),
        "conversations": [_conversation(encoder, number, tokens) for number, tokens in places],
    }


def stories() -> dict[str, Any]:
    """The content of stories.json."""
    told = [{"seed": seed, "tokens": tokens, **_story(seed, tokens)} for seed, tokens in STORIES]
    return {"made_by": "python -m tools.kvasir_tiny.ship", "stories": told}


def _story(seed: int, tokens: int) -> dict[str, Any]:
    """A conversation between one person and an agent, and questions that it can and cannot answer."""
    talk = world.conversation(seed, tokens)
    questions = [
        {
            **{name: getattr(question, name) for name in ("sort", "text", "answer", "told_in")},
            "value": question.fact.value if question.fact else "",
            "not_told": question.fact.not_told if question.fact else "",
        }
        for question in talk.questions
    ]
    return {"agent": talk.agent, "messages": talk.messages, "tools": talk.tools, "questions": questions}


def text_of(content: dict[str, Any]) -> str:
    """The form in which both are written: a line for each item of a list."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_listed(value)}" for key, value in content.items()) + "\n}\n"


def _listed(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"


def _conversation(encoder: tokenizer.Encoder, number: int, tokens: int) -> dict[str, Any]:
    style = desk.draw_style(Dice(f"kvasir quality {number} {tokens}"), tokens)
    style = replace(style, room=False, with_tools=True, ask=min(style.ask, 0.35))
    talk = world.conversation(_FIRST_SEED + number, tokens, count=encoder.count, style=style)
    return {
        "number": number,
        "tokens": tokens,
        "messages": talk.messages,
        "tools": talk.tools,
        "recall": [(question.text, question.answer) for question in talk.of_sort("told")],
        "tool_calls": [(use.question, use.call_text) for use in _tool_uses(talk)],
    }


def _tool_uses(talk: desk.Conversation) -> Iterator[tools.ToolUse]:
    """Questions for the conversation's own tools, with names that no training saw."""
    names = [tool["function"]["name"] for tool in talk.tools]
    for number in range(_MOST_TOOL_CALLS):
        dice = Dice(f"kvasir quality tools {talk.seed} {number}")
        yield tools.a_use(names[number % len(names)], dice, Names(dice, held_out=True))


def main() -> None:
    """Write both files."""
    kvasir_tiny.conversations_path().write_text(text_of(conversations()), encoding="utf-8")
    STORIES_PATH.write_text(text_of(stories()), encoding="utf-8")


if __name__ == "__main__":
    main()
