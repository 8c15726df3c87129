"""Pictures of results: lines or bars of rows, each written as a PNG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COLOURS = ("#b3423a", "#2f6f9f", "#3f8f4f", "#8a6d1d", "#6b4c9a")


@dataclass(frozen=True, slots=True)
class Picture:
    """Lines of `y` over `x`, one for each value of `by` or each of several `y`; bars when `x` is no number."""

    title: str
    x: str
    y: tuple[str, ...]
    by: str = ""
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Plots:
    """Pictures by the name of their file, each with its rows; `note` stands below each."""

    note: str
    drawn: Mapping[str, tuple[Picture, Sequence[Mapping[str, Any]]]]

    def write(self, directory: Path) -> list[Path]:
        """Write a PNG for each. Raises ImportError without matplotlib."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, (picture, rows) in self.drawn.items():
            _draw(picture, rows, directory / f"{name}.png", self.note)
        return [directory / f"{name}.png" for name in self.drawn]


def series(picture: Picture, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[Any], list[float]]]:
    """Points by the name of their line, without rows that sum up others (turn "all") and what was not measured."""
    lines: dict[str, tuple[list[Any], list[float]]] = {}
    for row in rows:
        if row.get("turn") == "all":
            continue
        for key in (key for key in picture.y if row[key] is not None):
            named = [f"{picture.by.replace('_', ' ')} {row[picture.by]}"] if picture.by else []
            label = ", ".join([*named, key.replace("_", " ")] if len(picture.y) > 1 or not named else named)
            xs, ys = lines.setdefault(label, ([], []))
            xs.append(row[picture.x] if picture.x else "")
            ys.append(row[key])
    return lines


def _draw(picture: Picture, rows: Sequence[Mapping[str, Any]], path: Path, note: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines = series(picture, rows)
    is_line = all(isinstance(x, int) and not isinstance(x, bool) for xs, _ in lines.values() for x in xs)
    for index, (label, (xs, ys)) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        if is_line:
            axes.plot(xs, ys, marker="o", color=colour, label=label)
        else:
            width = 0.8 / len(lines)
            places = [place + width * (index - (len(lines) - 1) / 2) for place in range(len(xs))]
            axes.bar(places, ys, width, color=colour, label=label)
            axes.set_xticks(range(len(xs)), [str(x) for x in xs], fontsize=7)
    if is_line:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for xs, _ in lines.values() for x in xs})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    if picture.is_log:
        axes.set_yscale("log")
    axes.set_xlabel(f"{picture.x.replace('_', ' ')}\n{note}", fontsize=8)
    axes.set_title(picture.title, loc="left", fontsize=11)
    axes.grid(visible=True, which="both", axis="y", alpha=0.25)
    if is_line:
        axes.legend(frameon=False, fontsize=8)
    else:
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")  # bars leave no room
    figure.savefig(path)
