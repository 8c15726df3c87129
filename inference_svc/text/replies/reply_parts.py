"""Splits a reply as it comes into reasoning, answer and tool calls. No text is lost; no memory depends on it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.manifest import call_id

from inference_svc.text.given_json import GivenJson, is_bounded
from inference_svc.text.replies.reply_spacing import NO_SPACING, Spacing, Trimmed

# States of mlx-lm's machine. Its other states stand before a part and show only which part follows.
_ANSWER, _REASONING, _TOOL = "normal", "reasoning", "tool"

ToolParser = Callable[[str], Any]


class ReplyMachine(Protocol):
    def make_state(self, initial: str) -> Any: ...

    def split(self, state: Any, text: str) -> tuple[Any, list[tuple[str, str]]]: ...

    def flush(self, state: Any) -> tuple[Any, str, str]: ...


@dataclass(frozen=True, slots=True)
class Markup:
    machine: ReplyMachine
    parse: ToolParser  # what stands between the markers of a call: a mapping with name and arguments, or several
    tool_end: str  # empty: a call goes on to the reply's end
    initial: str = _ANSWER
    spacing: Spacing = NO_SPACING
    opened: str = ""  # white space behind the marker that opens reasoning, where the prompt ends with both
    before: str = ""  # white space that the template writes between this prompt and the reply


@dataclass(frozen=True, slots=True)
class ReplyPart:
    answer: str = ""
    reasoning: str = ""


class ReplyReader:
    """Reads one reply. Without markup, all of it is answer."""

    def __init__(self, markup: Markup | None = None, reply_id: str = "", begins_with: str = "") -> None:
        """`reply_id` gives the reply's calls their ids. `begins_with`: a reply that begins otherwise is all answer."""
        self.calls: list[manifest_pb2.ToolCall] = []
        self._markup = markup
        self._reply_id = reply_id
        self._begins_with = begins_with  # empty once it is known whether the reply does
        self._beginning = ""
        self._state = markup.machine.make_state(markup.initial) if markup is not None else None
        self._unread = ""  # may be the beginning of a marker
        self._answer = self._reasoning = ""
        # A part of it is reasoning, which may be empty, or the head of a message.
        self.has_reasoned = markup is not None and markup.initial != _ANSWER
        self._part = Trimmed("") if markup is None else self._begun(markup.initial, opened=markup.opened)
        if markup is not None and markup.initial == _ANSWER:
            self._part = Trimmed(markup.before, markup.spacing.call)
        self._aside = ""  # of a call or of the text before a part, with the marker that opened it
        self._inner = ""  # of a call, between its markers

    def push(self, text: str) -> ReplyPart:
        """Read more. Where a part ends, a character at a time, so that it is known which characters it was."""
        if self._begins_with:
            text = self._beginning = self._beginning + text
            if len(text) < len(self._begins_with) and self._begins_with.startswith(text):
                return ReplyPart()
            if not text.startswith(self._begins_with):
                self._markup = None
            self._begins_with = ""
        if self._markup is None:
            return ReplyPart(text)
        split = self._markup.machine.split
        for part in text if len(split(self._state, text)[1]) > 1 else (text,):
            self._unread += part
            self._state, segments = split(self._state, part)
            self._read(segments)
        return self._take()

    def whole(self, reply: str, stop_text: str) -> ReplyPart:
        part, rest = self.push(reply), self.end(stop_text)
        return ReplyPart(part.answer + rest.answer, part.reasoning + rest.reasoning)

    def end(self, stop_text: str = "") -> ReplyPart:
        """The reply is whole. `stop_text`: the end token's own text; for some models it is a call's end."""
        if self._begins_with:
            self._begins_with, self._markup = "", None
            return ReplyPart(self._beginning)
        if self._markup is None:
            return ReplyPart()
        self._state, rest, state = self._markup.machine.flush(self._state)
        self._keep(state, rest)
        if state == _TOOL and self._markup.tool_end in ("", stop_text):
            self._close_call("")
        self._end_part(state)
        self._answer += self._aside
        self._aside = ""
        return self._take()

    def _read(self, segments: list[tuple[str, str]]) -> None:
        state, text = segments[0]
        self._keep(state, text)
        self._unread = self._unread[len(text) :]
        for following, text in segments[1:]:
            marker = self._unread[: len(self._unread) - len(text)]
            self._cross(state, following, marker)
            self._keep(following, text)
            self._unread = ""
            state = following

    def _keep(self, state: str, text: str) -> None:
        if state == _ANSWER:
            self._answer += self._part.push(text)
        elif state == _REASONING:
            self._reasoning += self._part.push(text)
        else:
            self._aside += text
            self._inner += text

    def _cross(self, state: str, following: str, marker: str) -> None:
        behind = state
        if state == _TOOL and not self._close_call(marker):
            behind = ""
        is_dropped = self._part.has_closed and (state == _REASONING or following == _TOOL)
        space = self._part.end() if is_dropped else ""
        if not is_dropped:
            self._end_part(state)
        self._part = self._begun(following, behind)
        self.has_reasoned |= following == _REASONING
        self._aside = space + marker if following == _TOOL else ""
        self._inner = ""

    def _begun(self, state: str, behind: str = "", opened: str = "") -> Trimmed:
        """A part of a reply. `opened`: of the white space behind its marker what the prompt has already."""
        assert self._markup is not None
        spacing = self._markup.spacing
        if state == _REASONING:
            return Trimmed(spacing.opening.removeprefix(opened), spacing.closing)
        if (behind, state) == (_TOOL, _ANSWER):
            return Trimmed(spacing.behind, spacing.between)
        return Trimmed(spacing.answer if (behind, state) == (_REASONING, _ANSWER) else "", spacing.call)

    def _end_part(self, state: str) -> None:
        if state == _REASONING:
            self._reasoning += self._part.end()
        else:
            self._answer += self._part.end()

    def _close_call(self, marker: str) -> bool:
        assert self._markup is not None
        calls = tool_calls(self._inner, self._markup.parse, self._reply_id, len(self.calls))
        if calls:
            self.calls += calls
        else:
            self._answer += self._aside + marker
        self._aside = self._inner = ""
        return bool(calls)

    def _take(self) -> ReplyPart:
        part = ReplyPart(self._answer, self._reasoning)
        self._answer = self._reasoning = ""
        return part


def tool_calls(text: str, parse: ToolParser, reply_id: str, first: int) -> list[manifest_pb2.ToolCall]:
    """The calls in a text between markers; empty unless all of the text is calls."""
    if not is_bounded(text):
        return []
    try:
        parsed = parse(text)
        every = parsed if isinstance(parsed, list) else [parsed]
        calls = [_tool_call(call_id(reply_id, first + number), fields) for number, fields in enumerate(every)]
    except Exception:  # noqa: BLE001 - a model may write anything, and a parser may raise and give anything on it
        return []
    return [call for call in calls if call is not None] if None not in calls else []


def _tool_call(own_id: str, fields: Any) -> manifest_pb2.ToolCall | None:
    """May raise anything when the name is no text, or the arguments no JSON object, which no caller can send back."""
    if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
        return None
    arguments = fields.get("arguments")
    if arguments in (None, ""):  # they stand for none
        arguments = {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    GivenJson([("arguments", text)]).read()
    return manifest_pb2.ToolCall(id=own_id, name=fields["name"], arguments_json=text)
