"""`kvasir bench engine`."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

from kvasir.cli.caller import Caller
from kvasir.cli.showing.arguments import option

from kvasir_bench.commands import shown
from kvasir_bench.engine import report
from kvasir_bench.program import measured_by

EngineCase = Enum("EngineCase", [(name, name) for name in report.CASES], type=str)  # type: ignore[misc]
Peer = Enum("Peer", [("mlx-lm", "mlx-lm")], type=str)  # type: ignore[misc]


@dataclass(frozen=True)
class EngineOptions:
    """The options that `python -m kvasir_bench.engine` has, too."""

    model: shown.ModelOption = ""
    peer: Annotated[Peer | None, option("Also give the same work to this program, in turns.")] = None
    repeats: Annotated[
        int | None,
        option("Measurements; results are their medians. Default: 5; 3 if they take 15 s, 2 if each does.", min=1),
    ] = None
    lengths: Annotated[str, option("Contexts in tokens, separated by commas. Default: each case's own.")] = ""
    batches: Annotated[str, option("Rows that decode together, separated by commas. Default: each case's own.")] = ""
    texts: Annotated[str, option("Kinds of replies of the case ahead, separated by commas. Default: all.")] = ""
    kv_policy: Annotated[str, option("As for `kvasir up`.")] = ""
    memory_gib: Annotated[float | None, option("Memory for KV, in GiB. Default: 4.", min=0.001)] = None
    time_limit_s: Annotated[
        float | None, option("Begin nothing new after this many seconds, and show the results so far.")
    ] = None
    quick: shown.QuickOption = False
    keep: shown.KeptOption = None


def engine(
    caller: Caller,
    options: EngineOptions,
    only: Annotated[list[EngineCase] | None, option("Measure this case alone. Repeatable.")] = None,
    results_file: Annotated[
        Path | None, option("Measure nothing; show this kept JSON.", "--results", exists=True, dir_okay=False)
    ] = None,
    plots: shown.PlotsOption = None,
    as_markdown: shown.MarkdownOption = False,
) -> None:
    """Measure decoding, first tokens, pairs, gaps, cancels, memory and reuse. Ends with 1 if a target is missed.

    Use a quiet machine: results are ratios within one run, but other work in the middle of a run spoils them. All cases
    take about 25 minutes on two cores; an interrupted run leaves its results in the file of `--keep`. The names in the
    JSON are below, and do not change."""
    if results_file is not None:
        results = shown.read_results(results_file, "engine", report)
    else:
        cases = ["--only", *(case.value for case in only)] if only else []
        with shown.progress(caller, "measuring the engine; minutes at full size", plots) as say:
            results = measured_by("engine", "the engine could not be measured", shown.given(options), say, *cases)
    shown.show(caller, results, report, plots, as_markdown=as_markdown)
    shown.end(results, is_quick=results["settings"]["is_quick"])
