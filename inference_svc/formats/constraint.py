"""A reply format as a request names it: a kind and its text."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """In which language a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole reply must match. Already compiled once, so that it is known to be one."""

    kind: ConstraintKind
    text: str
