"""Which layers to keep exact within a budget of bytes: those that cost most a byte; and whether it helps. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.model.quality.findings import Findings

# Student's t, two-sided 95 %, by the number of windows.
_T = {8: 2.365, 16: 2.131}


def interval(means: Sequence[float]) -> tuple[float, float]:
    """Low and high of the mean of these, of which there are 8 or 16."""
    middle = statistics.fmean(means)
    half = _T[len(means)] * statistics.stdev(means) / math.sqrt(len(means))
    return middle - half, middle + half


def with_intervals(found: Findings, exact: Findings) -> dict[str, Any]:
    """The findings as JSON, with intervals. The perplexity's rise is compared with exact KV window by window."""
    kl_low, kl_high = interval([each.kl for each in found.texts])
    top1_low, top1_high = interval([each.top1 for each in found.texts])
    rises = [each.surprise - own.surprise for each, own in zip(found.texts, exact.texts, strict=True)]
    rise_low, rise_high = interval(rises)
    return found.as_json() | {
        "kl_low": max(0.0, kl_low),
        "kl_high": kl_high,
        "top1_low": top1_low,
        "top1_high": min(1.0, top1_high),
        "perplexity_rise": math.expm1(statistics.fmean(rises)),
        "perplexity_rise_low": math.expm1(rise_low),
        "perplexity_rise_high": math.expm1(rise_high),
    }


def is_worse(found: Findings, other: Findings, windows: slice) -> bool:
    """Whether KL is larger than the other's in these windows by more than chance: their differences lie above 0."""
    pairs = zip(found.texts[windows], other.texts[windows], strict=True)
    return interval([one.kl - two.kl for one, two in pairs])[0] > 0


# Layers are chosen by every second window, and the mixture is judged on the others: a choice always looks good on the
# text that made it.
CHOOSING, JUDGING = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer alone under the policy; and the bytes a token that it takes more when it is exact."""

    layer: int
    exact_adds: int
    found: Findings

    def as_json(self) -> dict[str, Any]:
        kl_low, kl_high = interval([each.kl for each in self.found.texts])
        return {
            "layer": self.layer,
            "exact_adds_bytes": self.exact_adds,
            "kl": self.found.kl,
            "kl_low": max(0.0, kl_low),
            "kl_high": kl_high,
            "top1_agreement": self.found.top1,
        }


def kept_exact(costs: Sequence[LayerCost], spare_bytes: int) -> tuple[int, ...]:
    """The layers to keep exact with so many bytes a token, ascending."""
    kept = []
    for cost in sorted(costs, key=lambda cost: cost.found.kl / cost.exact_adds, reverse=True):
        if cost.exact_adds <= spare_bytes:
            kept.append(cost.layer)
            spare_bytes -= cost.exact_adds
    return tuple(sorted(kept))


def suggested(candidates: Sequence[Findings], budget_bytes: int) -> tuple[Findings, str]:
    """The cheapest within the budget that is not worse than the nearest to exact KV; and why. One must be within."""

    def kl(found: Findings) -> float:
        judged = found.texts[JUDGING]
        return sum(each.kl for each in judged) / len(judged)

    within = [found for found in candidates if found.bytes_per_token <= budget_bytes]
    nearest = min(within, key=kl)
    as_good = [found for found in within if not is_worse(found, nearest, JUDGING)]
    best = min(as_good, key=lambda found: (found.bytes_per_token, kl(found)))
    said = ", ".join(f"{found.name} {kl(found):.1e}" for found in sorted(within, key=kl))
    why = f"KL in the windows that chose no layer: {said}"
    if best is not nearest:
        why += f"; {nearest.name} is not nearer to exact KV than {best.name} by more than chance"
    return best, why
