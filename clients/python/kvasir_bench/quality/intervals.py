"""95 % intervals of what a policy costs, over the windows of a text. Pure numbers.

A window counts as one drawing: its tokens depend on each other, its mean hardly on that of a window elsewhere."""

import math
import statistics
from collections.abc import Sequence
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
