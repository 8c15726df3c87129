"""The pictures of a report: inline SVG, drawn with the page's own colours so that light and dark both suit."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 190, 56, 24


@dataclass(frozen=True, slots=True)
class Bar:
    """One turn's bar: parts from the bottom up, each with its class of colour; `title` is shown under the pointer."""

    parts: Sequence[tuple[str, float]]
    title: str

    @property
    def height(self) -> float:
        return sum(value for _, value in self.parts)


def bars(label: str, bars_: Sequence[Bar], unit: str) -> str:
    """Stacked bars over the turns."""
    top = max((bar.height for bar in bars_), default=0) or 1
    step = (_WIDTH - _LEFT) / max(1, len(bars_))
    drawn = []
    for place, bar in enumerate(bars_):
        x, bottom, rectangles = _LEFT + place * step, 0.0, []
        for kind, value in bar.parts:
            y = _y(bottom + value, top)
            height = _y(bottom, top) - y
            size = f'width="{step * 0.8:.1f}" height="{height:.1f}"'
            rectangles.append(f'<rect class="{kind}" x="{x + step * 0.1:.1f}" y="{y:.1f}" {size}/>')
            bottom += value
        drawn.append(f"<g><title>{escape(bar.title)}</title>{''.join(rectangles)}</g>")
    return _frame(label, "".join(drawn), top, unit, len(bars_))


def lines(label: str, series: Sequence[tuple[str, Sequence[float]]], unit: str) -> str:
    """Lines over the turns, one for each class of colour."""
    top = max((max(values, default=0) for _, values in series), default=0) or 1
    count = max((len(values) for _, values in series), default=0)
    step = (_WIDTH - _LEFT) / max(1, count)
    drawn = []
    for kind, values in series:
        points = " ".join(f"{_LEFT + (n + 0.5) * step:.1f},{_y(value, top):.1f}" for n, value in enumerate(values))
        drawn.append(f'<polyline class="line {kind}" points="{points}"/>')
    return _frame(label, "".join(drawn), top, unit, count)


def _y(value: float, top: float) -> float:
    return 10 + (_HEIGHT - 10 - _BOTTOM) * (1 - value / top)


def _frame(label: str, drawn: str, top: float, unit: str, count: int) -> str:
    ticks = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{_y(value, top):.1f}" y2="{_y(value, top):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{_y(value, top) + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
        for value in (0, top / 2, top)
    )
    turns = f'<text x="{_LEFT}" y="{_HEIGHT - 6}">turn 1</text>'
    turns += f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">turn {count}</text>'
    caption = f"<figcaption>{escape(label)} <small>({escape(unit)})</small></figcaption>"
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
    return f"<figure>{caption}{head}{ticks}{drawn}{turns}</svg></figure>"
