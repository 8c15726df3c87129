"""What the commands share: options, progress while they measure, and results with their end."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS, WrongUsage

from kvasir_bench.pictures import Plots

QuickOption = Annotated[
    bool, typer.Option("--quick", help="Measure less, and once, for a first look. No target counts then.")
]
ModelOption = Annotated[str, typer.Option(help="A directory or name of an mlx-lm model. Left out: the shipped model.")]
PlotsOption = Annotated[Path | None, typer.Option(help="Write PNGs into this directory.")]
HomeOption = Annotated[
    Path, typer.Option(exists=True, file_okay=False, help="A directory on the disk that is measured.")
]
SHORT_HOME = Path("/tmp")  # noqa: S108 - a socket's path must fit into a hundred bytes
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]


@contextmanager
def progress(caller: Caller, title: str, plots: Path | None = None) -> Iterator[Callable[[str], None]]:
    """Show what is measured. The pictures' directory is made first: an error after hours would lose the results."""
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
    if caller.shows_progress:
        with caller.err.status(title) as status:
            yield status.update
    else:
        caller.say(f"{title} …")
        yield caller.say


def read_results(file: Path, command: str, lines: Callable[[dict[str, Any]], Iterable[str]]) -> dict[str, Any]:
    """A run that was kept. Raises WrongUsage for any other file."""
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        list(lines(results))
    except (ValueError, LookupError, TypeError, AttributeError):
        text = f"--results: {file}: expected what one run of `kvasir bench {command} --json` printed"
        raise WrongUsage(text, field="--results") from None
    return results


def show(caller: Caller, results: dict[str, Any], lines: Callable[[dict[str, Any]], Iterable[str]]) -> None:
    caller.result(
        results, lambda out: out.print("\n".join(lines(results)), soft_wrap=True, markup=False, highlight=False)
    )


def draw(caller: Caller, plots: Plots, directory: Path | None) -> None:
    if directory is None:
        return
    try:
        written = plots.write(directory)
    except ImportError:
        caller.say("no pictures without matplotlib: install kvasir[bench]")
        return
    caller.say(f"wrote {', '.join(str(path) for path in written)}")


def end(results: dict[str, Any], *, is_quick: bool) -> None:
    if not is_quick and not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)
