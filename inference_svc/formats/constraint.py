"""A reply format as a request gives it: a kind and its text."""

from dataclasses import dataclass, field
from enum import Enum


class ConstraintKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    TOOL_CHOICE = "tool_choice"
    """Calls of tools in a model's own format: JSON of one_call and of each tool's place, name and parameters."""
    CALLS_OR_FORMAT = "response_format"  # the same, or a text that matches `format`: its kind and text
    CALLS_IN_TEXT = "tools"
    """Any text, in which calls are bound once they begin: JSON as of TOOL_CHOICE, and whether each tool is strict."""


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: ConstraintKind
    text: str
    compiled: object = field(default=None, compare=False, repr=False)
    """For the model that serves the request, once that is done: its turn keeps it after a cache dropped it."""

    @property
    def has_calls(self) -> bool:
        """Whether replies may have calls of tools, which are read as such."""
        return self.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX)

    @property
    def begins_reply(self) -> bool:
        """Whether a reply's first token is bound: no thoughts stand before it."""
        return self.kind is not ConstraintKind.CALLS_IN_TEXT
