"""`kvasir bench paper`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from kvasir.cli.caller import Caller
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.arguments import option
from kvasir.credentials import read_token
from kvasir.errors import InvalidArgument

from kvasir_bench import program
from kvasir_bench.commands import shown
from kvasir_bench.commands.paper.bench import Bench
from kvasir_bench.commands.paper.cases import chosen, measured
from kvasir_bench.commands.shown import HomeOption, MarkdownOption, ModelOption, PlotsOption
from kvasir_bench.paper import report
from kvasir_bench.paper.tables import tables
from kvasir_bench.system import SHORT_HOME

QuickOption = Annotated[bool, option("Measure once, with contexts up to 1,100 tokens.", "--quick")]


@dataclass(frozen=True)
class PaperOptions:
    """The tables that are measured, and the servers that are."""

    model: ModelOption = ""
    table: Annotated[
        list[str] | None,
        option("A table's number (5.5), or a paper's (001 to 004). Repeatable. Default: all."),
    ] = None
    repeats: Annotated[int, option("The number of measurements; results are their medians.", min=1)] = 3
    quick: QuickOption = False
    home: HomeOption = SHORT_HOME
    http: Annotated[str, option("For 5.9: LM Studio, or another server of OpenAI's chat.", metavar="URL")] = ""
    http_model: Annotated[str, option("With --http: the model's name at that server.")] = ""
    api_key_file: Annotated[Path | None, option("With --http: the file of the key.")] = None

    def server(self) -> tuple[str, str, str] | None:
        """Address, model and key of a server over HTTP. Raises InvalidArgument."""
        if bool(self.http) != bool(self.http_model) or (self.api_key_file is not None and not self.http):
            raise InvalidArgument("--http and --http-model belong together, and --api-key-file to them", field="http")
        key = read_token(self.api_key_file) if self.api_key_file else ""
        return (self.http, self.http_model, key) if self.http else None


def paper(
    caller: Caller,
    options: PaperOptions,
    keep: Annotated[Path | None, option("Write the JSON to FILE after each table.", dir_okay=False)] = None,
    results_file: Annotated[
        list[Path] | None,
        option("Measure nothing; show this JSON. Several add up.", "--results", exists=True, dir_okay=False),
    ] = None,
    csv: Annotated[Path | None, option("Write a CSV for each table into this directory.")] = None,
    plots: PlotsOption = None,
    as_markdown: MarkdownOption = False,
) -> None:
    """Fill the tables of the papers that Kvasir is built from, each published figure beside one measured here.

    It marks contexts that the model does not have, and parts that do not exist. It starts services of its own."""
    server = options.server()
    if results_file:
        results = _kept(results_file)
    else:
        check_installed("store", "engine", gateway=True)
        wanted = chosen(options.table or ())
        repeats = 1 if options.quick else options.repeats
        with shown.progress(caller, "measuring the papers' tables; minutes", plots) as say:
            bench = Bench(say, options.model, repeats, options.quick, options.home, server)
            with bench.started:
                results = measured(bench, wanted, partial(program.keep, keep))
    if csv is not None:
        report.write_csv(results, csv)
    shown.show(caller, results, report, plots, as_markdown=as_markdown)


def _kept(files: list[Path]) -> dict[str, Any]:
    """The tables of all files in the papers' order, the last of each number, with the machine of the first file."""
    runs = [shown.read_results(file, "paper", report) for file in files]
    found = {table["number"]: table for run in runs for table in run["tables"]}
    return {**runs[0], "tables": [found[table.number] for table in tables() if table.number in found]}
