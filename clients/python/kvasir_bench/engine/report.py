"""`kvasir bench engine`: runs the program that measures the engine, and shows its results.

The SDK does not import the service: `python -m kvasir_bench.engine` measures and prints JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.cli.running.program import run_program

_SECONDS = "_s"
_SPREAD = "_spread"


@dataclass(frozen=True, slots=True)
class EngineScope:
    """What to measure, and how much; what is left out is the program's own choice."""

    model: str = ""
    cases: Sequence[str] = ()
    peer: str = ""
    repeats: int | None = None
    lengths: str = ""  # contexts in tokens, with commas between
    batches: str = ""  # rows that decode together, with commas between
    kv_policy: str = ""
    memory_gib: float | None = None
    time_limit_s: float | None = None
    is_quick: bool = False

    def arguments(self) -> list[str]:
        """The program's arguments."""
        options = {
            "--model": self.model,
            "--peer": self.peer,
            "--repeats": self.repeats,
            "--lengths": self.lengths,
            "--batches": self.batches,
            "--kv-policy": self.kv_policy,
            "--memory-gib": self.memory_gib,
            "--time-limit-s": self.time_limit_s,
        }
        given = [(name, str(value)) for name, value in options.items() if value not in ("", None)]
        flags = ["--quick"] if self.is_quick else []
        return [
            *(part for option in given for part in option),
            *flags,
            *(["--only", *self.cases] if self.cases else []),
        ]


def run(scope: EngineScope, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure. `say` gets the progress, line by line. `kvasir_bench.engine.keys` names the results.

    Raises FailedPrecondition, with the program's last line, if it could not measure.
    """
    return run_program("kvasir_bench.engine", scope.arguments(), "the engine could not be measured", say)


def table(results: Mapping[str, Any]) -> str:
    """The results as plain text."""
    return "\n".join(_lines(results, text_table, "{}"))


def markdown(results: Mapping[str, Any]) -> str:
    """The same as Markdown, for the project's pages."""
    return "\n".join(_lines(results, _markdown_table, "### {}\n"))


def _lines(results: Mapping[str, Any], show: Callable[[list[list[str]]], list[str]], heading: str) -> Iterator[str]:
    yield f"{_machine(results)}\n"
    for case in results["cases"].values():
        yield heading.format(case["title"])
        yield from show(cells(case["rows"]))
        yield ""
    if results["targets"]:
        yield heading.format("Targets")
        targets = [["", "found", "wanted", "what"]]
        targets += [
            ["met" if row["is_met"] else "NOT MET", _number(row["found"]), row["wanted"], row["what"]]
            for row in results["targets"]
        ]
        yield from show(targets)


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
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
    text = f"{_number(value * 1000 if unit else value)}{unit}"
    text += " s" if key.endswith(_SECONDS) and not unit and not key.endswith("_per_s") else ""
    return text if not spread else f"{text} ±{50 * spread:.0f}%"


def _number(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _machine(results: Mapping[str, Any]) -> str:
    machine, model, settings = results["machine"], results["model"], results["settings"]
    blas = f", {machine['blas']}" if machine["blas"] else ""
    device = machine["device"] if machine["device"] == "cpu" else f"{machine['device_name']} ({machine['device']})"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {device}{blas}; {machine['platform']}; "
        f"Python {machine['python']}, mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}; "
        f"load {machine['load_before']} before, {machine['load_after']} after. "
        f"{model['name']}: {model['layers']} layers, {model['compute_type']}, K {model['key_bits']} and "
        f"V {model['value_bits']} bits, {model['kv_bytes_per_token']} bytes a token, cells of {model['cell_tokens']}. "
        f"Medians of {settings['repeats']}{', quick' if settings['is_quick'] else ''}; ± is half the spread."
    )


def text_table(rows: list[list[str]]) -> list[str]:
    """A heading and rows as lines, right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown_table(rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---:|" * len(rows[0]), *lines[1:]]
