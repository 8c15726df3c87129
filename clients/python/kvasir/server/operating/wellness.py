"""Whether a service is well, and if not, why: what `/healthz` answers. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ailment:
    """One thing that is wrong. `reason` is a stable word; `message` explains it to people."""

    reason: str
    message: str
    stops: bool = True  # the service does not do all that it should; False: it only is slow


def memories_not_stored(count: int) -> Ailment:
    """It stops nothing: the engine goes on trying, and a restart of it would lose these memories."""
    text = f"agents whose newest turns are in RAM alone, because the store did not take them: {count}"
    return Ailment("MEMORIES_NOT_STORED", text, stops=False)


@dataclass(frozen=True, slots=True)
class Wellness:
    """What is wrong, and what else a service tells about itself. It names no agent, no namespace and no path."""

    ailments: Sequence[Ailment] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def http_status(self) -> int:
        return 503 if any(each.stops for each in self.ailments) else 200

    def body(self) -> dict[str, Any]:
        """{"status": "ok" | "unwell", "problems": [{"reason", "message"}], …facts}"""
        problems = [{"reason": each.reason, "message": each.message} for each in self.ailments]
        return {"status": "ok" if self.http_status == 200 else "unwell", "problems": problems, **self.facts}
