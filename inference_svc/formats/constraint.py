"""A reply format as a request gives it: a kind and its text."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """The language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    TOOL_CHOICE = "tool_choice"
    """Calls of tools in a model's own format: JSON of one_call and of each tool's place, name and parameters."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A format that the whole reply must match. It was compiled once, so it is known to be valid."""

    kind: ConstraintKind
    text: str

    @property
    def is_calls(self) -> bool:
        """Whether replies are calls of tools, which are read as such."""
        return self.kind is ConstraintKind.TOOL_CHOICE
