"""The tools that agents of kvasir-tiny's world may call: the question, the call, its result, the reply that uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.kvasir_tiny import words
from tools.kvasir_tiny.words import CLOSED, Dice, Names

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

# name -> (description, argument names)
SIGNATURES: dict[str, tuple[str, list[str]]] = {
    "weather": ("Says the weather in a place.", ["place"]),
    "shop_price": ("Looks up what a thing costs.", ["item"]),
    "clock": ("Says what time it is in a place.", ["place"]),
    "distance": ("Measures the way between two places.", ["start", "end"]),
    "phone_book": ("Looks up a person's number.", ["name"]),
    "calendar": ("Says what happens on a day.", ["day"]),
    "dictionary": ("Explains a word.", ["word"]),
    "send": ("Sends a message to a person.", ["to", "text"]),
}


def schema(name: str) -> dict[str, Any]:
    """The tool in the form that OpenAI's clients send and chat templates receive."""
    description, arguments = SIGNATURES[name]
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": arguments}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _weather(dice: Dice, names: Names) -> ToolUse:
    place, sky = names.place(), dice.pick(words.CLOSED["sky"])
    question = dice.pick([f"What is the weather in {place}?", f"How is the weather in {place}?"])
    return ToolUse(question, "weather", {"place": place}, {"weather": sky}, f"The weather in {place} is {sky}.")


def _shop_price(dice: Dice, names: Names) -> ToolUse:
    item, price = dice.pick(words.GOODS), names.digits(3)
    question = dice.pick([f"How much does a {item} cost?", f"Look up the price of a {item}."])
    return ToolUse(question, "shop_price", {"item": item}, {"coins": int(price)}, f"A {item} costs {price} coins.")


def _clock(dice: Dice, names: Names) -> ToolUse:
    place, time = names.place(), f"{dice.between(1, 23)}:{dice.below(6)}{dice.below(10)}"
    question = dice.pick([f"What time is it in {place}?", f"Tell me the time in {place}."])
    return ToolUse(question, "clock", {"place": place}, {"time": time}, f"It is {time} in {place}.")


def _distance(_: Dice, names: Names) -> ToolUse:
    start, end, km = names.place(), names.place(), names.digits(3)
    question = f"How far is it from {start} to {end}?"
    return ToolUse(
        question, "distance", {"start": start, "end": end}, {"km": int(km)}, f"From {start} to {end} it is {km} km."
    )


def _phone_book(dice: Dice, names: Names) -> ToolUse:
    person, number = names.person(), names.digits(6)
    question = dice.pick([f"Look up the number of {person}.", f"How can I call {person}?"])
    return ToolUse(question, "phone_book", {"name": person}, {"number": number}, f"You can call {person} at {number}.")


def _calendar(dice: Dice, _: Names) -> ToolUse:
    day, event = dice.pick(CLOSED["day"]), dice.pick(words.EVENTS)
    question = dice.pick([f"What is in the calendar for {day}?", f"What happens on {day}?"])
    return ToolUse(question, "calendar", {"day": day}, {"event": event}, f"The calendar for {day} says: {event}.")


def _dictionary(dice: Dice, names: Names) -> ToolUse:
    word, meaning = names.word(), dice.pick(words.GOODS)
    question = f"What does the word {word} mean?"
    return ToolUse(question, "dictionary", {"word": word}, {"meaning": meaning}, f"The word {word} means {meaning}.")


def _send(_: Dice, names: Names) -> ToolUse:
    person, text = names.person(), names.word()
    question = f"Send the word {text} to {person}."
    return ToolUse(question, "send", {"to": person, "text": text}, {"sent": True}, f"I have sent it to {person}.")


USES: dict[str, Callable[[Dice, Names], ToolUse]] = {
    "weather": _weather,
    "shop_price": _shop_price,
    "clock": _clock,
    "distance": _distance,
    "phone_book": _phone_book,
    "calendar": _calendar,
    "dictionary": _dictionary,
    "send": _send,
}


def a_use(name: str, dice: Dice, names: Names) -> ToolUse:
    return USES[name](dice, names)
