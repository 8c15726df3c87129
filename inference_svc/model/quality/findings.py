"""The findings about one way to keep KV, and the judgement: whether a rung does as well as exact KV. Pure numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# A rung passes if it gives at least this part of exact KV's right answers.
WITHIN = 0.99
# The part that exact KV itself must get right for a task to mean anything.
CAN_DO = 0.5

RECALL = "recall"
TOOL_CALLS = "tool_calls"
REPEAT = "repeat"


@dataclass(slots=True)
class Share:
    right: int = 0
    n: int = 0

    def add(self, right: int, n: int = 1) -> None:
        self.right, self.n = self.right + right, self.n + n

    @property
    def rate(self) -> float:
        return self.right / self.n if self.n else math.nan

    def as_json(self) -> dict[str, Any]:
        return {"share": self.rate, "right": self.right, "n": self.n}


@dataclass(frozen=True, slots=True)
class TextMeans:
    kl: float
    top1: float
    surprise: float


@dataclass(slots=True)
class Findings:
    """Sums over the measurements so far, with one way to keep KV; and the means of each text, for intervals."""

    name: str
    bytes_per_token: int
    positions: int = 0
    kl_sum: float = 0.0  # KL(exact KV || this), nats
    kl_worst: float = 0.0
    agreed: int = 0  # positions whose likeliest next token is that of exact KV
    surprise_sum: float = 0.0  # -log of the probability given to the token that came
    shares: dict[str, Share] = field(default_factory=dict)
    tasks: dict[str, Share] = field(default_factory=dict)  # answers that are right to the last token, by task
    seconds: float = 0.0
    texts: list[TextMeans] = field(default_factory=list)

    def add_text(self, *, positions: int, kl_sum: float, kl_worst: float, agreed: int, surprise_sum: float) -> None:
        self.positions += positions
        self.kl_sum += kl_sum
        self.kl_worst = max(self.kl_worst, kl_worst)
        self.agreed += agreed
        self.surprise_sum += surprise_sum
        self.texts.append(TextMeans(kl_sum / positions, agreed / positions, surprise_sum / positions))

    def share(self, task: str) -> Share:
        return self.shares.setdefault(task, Share())

    @property
    def kl(self) -> float:
        return self.kl_sum / self.positions if self.positions else math.nan

    @property
    def top1(self) -> float:
        return self.agreed / self.positions if self.positions else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise_sum / self.positions) if self.positions else math.nan

    def as_json(self) -> dict[str, Any]:
        """Stable key names; `kvasir bench quality --help` explains each."""
        return {
            "name": self.name,
            "bytes_per_token": self.bytes_per_token,
            "kl": self.kl,
            "kl_worst": self.kl_worst,
            "top1_agreement": self.top1,
            "perplexity": self.perplexity,
            "positions": self.positions,
            **{task: share.as_json() for task, share in sorted(self.shares.items())},
            **({"tasks": {task: share.as_json() for task, share in self.tasks.items()}} if self.tasks else {}),
            "seconds": round(self.seconds, 2),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    passes: bool
    why: str


def judged(found: Findings, exact: Findings) -> Verdict:
    """Compare a rung with exact KV on the same material.

    A model is judged by each task of which exact KV does half or more: right answers within 1 % of exact KV. One that
    answers questions is judged by recall and tool calls, too; any other by the canary: the tokens that it repeats, if
    it repeats any, and the same likeliest next token at 99 of 100 positions.
    """
    asked = [task for task in (RECALL, TOOL_CALLS) if task in exact.shares]
    shares = asked or [task for task in (REPEAT,) if task in exact.shares and exact.share(task).rate >= CAN_DO]
    pairs = {task: (found.share(task), exact.share(task)) for task in shares}
    pairs |= {name: (found.tasks[name], share) for name, share in exact.tasks.items() if share.rate >= CAN_DO}
    lost = [task for task, (ours, theirs) in pairs.items() if ours.right < WITHIN * theirs.right]
    said = ", ".join(f"{_words(task)} {_against(*pairs[task])}" for task in lost or pairs)
    if lost:
        return Verdict(False, said)
    if asked:
        return Verdict(True, said)
    agreement = f"top-1 agreement {found.top1:.4f} of {found.positions}"
    return Verdict(found.top1 >= WITHIN, ", ".join(filter(None, (said, agreement))))


def cheapest(ladder: Sequence[Findings], exact: Findings) -> tuple[Findings | None, str]:
    """The first rung of the ladder that passes, if one does, and the verdicts up to it as text."""
    reasons = []
    for found in ladder:
        verdict = judged(found, exact)
        reasons.append(f"{found.name} {'passes' if verdict.passes else 'does not'} ({verdict.why})")
        if verdict.passes:
            return found, "; ".join(reasons)
    return None, "; ".join(reasons)


def can_answer(exact: Findings) -> bool:
    """Whether the model, with exact KV, answers questions well enough for its errors to mean something."""
    return all(exact.share(task).rate >= CAN_DO for task in (RECALL, TOOL_CALLS))


def _against(found: Share, exact: Share) -> str:
    return f"{found.right} of {found.n}, exact KV {exact.right}"


def _words(task: str) -> str:
    return task.replace("_", " ")
