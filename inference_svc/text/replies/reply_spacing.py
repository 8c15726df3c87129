"""White space that a template writes around a reply's parts, and a model too: sent back, it would stand there twice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from inference_svc.text.templates.template_names import REASONING

_THOUGHT, _ANSWER = "kvasirthought", "kvasiranswer"


@dataclass(frozen=True, slots=True)
class Spacing:
    """What stands before a reply, around its reasoning, before and between calls, and behind the last one."""

    prompt_end: str = ""
    before: str = ""
    opening: str = ""
    closing: str = ""
    answer: str = ""
    call: str = ""
    between: str = ""
    behind: str = ""


NO_SPACING = Spacing()
Render = Callable[[list[dict[str, Any]], bool], str]


def spacing_of(render: Render, tool_start: str, tool_end: str) -> Spacing:
    """`render`: a template's text of messages, or of their prompt. `tool_start`, `tool_end` stand around calls."""
    call = {"type": "function", "id": "000000000", "function": {"name": "x", "arguments": {}}}
    reply = {"role": "assistant", "content": _ANSWER, REASONING: _THOUGHT}
    called = [_rendered(render, {**reply, "tool_calls": [call] * count}) for count in (2, 1)]
    calls = _around_calls(called[0] or called[1], tool_start, tool_end)
    head, _, between = _rendered(render, reply).partition(_THOUGHT)
    between, answer, _ = between.partition(_ANSWER)
    if not answer:  # reasoning may be kept before calls alone
        head, _, between = _rendered(render, {**reply, "content": "", "tool_calls": [call]}).partition(_THOUGHT)
        between, answer, _ = between.partition(tool_start)
    if not answer or not between.strip():
        return calls
    asked, prompt = _rendered(render), _rendered(render, is_prompt=True)
    return replace(
        calls,
        prompt_end=prompt.removeprefix(asked),
        before=_beginning(head.removeprefix(prompt)) if asked and head.startswith(prompt) else "",
        opening=_end(head),
        closing=_beginning(between),
        answer=_end(between) if answer == _ANSWER else "",
    )


def _around_calls(text: str, tool_start: str, tool_end: str) -> Spacing:
    """Of a reply with an answer and two calls, or one where the template takes no more."""
    space, start, behind = text.partition(_ANSWER)[2].partition(tool_start)
    if not start or space.strip():
        return NO_SPACING
    if not tool_end or tool_end not in behind:
        return Spacing(call=space)
    *inner, behind = behind.split(tool_end)
    between = inner[1].partition(tool_start)[0] if len(inner) == 2 else ""
    return Spacing(call=space, between="" if between.strip() else between, behind=_beginning(behind))


def _rendered(render: Render, *reply: dict[str, Any], is_prompt: bool = False) -> str:
    try:
        return render([{"role": "user", "content": "x"}, *reply], is_prompt)
    except Exception:  # noqa: BLE001 - a template is a program from outside and may raise anything
        return ""


def _beginning(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _end(text: str) -> str:
    return text[len(text.rstrip()) :]


class Trimmed:
    """One part of a reply, as it comes, without the white space that belongs to the template."""

    def __init__(self, before: str, behind: str = "") -> None:
        self._before, self._behind = before, behind
        self._head = self._tail = ""

    def push(self, text: str) -> str:
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
        return self._head + self._tail

    @property
    def has_closed(self) -> bool:
        """Whether the rest is just what stands before a marker."""
        return bool(self._behind) and self.end() == self._behind
