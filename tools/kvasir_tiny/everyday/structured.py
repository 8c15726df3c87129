"""Replies in forms that a client forces: JSON of a schema, and calls of tools that training makes up as it goes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.kvasir_tiny.everyday import talk, things, values
from tools.kvasir_tiny.everyday.spelling import COMMON_WORDS, WideNames
from tools.kvasir_tiny.facts import Fact
from tools.kvasir_tiny.words import Dice, is_held_out

Spans = tuple[tuple[int, int], ...]  # characters of a reply, first and last + 1
UNKNOWN = "unknown"
_MATERIAL = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SYSTEMS: list[str] = _MATERIAL["systems"]
_SLOTS: dict[str, dict[str, Any]] = _MATERIAL["slots"]
_NOTHING: dict[str, Any] = {"string": UNKNOWN, "integer": 0, "boolean": False, "array": []}
_OF_FACTS: dict[str, list[str]] = _MATERIAL["of_facts"]
_SLOT, _NOUN = re.compile(r"\{(\w+)\}"), re.compile(r"<(\w+)>")


# -- JSON with what a grammar gives


def written(value: Any, is_given: bool) -> tuple[str, Spans]:
    """JSON of `value`; and where a schema alone decides it: braces and keys, if `is_given`."""
    text, spans = "", []
    for part, is_frame in _parts(value):
        if is_frame and is_given:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, tuple(spans)


def _parts(value: Any) -> Iterator[tuple[str, bool]]:
    if not isinstance(value, dict):
        yield json.dumps(value, ensure_ascii=False), False
        return
    for number, (key, each) in enumerate(value.items()):
        yield (", " if number else "{"), not number
        yield f"{json.dumps(key)}: ", True
        yield from _parts(each)
    yield "}", False


def a_text(dice: Dice, names: WideNames) -> tuple[tuple[dict[str, Any], str, Spans], str]:
    """An object, its JSON, what of that is given; and the request before it."""
    draw = dice.random()
    if draw < 0.12:
        text, found = talk.elsewhere(dice, names), {}
    elif draw < 0.25:
        text, found = _made_up(dice, names)
    else:
        text, found = _framed(dice, names)
    items = [item for item in found.items() if dice.chance(0.85)] or list(found.items())
    if not found or dice.chance(0.15):
        for _ in range(1 + dice.below(1 if found else 3)):
            kind = dice.pick(["string", "string", "string", "integer", "boolean", "array"])
            items.insert(dice.below(len(items) + 1), (dice.pick(_MATERIAL["strange"][kind]), _NOTHING[kind]))
    if dice.chance(0.3):
        items.reverse()
    value = dict(items)
    is_named = bool(found) and dice.chance(0.4)
    if is_named:
        text = dice.pick(_MATERIAL["named"]).replace("{f}", _listed(list(value))).replace("{t}", text)
    elif found:
        text = dice.pick(_MATERIAL["unnamed"]).replace("{t}", text)
    if dice.chance(0.08) and not is_named:
        value = {dice.pick(["user", "item", "data", "result", "event", "person"]): value}
    reply, given = written(value, not is_named)
    return (value, reply, given), text


def _framed(dice: Dice, names: WideNames) -> tuple[str, dict[str, Any]]:
    text = frame = dice.pick(_MATERIAL["frames"])
    found: dict[str, Any] = {}
    for name in _SLOT.findall(text):
        slot = _SLOTS[name]
        value = things.made(slot["kind"], dice, names)
        text = text.replace(f"{{{name}}}", value, 1)
        taken = {*found, "name"} if "{person}" in frame and name != "person" else set(found)
        field = dice.pick([field for field in slot["fields"] if field not in taken])
        found[field] = _typed(slot.get("type"), value.split(" ", 1)[1] if name == "job" else value)
    return text, found


def _typed(kind: str | None, value: str) -> Any:
    if kind in ("integer", "number"):
        return json.loads(value)
    return value.replace(" and ", ", ").split(", ") if kind == "array" else value


def _made_up(dice: Dice, names: WideNames) -> tuple[str, dict[str, Any]]:
    """Things that have any name: "The harbour is ba12, the colour is red."."""
    found: dict[str, Any] = {}
    for _ in range(1 + dice.below(3)):
        found[dice.pick(COMMON_WORDS).replace(" ", "_")] = things.made(
            dice.pick(["secret", "thing", "word"]), dice, names
        )
    form = dice.pick(["The {k} is {v}", "{k}: {v}", "My {k} is {v}", "{k} = {v}"])
    told = [form.replace("{k}", key.replace("_", " ")).replace("{v}", value) for key, value in found.items()]
    return dice.pick([", ", ". ", "\n", " and "]).join(told) + ".", found


def a_fact(dice: Dice, fact: Fact, nouns: dict[str, str]) -> tuple[str, Spans]:
    """The reply to a question about a fact, as an object of one field."""
    draw = dice.random()
    if draw < 0.4:
        return written({dice.pick(_MATERIAL["sentence_fields"]): fact.answer}, True)
    if draw < 0.7 and fact.kind in _OF_FACTS:
        return written(dict([_field(dice, fact, nouns)]), True)
    return written({dice.pick(_MATERIAL["value_fields"]): fact.value}, True)


def a_memory(dice: Dice, told: list[tuple[Fact, dict[str, str]]]) -> tuple[str, dict[str, Any], str, Spans]:
    """A request for some of what was told, each with the nouns in it; the object, its JSON, what of that is given."""
    found = dict(_field(dice, fact, nouns) for fact, nouns in told)
    if dice.chance(0.15):
        found.setdefault(*dice.pick([("email", UNKNOWN), ("phone", UNKNOWN), ("country", UNKNOWN), ("hobbies", [])]))
    text, is_named = dice.pick(_MATERIAL["of_memory"]), dice.chance(0.4)
    if is_named:
        text = dice.pick(_MATERIAL["of_memory_named"]).replace("{f}", _listed(list(found)))
    return text, found, *written(found, not is_named)


def can_be_a_field(fact: Fact) -> bool:
    return fact.kind in _OF_FACTS


def _field(dice: Dice, fact: Fact, nouns: dict[str, str]) -> tuple[str, Any]:
    name = _NOUN.sub(lambda found: nouns[found[1]], dice.pick(_OF_FACTS[fact.kind])).replace(" ", "_")
    if fact.kind in ("age", "born", "kin age"):
        return name, int(fact.value)
    if fact.kind == "many count":
        return name, values.NUMBERS.index(fact.value) + 2 if fact.value in values.NUMBERS else int(fact.value)
    if fact.kind == "many":
        return name, _typed("array", fact.value)
    return name, fact.value.split(" ", 1)[1] if fact.kind in ("work", "kin work") else fact.value


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


# -- tools


@dataclass(frozen=True)
class Tool:
    """A tool of one conversation: {argument: kind of its value}, and sentences that ask for it."""

    name: str
    description: str
    arguments: dict[str, str]
    asks: list[str]

    @property
    def line(self) -> str:
        return f"- {self.name}({', '.join(self.arguments)}): {self.description}"

    def schema(self) -> dict[str, Any]:
        """In the form of OpenAI's clients."""
        properties = {name: {"type": _type_of(kind)} for name, kind in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@dataclass(frozen=True)
class Use:
    """A call: the tool, its arguments, the reply that calls, and what of that is forced."""

    tool: Tool
    arguments: dict[str, Any]
    reply: str
    given: Spans


def _type_of(kind: str) -> str:
    return "integer" if kind in ("number", "small") else "string"


def some_tools(dice: Dice, names: WideNames) -> list[Tool]:
    """One to five tools with names of their own; of two sorts of a name, the exam's and training's."""
    found: dict[str, Tool] = {}
    for _ in range(dice.pick([1, 1, 2, 2, 3, 4, 5])):
        tool = _made_up_tool(dice, names) if dice.chance(0.35) else _known_tool(dice)
        found.setdefault(tool.asks[0], tool)
    return list({tool.name: tool for tool in found.values()}.values())


def _known_tool(dice: Dice) -> Tool:
    row = dice.pick(_MATERIAL["tools"])
    arguments = {dice.pick(name.split("|")): kind for name, kind in row["arguments"].items()}
    return Tool(dice.pick(row["name"].split("|")), row["description"], arguments, row["asks"])


def _made_up_tool(dice: Dice, names: WideNames) -> Tool:
    while True:
        verb, noun, argument = dice.pick(_MATERIAL["verbs"]), dice.pick(COMMON_WORDS), dice.pick(COMMON_WORDS)
        name = f"{verb}_{noun}".replace(" ", "_")
        if is_held_out(name) == names.held_out:
            break
    kind = dice.pick(["word", "secret", "number", "person_name", "place", "phrase", "long_number"])
    fill = {"{V}": verb.capitalize(), "{v}": verb, "{n}": noun, "{a}": argument}
    asks = []
    for ask in _MATERIAL["made_ask"]:
        for slot, word in fill.items():
            ask = ask.replace(slot, word)
        asks.append(ask)
    return Tool(name, f"{verb.capitalize()} a {noun}.", {argument.replace(" ", "_"): kind}, asks)


def a_use(dice: Dice, names: WideNames, tools: list[Tool]) -> tuple[Use, str]:
    """A call that the reply makes, forced or by itself; and the request."""
    tool, is_forced = dice.pick(tools), dice.chance(0.6)
    drawn = [things.made(kind, dice, names) for kind in tool.arguments.values()]
    text = dice.pick(tool.asks)
    for number, value in enumerate(drawn):
        text = text.replace(f"{{{number}}}", value)
    is_empty = is_forced and dice.chance(0.12)
    if is_empty:
        text = talk.typed(dice.pick(talk.PAIRS)[0], dice) + dice.pick(["", " ", "!"]).strip()
        drawn = ["0" if _type_of(kind) == "integer" else UNKNOWN for kind in tool.arguments.values()]
    types = [_type_of(kind) for kind in tool.arguments.values()]
    arguments = {name: _typed(type_, value) for name, type_, value in zip(tool.arguments, types, drawn, strict=True)}
    reply, given = call(tool.name, arguments, is_forced, is_empty)
    return Use(tool, arguments, reply, given), text


def call(name: str, arguments: dict[str, Any], is_forced: bool, is_name_given: bool) -> tuple[str, Spans]:
    """A call as the model writes it, or as a grammar of forced calls does, with a newline inside each marker."""
    line = "\n" if is_forced else ""
    opening, middle = f'<tool_call>{line}{{"name": ', ', "arguments": '
    body, inner = written(arguments, is_forced)
    text = f"{opening}{json.dumps(name)}{middle}{body}}}{line}</tool_call>"
    start = len(opening) + len(name) + 2 + len(middle)
    if not is_forced:
        return text, ()
    head = ((0, start),) if is_name_given else ((0, len(opening)),)
    return text, (*head, *((first + start, end + start) for first, end in inner))


def a_result(dice: Dice, names: WideNames) -> str:
    """A tool's result; the agent repeats it."""
    text = dice.pick(_MATERIAL["results"])
    return text.replace("{w}", dice.pick(COMMON_WORDS)).replace("{n}", names.digits(dice.between(1, 5)))


def schema_of(value: Any) -> dict[str, Any]:
    """The schema that a client would send for an object like `value`."""
    if isinstance(value, dict):
        properties = {name: schema_of(each) for name, each in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    kinds = {bool: "boolean", int: "integer", float: "number"}
    return {"type": kinds.get(type(value), "string")}
