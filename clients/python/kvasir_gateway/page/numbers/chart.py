"""Stacked bars of the last hour, a bar a minute: rectangles for an SVG, and the totals that show the same in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEIGHT = 100
# Colours that the style sheet has; what is beyond shares the last one.
_STYLES = 6


@dataclass(frozen=True, slots=True)
class Bar:
    """One name's part of one minute, in a box of `columns` × HEIGHT."""

    column: int
    top: float
    height: float
    style: int


@dataclass(frozen=True, slots=True)
class Total:
    """One name's count over the whole time."""

    name: str
    count: int
    style: int


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn. `most`: the count of the highest bar."""

    columns: int
    most: int
    bars: Sequence[Bar]
    totals: Sequence[Total]

    @property
    def count(self) -> int:
        return sum(total.count for total in self.totals)


def chart(minutes: Sequence[Mapping[str, int]], order: Sequence[str]) -> Chart:
    """`order`: names that come first, at the bottom of each bar and always shown; the others follow by their names."""
    names = [*order, *sorted({name for minute in minutes for name in minute} - set(order))]
    most = max((sum(minute.values()) for minute in minutes), default=0)
    bars = []
    for column, minute in enumerate(minutes):
        top = float(HEIGHT)
        for number, name in enumerate(names):
            if count := minute.get(name, 0):
                height = HEIGHT * count / most
                top -= height
                bars.append(Bar(column, round(top, 2), round(height, 2), _style(number)))
    totals = [
        Total(name, sum(minute.get(name, 0) for minute in minutes), _style(number)) for number, name in enumerate(names)
    ]
    return Chart(len(minutes), most, bars, totals)


def _style(number: int) -> int:
    return min(number, _STYLES - 1)
