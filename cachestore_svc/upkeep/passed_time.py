"""How much time has certainly passed, by the clock of the machine's running: a deletion may come late, never early."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Both clocks at one moment. `run`: of which run of the store."""

    unix_s: float
    uptime_s: float
    run: str = ""

    def since(self, before: "ClockReading | None") -> float:
        """Seconds that have surely passed since an earlier reading; 0 if nothing is sure."""
        if before is None:
            return 0.0
        passed_s = self.uptime_s - before.uptime_s
        if self.run == before.run:
            return max(passed_s, 0.0)
        if passed_s < 0:  # the machine was restarted
            passed_s = self.uptime_s
        # The data may lie in another machine now, which runs for longer.
        return max(min(passed_s, self.unix_s - before.unix_s), 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> "ClockReading | None":
        return cls(**json.loads(text)) if text else None
