"""What of a prompt changes and means little, so that a memory keeps its value: rules by name, of a turn or an agent."""

from collections.abc import Mapping

from kvasir.errors import InvalidArgument

LABEL = "kvasir.volatile"
"""The agent's label: names of rules with commas between them, or "none"."""
NONE = "none"
BILLING_LINE = "billing-line"
TEMPLATE_DATE = "template-date"
TOOLS_ORDER = "tools-order"
SYSTEM_DATE = "system-date"
SYSTEM_CLOCK = "system-clock"

RULES: Mapping[str, str] = {
    BILLING_LINE: "a system text's first line that begins with 'x-anthropic-billing-header:', which providers strip "
    "too, is left out (over HTTP)",
    TEMPLATE_DATE: "the date that the model's template prints stays the one that the conversation began with",
    TOOLS_ORDER: "tools that are the memory's in another order, or with the keys of their JSON in another order, stay "
    "as the memory has them",
    SYSTEM_DATE: "dates in system texts stay those that the conversation began with; the newest follow the history as "
    "a system message, where the model's template takes one there",
    SYSTEM_CLOCK: "the same for times of the day, and for Unix times",
}
DEFAULT = frozenset({BILLING_LINE, TEMPLATE_DATE, TOOLS_ORDER})
"""Those that change no meaning. The others are named where they would have helped."""


def checked_rule(name: str, field: str) -> str:
    """Raises InvalidArgument, the field named, for a name that is no rule's."""
    if name not in RULES:
        raise InvalidArgument.of(field, f"{name[:40]!r} is none of {', '.join(RULES)}, {NONE}")
    return name


def rules_of(text: str, field: str) -> frozenset[str]:
    """RULE,… or none. Raises InvalidArgument, the field named."""
    names = [] if text == NONE else text.split(",")
    return frozenset(checked_rule(name.strip(), field) for name in names)


def from_label(value: str) -> frozenset[str]:
    """The rules that a label's value names. Raises InvalidArgument."""
    return rules_of(value, f"labels.{LABEL}")
