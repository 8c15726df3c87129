"""What the commands share: options, progress while they measure, and results with their end."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS, WrongUsage
from kvasir.cli.showing.arguments import option
from kvasir.errors import InvalidArgument

from kvasir_bench.pictures import Plots
from kvasir_bench.tables import markdown_table

QuickOption = Annotated[bool, option("Measure less, and once, for a first look. Targets do not count.", "--quick")]
ModelOption = Annotated[str, option("A directory or name of an mlx-lm model. Default: the shipped model.")]
PlotsOption = Annotated[Path | None, option("Write PNGs into this directory.")]
HomeOption = Annotated[Path, option("A directory on the disk that is measured.", exists=True, file_okay=False)]
KeptOption = Annotated[Path | None, option("Write the results into FILE after each step.", "--keep", dir_okay=False)]
MarkdownOption = Annotated[bool, option("Print Markdown tables.", "--markdown")]
Report = Any  # a module: `lines` of results, with `text_table` or another table, and `plots` of them


def given(options: Any) -> dict[str, object]:
    """A command's record of options as its program takes them."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    return {f"--{name.replace('_', '-')}": getattr(value, "value", value) for name, value in values.items()}


@contextmanager
def checking_options() -> Iterator[None]:
    """What refuses an option here is the command line's own refusal."""
    try:
        yield
    except InvalidArgument as error:
        raise WrongUsage(error.message, field=error.field) from None


@contextmanager
def progress(caller: Caller, title: str, plots: Path | None) -> Iterator[Callable[[str], None]]:
    """Show what is measured. The pictures' directory is made first: an error after hours would lose the results."""
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    with caller.busy(title) as say:
        yield say


def read_results(file: Path, command: str, report: Report) -> dict[str, Any]:
    """A run that was kept. Raises WrongUsage for any other file."""
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        list(report.lines(results))
    except (ValueError, LookupError, TypeError, AttributeError):
        text = f"{file}: expected what one run of `kvasir bench {command} --json` printed"
        raise WrongUsage.of("--results", text) from None
    return results


def show(
    caller: Caller,
    results: dict[str, Any],
    report: Report,
    plots: Path | None = None,
    *,
    as_markdown: bool = False,
) -> None:
    """Results as JSON or as their report's lines; and its pictures in the directory `plots`."""
    if plots is not None:
        _draw(caller, report.plots(results), plots)
    lines = report.lines(results, markdown_table) if as_markdown else report.lines(results)
    caller.result(results, lambda out: out.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False))


def _draw(caller: Caller, plots: Plots, directory: Path) -> None:
    try:
        caller.say(f"wrote {', '.join(str(path) for path in plots.write(directory))}")
    except ImportError:
        caller.say("no pictures without matplotlib: install kvasir[bench]")


def end(results: dict[str, Any], *, is_quick: bool) -> None:
    if not is_quick and not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)
