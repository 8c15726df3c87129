"""Where reasoning, tool calls and answer begin and end, as mlx-lm knows it; harmony's messages it does not know."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import make_text_state_machine

# Many models were taught these markers. They serve for models of which mlx-lm knows no markers.
TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_KNOWN = (
    *("has_thinking", "think_start", "think_end", "has_tool_calling", "tool_call_start", "tool_call_end"),
    *("response_transitions", "structural_markers"),
)
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
_ANALYSIS, _FINAL, _PREAMBLE = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
_HEAD = "head"  # the state before a message's text decides which part follows
_HARMONY_EDGES = {
    _HEAD: [(_ANALYSIS, "reasoning"), (_FINAL, "normal"), (_PREAMBLE, "normal"), (" to=functions.", "tool")],
    "reasoning": [("<|end|>", _HEAD)],
    "normal": [("<|end|>", _HEAD)],
}
_HARMONY_CALL = re.compile(r"([\w.-]+)[^{]*?<\|message\|>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReplyMarks:
    """How one model writes its replies. `call_end`: empty where a call goes on to the reply's end."""

    machine: Any  # mlx-lm's TextStateMachine
    initial: str  # the part that a reply begins with, unless its prompt begins another
    thinking: tuple[str, str] | None  # what stands before and behind reasoning; None: the model has none
    call_start: str
    call_end: str
    call_state: str  # from which a reply that begins with a call is read
    parse: Callable[[str, list[dict[str, Any]] | None], Any]  # a call's text: a mapping or several. May raise anything


def reply_marks(tokenizer: Any) -> ReplyMarks:
    markers = SimpleNamespace(**{name: getattr(tokenizer, name) for name in _KNOWN})
    initial, parser = tokenizer.response_initial_state or "normal", tokenizer.tool_parser
    thinking = (markers.think_start, markers.think_end) if markers.has_thinking else None
    if thinking is None and all(_is_known(tokenizer, mark) for mark in _HARMONY):
        initial, parser, thinking = _HEAD, _harmony_call, (_ANALYSIS, "<|end|>")
        markers.response_transitions = _HARMONY_EDGES
        markers.tool_call_start, markers.tool_call_end = " to=functions.", "<|call|>"
    elif not markers.has_tool_calling:
        markers.tool_call_start, markers.tool_call_end = TOOL_CALL_START, TOOL_CALL_END
    markers.has_tool_calling = True
    machine = make_text_state_machine(markers)  # type: ignore[no-untyped-call]
    parse = parser or (lambda text, _tools: json.loads(text))
    call_state = _HEAD if initial == _HEAD else "normal"
    return ReplyMarks(machine, initial, thinking, markers.tool_call_start, markers.tool_call_end, call_state, parse)


def _is_known(tokenizer: Any, token: str) -> bool:
    """Whether it is in the vocabulary, of which a copy takes 0.1 s."""
    return tokenizer.convert_tokens_to_ids(token) not in (None, tokenizer.unk_token_id)


def _harmony_call(text: str, _tools: object) -> Any:
    match = _HARMONY_CALL.match(text)
    return {"name": match[1], "arguments": json.loads(match[2])} if match else None
