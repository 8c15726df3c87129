"""Whether a service is well, and if not, why: what `/healthz` answers. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ailment:
    """One thing that is wrong. `reason` is a stable word; `message` says to people what it is."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Wellness:
    """What is wrong, and what else a service tells about itself. It names no agent, no namespace and no path."""

    ailments: Sequence[Ailment] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def http_status(self) -> int:
        return 503 if self.ailments else 200

    def body(self) -> dict[str, Any]:
        """{"status": "ok" | "unwell", "problems": [{"reason", "message"}], …facts}"""
        problems = [{"reason": each.reason, "message": each.message} for each in self.ailments]
        return {"status": "unwell" if problems else "ok", "problems": problems, **self.facts}
