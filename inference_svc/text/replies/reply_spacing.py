"""White space that a chat template writes itself around the parts of a reply.

A model generates it too, and it is no part of its thoughts or its answer: sent back by a caller, it would stand there
twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference_svc.text.template_names import REASONING

_THOUGHT, _ANSWER = "kvasirthought", "kvasiranswer"


@dataclass(frozen=True, slots=True)
class Spacing:
    """What stands behind the marker that opens reasoning, before the one that ends it, before the answer behind that,
    and between an answer and a call.
    """

    opening: str = ""
    closing: str = ""
    answer: str = ""
    call: str = ""


NO_SPACING = Spacing()


def spacing_of(render: Callable[[list[dict[str, Any]]], str], tool_start: str) -> Spacing:
    """`render`: a template's text of a conversation whose reply is there. `tool_start`: what stands before calls. A
    template that renders no reasoning has none.
    """
    reply = {"role": "assistant", "content": _ANSWER, REASONING: _THOUGHT}
    before, _, behind = _rendered(render, reply).partition(_THOUGHT)
    between, answer, _ = behind.partition(_ANSWER)
    if not answer or not between.strip():
        return NO_SPACING
    call = {"type": "function", "id": "000000000", "function": {"name": "x", "arguments": {}}}
    _, _, behind = _rendered(render, {**reply, "tool_calls": [call]}).partition(_ANSWER)
    space, start, _ = behind.partition(tool_start)
    is_space = bool(start) and not space.strip()
    return Spacing(_end(before), between[: len(between) - len(between.lstrip())], _end(between), space * is_space)


def _rendered(render: Callable[[list[dict[str, Any]]], str], reply: dict[str, Any]) -> str:
    try:
        return render([{"role": "user", "content": "x"}, reply])
    except Exception:  # noqa: BLE001 - a template is a program from outside and may raise anything
        return ""


def _end(text: str) -> str:
    return text[len(text.rstrip()) :]


class Trimmed:
    """One part of a reply, as it comes, without the white space that belongs to the template."""

    def __init__(self, before: str, behind: str = "") -> None:
        self._before, self._behind = before, behind
        self._head = self._tail = ""

    def push(self, text: str) -> str:
        """The text that is now certain to be the part's."""
        if self._before:
            self._head += text
            if len(self._head) < len(self._before) and self._before.startswith(self._head):
                return ""
            text, self._before, self._head = self._head.removeprefix(self._before), "", ""
        text = self._tail + text
        sizes = range(min(len(self._behind), len(text)), 0, -1)
        held = next((size for size in sizes if text.endswith(self._behind[:size])), 0)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """The rest of it, where no marker ended it."""
        return self._head + self._tail

    @property
    def has_closed(self) -> bool:
        """Whether the rest is just what stands before a marker."""
        return bool(self._behind) and self.end() == self._behind
