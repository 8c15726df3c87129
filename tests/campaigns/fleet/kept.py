"""What rounds of a campaign found, in a file to which later rounds add."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Round:
    """A fleet from its start to the look for all that was acknowledged. Its seed plays its faults again."""

    seed: int
    faults: dict[str, int]
    commits: int
    lives: int
    looked_for: int  # agents whose newest acknowledged version was looked for at the end
    took_s: float
    problems: list[str]
    acts: int = 0  # of whose answers there must be an order
    not_judged: int = 0  # agents whose acts have too many orders
    leases: int = 0  # none of which two owners may have had at one time
    longest_stall_s: float = 0.0  # in which no commit was acknowledged

    @property
    def fault_count(self) -> int:
        return sum(self.faults.values())


class Kept:
    """The rounds of a file; `is_resumed`: those that it has, too."""

    def __init__(self, file: Path, *, is_resumed: bool) -> None:
        self._file = file
        has = is_resumed and file.exists()
        self.rounds = [Round(**each) for each in json.loads(file.read_text())["rounds"]] if has else []

    @property
    def faults(self) -> int:
        return sum(each.fault_count for each in self.rounds)

    @property
    def problems(self) -> list[str]:
        return [f"seed {each.seed}: {problem}" for each in self.rounds for problem in each.problems]

    def next_seed(self, first: int) -> int:
        return max((each.seed + 1 for each in self.rounds), default=first)

    def add(self, done: Round) -> None:
        self.rounds.append(done)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"rounds": [asdict(each) for each in self.rounds]}, indent=1) + "\n")
        new.replace(self._file)

    def summary(self) -> str:
        commits, took_s = sum(each.commits for each in self.rounds), sum(each.took_s for each in self.rounds)
        lives, minutes = sum(each.lives for each in self.rounds), max(took_s / 60, 1 / 60)
        return (
            f"{self.faults} faults in {len(self.rounds)} rounds and {minutes:.0f} minutes "
            f"({self.faults / minutes:.0f} a minute); {lives} lives; {commits} acknowledged commits; "
            f"{sum(each.acts for each in self.rounds)} acts, {sum(each.leases for each in self.rounds)} leases; "
            f"{sum(each.not_judged for each in self.rounds)} histories not judged; "
            f"{max((each.longest_stall_s for each in self.rounds), default=0.0):.0f} s without a commit at most; "
            f"{len(self.problems)} problems"
        )
