"""Where the parts of a reply begin and end, as mlx-lm knows it for a model: reasoning, tool calls, answer."""

from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import make_text_state_machine

# Many models were taught these markers. They serve for models of which mlx-lm knows no markers.
TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
_KNOWN = (
    *("has_thinking", "think_start", "think_end", "has_tool_calling", "tool_call_start", "tool_call_end"),
    *("response_transitions", "structural_markers"),
)


def reply_machine(tokenizer: Any) -> Any:
    """mlx-lm's TextStateMachine of a model. `tokenizer`: its TokenizerWrapper."""
    markers = SimpleNamespace(**{name: getattr(tokenizer, name) for name in _KNOWN})
    if not markers.has_tool_calling:
        markers.has_tool_calling = True
        markers.tool_call_start, markers.tool_call_end = TOOL_CALL_START, TOOL_CALL_END
    return make_text_state_machine(markers)  # type: ignore[no-untyped-call]
