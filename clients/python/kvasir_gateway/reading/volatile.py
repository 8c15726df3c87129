"""What of a prompt is left out, or kept as it was, because it changes from request to request and means nothing to a
model: lines of a system's text, and the date that a template prints. Each rule has a name, so that it can be switched
off and is reported.

No other text changes, and never a user's or an assistant's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvasir.errors import InvalidArgument

TEMPLATE_DATE = "template-date"
_BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class Rule:
    """`without` gives a system's text without what is volatile; it gets each text as it was sent, block by block. None:
    the engine applies the rule.
    """

    name: str
    applies_to: str
    without: Callable[[str], str] | None = None


def _without_billing_line(text: str) -> str:
    """Clients put it first, as a block of its own; proxies that translate may put it before the rest."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "billing-line",
            f"a system text's first line that begins with {_BILLING!r}, which providers strip too, is left out",
            _without_billing_line,
        ),
        Rule(TEMPLATE_DATE, "the date that the model's template prints stays the one that the conversation began with"),
    )
}


def rules_of(text: str) -> Sequence[Rule]:
    """RULE,… or none. Raises InvalidArgument for a name that is no rule's."""
    names = [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in RULES]:
        raise InvalidArgument(f"--volatile: {unknown[0]!r} is none of {', '.join(RULES)}, none", field="--volatile")
    return [RULES[name] for name in names]
