"""What of a system's text is left out before a conversation is found and prompted: text that changes from request to
request and means nothing to a model. Each rule has a name, so that it can be switched off and is reported.

No other text changes, and never a user's or an assistant's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvasir.errors import InvalidArgument

_BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class Rule:
    """`without` gives a system's text without what is volatile; it gets each text as it was sent, block by block."""

    name: str
    leaves_out: str
    without: Callable[[str], str]


def _without_billing_line(text: str) -> str:
    """Clients put it first, as a block of its own; proxies that translate may put it before the rest."""
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "billing-line",
            f"a system text's first line where it begins with {_BILLING!r}: who is billed, which providers strip",
            _without_billing_line,
        ),
    )
}


def rules_of(text: str) -> Sequence[Rule]:
    """RULE,… or none. Raises InvalidArgument for a name that is no rule's."""
    names = [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in RULES]:
        raise InvalidArgument(f"--volatile: {unknown[0]!r} is none of {', '.join(RULES)}, none", field="--volatile")
    return [RULES[name] for name in names]
