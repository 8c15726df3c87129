"""A reply format as a request gives it: a kind and its text."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """The language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A format that the whole reply must match. It was compiled once, so it is known to be valid."""

    kind: ConstraintKind
    text: str
