"""The rules for what is volatile: of a request's header, of its agent's label, or of the gateway."""

from dataclasses import dataclass

from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.volatile import BILLING_LINE, DEFAULT, rules_of

HEADER = "x-kvasir-volatile"
BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class Rules:
    """`is_asked`: the request names them, so that no label goes before them."""

    names: frozenset[str] = DEFAULT
    is_asked: bool = False

    def lasting(self, text: str) -> str:
        """A system's text without what is volatile, block by block, wherever a client's billing line stands."""
        is_billed = BILLING_LINE in self.names and text.startswith(BILLING)
        return text.partition("\n")[2] if is_billed else text

    def would_leave_out(self, text: str) -> bool:
        """Whether the rule for billing lines would change the text, and is off."""
        return BILLING_LINE not in self.names and text.startswith(BILLING)

    def for_engine(self) -> pb.VolatileRules | None:
        """None: its own defaults."""
        if self.names == DEFAULT and not self.is_asked:
            return None
        return pb.VolatileRules(names=sorted(self.names - {BILLING_LINE}), is_default=not self.is_asked)


NO_RULES = Rules(frozenset())


def asked(header: str | None, defaults: frozenset[str]) -> Rules:
    """The rules of a request. Raises InvalidArgument for a header that names others."""
    return Rules(defaults) if header is None else Rules(rules_of(header, HEADER), is_asked=True)
