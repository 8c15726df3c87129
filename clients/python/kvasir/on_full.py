"""What happens to a conversation that outgrew its model's context: a setting of a turn, or of an agent by its label."""

from dataclasses import dataclass
from enum import Enum

from kvasir.errors import InvalidArgument

LABEL = "kvasir.on_full"
"""The agent's label: a policy's name, and after a colon how much of the context is kept: "drop_oldest:0.4"."""
DEFAULT_KEEP = 0.5
LEAST_KEPT, MOST_KEPT = 0.1, 0.8


class OnFullPolicy(Enum):
    """What becomes of the oldest messages."""

    REFUSE = "refuse"
    DROP_OLDEST = "drop_oldest"
    SUMMARIZE = "summarize"


@dataclass(frozen=True, slots=True)
class OnFull:
    """`keep`: share of the context that the shorter one may fill. `summary_request`: the question to the agent."""

    policy: OnFullPolicy = OnFullPolicy.REFUSE
    keep: float = DEFAULT_KEEP
    summary_request: str = ""

    @property
    def shortens(self) -> bool:
        return self.policy is not OnFullPolicy.REFUSE


def checked_keep(keep: float, field: str) -> float:
    """Raises InvalidArgument, the field named, for a share that leaves no room or nothing."""
    if not LEAST_KEPT <= keep <= MOST_KEPT:
        raise InvalidArgument.of(field, f"expected {LEAST_KEPT} to {MOST_KEPT}, got {keep}")
    return keep


def from_label(value: str) -> OnFull:
    """The setting of a label's value. Raises InvalidArgument."""
    name, _, share = value.partition(":")
    try:
        keep = float(share) if share else DEFAULT_KEEP
        return OnFull(OnFullPolicy(name), checked_keep(keep, f"labels.{LABEL}"))
    except ValueError:
        names = ", ".join(policy.value for policy in OnFullPolicy)
        raise InvalidArgument(
            f'labels.{LABEL}: expected one of {names}, as in "drop_oldest:{DEFAULT_KEEP}", got {value[:40]!r}',
            field=f"labels.{LABEL}",
        ) from None
