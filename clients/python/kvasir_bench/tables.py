"""Tables of results, as text or Markdown, and the table of targets that every measurement ends with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_SECONDS = "_s"
_SPREAD = "_spread"

Show = Callable[[list[Sequence[str]]], list[str]]


def cells(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """A heading and a row for each row, as text. A spread stands behind its median, as ±half of it in percent."""
    keys = [key for key in rows[0] if not key.endswith(_SPREAD)]
    return [[_heading(key) for key in keys], *([_cell(row, key) for key in keys] for row in rows)]


def _heading(key: str) -> str:
    bare = key if key.endswith("_per_s") else key.removesuffix(_SECONDS)  # a cell has its unit
    return bare.removesuffix("_bytes").replace("_", " ")


def _cell(row: Mapping[str, Any], key: str) -> str:
    value, spread = row[key], row.get(key + _SPREAD)
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("_bytes"):
        return f"{value / 1e6:,.1f} MB"
    unit = " ms" if key.endswith(_SECONDS) and value < 1 and not key.endswith("_per_s") else ""
    text = f"{number(value * 1000 if unit else value)}{unit}"
    text += " s" if key.endswith(_SECONDS) and not unit and not key.endswith("_per_s") else ""
    return text if not spread else f"{text} ±{50 * spread:.0f}%"


def number(value: float | None) -> str:
    """Three digits, or all of a large one's; a dash for what was not found."""
    if value is None:
        return "–"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def verdicts(targets: Iterable[Mapping[str, Any]]) -> list[Sequence[str]]:
    rows = (
        ("met" if row["is_met"] else "NOT MET", number(row["found"]), row["wanted"], row["what"]) for row in targets
    )
    return [("", "found", "wanted", "what"), *rows]


def text_table(rows: list[Sequence[str]]) -> list[str]:
    """A heading and rows as lines, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_table(rows: list[Sequence[str]]) -> list[str]:
    """The same as Markdown, for pages."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---:|" * len(rows[0]), *lines[1:]]
