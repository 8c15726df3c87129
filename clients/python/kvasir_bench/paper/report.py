"""The tables for people and programs: text, Markdown, CSV, and pictures."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir_bench.paper.tables import content
from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.tables import Show, cells, text_table

KEYS = """Names in the JSON stay. `tables`: `number`, `paper`, `title`, `note`, the columns (`keys` name a row, `values`
are figures in seconds, bytes and shares) and `rows`. Each row has its columns, `by` (`here`: measured in this run; else
the model of the published figure) and a `note`: why it was not measured. `machine`, `model`, `settings` are of the
measured rows."""
_UNITS = ("_per_s", "_s", "_bytes", "")


def lines(results: Mapping[str, Any], show: Show = text_table) -> Iterator[str]:
    heading = "{}" if show is text_table else "### {}\n"
    yield f"{_made_on(results)}. Published figures are of the papers' machines, and of the models named beside them.\n"
    for paper, title in content()["papers"].items():
        of_paper = [table for table in results["tables"] if table["paper"] == paper]
        if of_paper:
            yield f"{title}\n" if show is text_table else f"## {title}\n"
        for table in of_paper:
            yield heading.format(f"{table['number']}: {table['title']}")
            yield from show(cells(_shown(table["rows"]))) if table["rows"] else ["not measured"]
            yield f"\n{table['note']}\n" if table["note"] else ""


def _made_on(results: Mapping[str, Any]) -> str:
    machine, model, settings = results["machine"], results["model"], results["settings"]
    return (
        f"Here: {model['name']} in {model['compute_type']} on {machine['device']}, {machine['cores']} cores, "
        f"{machine['platform']}, mlx {machine['mlx']}, load {machine['load_before']} before and "
        f"{machine.get('load_after', 0)} after; medians of {settings['repeats']}"
    )


def _shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the column of notes where there is none."""
    has_notes = any(row["note"] for row in rows)
    return [{name: value for name, value in row.items() if name != "note" or has_notes} for row in rows]


def write_csv(results: Mapping[str, Any], directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for table in results["tables"]:
        path = directory / f"{_file_name(table)}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*table["keys"], "by", *table["values"], "note"])
            writer.writeheader()
            writer.writerows(table["rows"])
        written.append(path)
    return written


def _file_name(table: Mapping[str, Any]) -> str:
    return f"paper_{table['number'].replace(' ', '_')}"


def plots(results: Mapping[str, Any]) -> Plots:
    """A picture of each table's figures of one unit: lines over contexts, or bars of the rows."""
    drawn = {}
    for table in results["tables"]:
        others_by = [name for name in (*table["keys"], "by") if name != "context_tokens"]
        is_line = "context_tokens" in table["keys"]
        x, by = ("context_tokens", "row") if is_line else ("row", "")
        for unit, names in _by_unit(table["values"]).items():
            rows = [
                {"context_tokens": row.get("context_tokens"), "row": ", ".join(str(row[name]) for name in others_by)}
                | {name: None if isinstance(row[name], str) else row[name] for name in names}
                for row in table["rows"]
            ]
            rows = [row for row in rows if any(row[name] is not None for name in names) and row[x] is not None]
            if rows:
                picture = Picture(table["title"], x, names, by=by, is_log=is_line)
                drawn[f"{_file_name(table)}{unit}"] = (picture, rows)
    return Plots(_made_on(results), drawn)


def _by_unit(values: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The columns by their units; those that have none only where they are all."""
    found: dict[str, tuple[str, ...]] = {}
    for name in values:
        unit = next(unit for unit in _UNITS if name.endswith(unit))
        found[unit] = (*found.get(unit, ()), name)
    return {unit: names for unit, names in found.items() if unit or len(found) == 1}
