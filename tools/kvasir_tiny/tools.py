"""The tools that agents of kvasir-tiny's world may call: the question, the call, its result, the reply that uses it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.kvasir_tiny import words
from tools.kvasir_tiny.facts import a_value
from tools.kvasir_tiny.material import material
from tools.kvasir_tiny.words import Dice, Names

Message = dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """One question that a tool answers."""

    question: str
    name: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    reply: str

    @property
    def call_text(self) -> str:
        """What the model writes: the form that mlx-lm's json tool parser reads."""
        return f"<tool_call>{json.dumps({'name': self.name, 'arguments': self.arguments})}</tool_call>"

    @property
    def call_message(self) -> Message:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    @property
    def result_message(self) -> Message:
        return {"role": "tool", "content": json.dumps(self.result)}


NO_TOOL = "I have no tool for that."

# By name: what a model reads of the tool, and how it is asked for and answers. Each slot has a kind of value.
SIGNATURES = material("tools")
_MADE: Mapping[str, Callable[[Names], Any]] = {"number": lambda names: int(names.digits(3)), "done": lambda _: True}


def schema(name: str) -> dict[str, Any]:
    """The tool in the form that OpenAI's clients send and chat templates receive."""
    form = SIGNATURES[name]
    properties = {argument: {"type": "string"} for argument in form["arguments"]}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": form["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def a_use(name: str, dice: Dice, names: Names) -> ToolUse:
    form = SIGNATURES[name]

    def drawn(kind: str) -> Any:
        return _MADE[kind](names) if kind in _MADE else words.a_word(kind, dice) or a_value(kind, dice, names)

    arguments, result = ({slot: drawn(kind) for slot, kind in form[part].items()} for part in ("arguments", "result"))
    questions, slots = form["questions"], {**arguments, **result}
    question = dice.pick(questions) if len(questions) > 1 else questions[0]
    return ToolUse(question.format(**slots), name, arguments, result, form["reply"].format(**slots))
