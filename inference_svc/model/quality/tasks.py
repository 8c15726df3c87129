"""Tasks with one right answer, as JSON lines: the file that ships, kvasir-tiny's own, and files of a user's own.

Each line is an object: `task` (a name, for counting), `answer`, and either `prompt` (text, which the answer goes on) or
`messages` (as a chat template takes them, with `tools` if there are any; the answer is the whole reply). An answer is
right if every token of it is the likeliest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument, NotFound

MOST_BYTES = 16 << 20
_KEYS = ("task", "answer", "prompt", "messages", "tools")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `prompt` is empty where there are messages."""

    name: str
    answer: str
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def shipped_tasks() -> tuple[Task, ...]:
    """Chained arithmetic, edits of code and arguments of tools, in turn, for any model."""
    return read_tasks(Path(__file__).with_name("tasks.jsonl"))


def read_tasks(file: Path) -> tuple[Task, ...]:
    """The file's tasks. Empty lines are ignored. Raises NotFound, or InvalidArgument with the line and the field."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise NotFound.of("tasks", f"{file} cannot be read ({error.strerror})") from None
    if len(data) > MOST_BYTES:
        raise InvalidArgument.of("tasks", f"{file} is larger than {MOST_BYTES >> 20} MiB")
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise InvalidArgument.of("tasks", f"{file} has no task; expected a JSON object in each line")
    return tuple(_parsed(line, f"tasks: {file}, line {number}") for number, line in lines)


def task_of(content: Any, where: str) -> Task:
    """A task from its JSON object. Raises InvalidArgument, with `where` and the field."""
    if not isinstance(content, dict):
        raise _refused(where, "expected a JSON object", "")
    for key in content:
        if key not in _KEYS:
            raise _refused(where, f"expected only {', '.join(_KEYS)}", key)
    name, answer, prompt = (_text(content, key, where) for key in ("task", "answer", "prompt"))
    if not _NAME.fullmatch(name):
        raise _refused(where, "expected a name of at most 40 of a-z, 0-9 and _, which begins with a letter", "task")
    if not answer:
        raise _refused(where, "expected a text", "answer")
    messages, tools = _messages(content, where), _objects(content, "tools", where)
    if bool(prompt) == bool(messages):
        raise _refused(where, "expected a prompt or messages, and not both", "prompt")
    if tools and prompt:
        raise _refused(where, "tools belong to messages", "tools")
    return Task(name, answer, prompt, messages, tools)


def _parsed(line: bytes, where: str) -> Task:
    try:
        content: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _refused(where, f"expected JSON in UTF-8 ({type(error).__name__})", "") from None
    return task_of(content, where)


def _text(content: Mapping[str, Any], key: str, where: str) -> str:
    value = content.get(key, "")
    if not isinstance(value, str):
        raise _refused(where, "expected a text", key)
    return value


def _objects(content: Mapping[str, Any], key: str, where: str) -> tuple[dict[str, Any], ...]:
    value = content.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _refused(where, "expected a list of objects", key)
    return tuple(value)


def _messages(content: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    messages = _objects(content, "messages", where)
    for number, message in enumerate(messages):
        if message.get("role") not in _ROLES:
            raise _refused(where, f"expected one of {', '.join(_ROLES)}", f"messages[{number}].role")
        if not isinstance(message.get("content"), str):
            raise _refused(where, "expected a text", f"messages[{number}].content")
    return messages


def _refused(where: str, expected: str, key: str) -> InvalidArgument:
    return InvalidArgument(f"{where}{f', {key}' if key else ''}: {expected}", field=f"tasks.{key}" if key else "tasks")
