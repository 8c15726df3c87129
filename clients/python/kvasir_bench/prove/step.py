"""A step of a proof, its scope, and how its value is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_bench.pictures import Plots

Report = Callable[[str], None]
Value = dict[str, Any]  # JSON; its "claims" are about exactness, each with `what` and `is_met`
Table = tuple[str, list[Sequence[str]]]  # a title, then a heading and rows
Shown = tuple[list[Table], Plots | None]


@dataclass(frozen=True, slots=True)
class ProofScope:
    """The model under test, and whether everything is small and measured once."""

    model: str = ""  # empty: the shipped model
    is_quick: bool = False


def facts(value: Mapping[str, Any]) -> Shown:
    rows = [
        (key.removesuffix("_bytes").replace("_", " "), _text(key, found))
        for key, found in value.items()
        if key != "claims"
    ]
    return [("", [("", "found"), *rows])], None


def _text(key: str, value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "–"
    if isinstance(value, bool) or not isinstance(value, float | int):
        return "–" if value in (None, "") else str(value)
    if key.endswith("_bytes"):
        return f"{value / 1e9:,.2f} GB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Step:
    """One part of a proof, in a process of its own, with seconds on a laptop; 0 quick ones: not in a quick proof."""

    name: str
    title: str
    seconds: float
    quick_seconds: float
    measure: Callable[[ProofScope, Report], Value]
    shown: Callable[[Mapping[str, Any]], Shown] = facts

    def expected_s(self, scope: ProofScope) -> float:
        return self.quick_seconds if scope.is_quick else self.seconds


def claim(what: str, is_met: bool) -> dict[str, Any]:
    return {"what": what, "is_met": bool(is_met)}
