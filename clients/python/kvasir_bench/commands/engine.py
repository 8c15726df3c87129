"""`kvasir bench engine`."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from kvasir.cli.caller import JsonOption, caller_of

from kvasir_bench.commands import shown
from kvasir_bench.engine import report
from kvasir_bench.program import measured_by

EngineCase = Enum("EngineCase", [(name, name) for name in report.CASES], type=str)  # type: ignore[misc]
Peer = Enum("Peer", [("mlx-lm", "mlx-lm")], type=str)  # type: ignore[misc]

OnlyOption = Annotated[list[EngineCase] | None, typer.Option(help="Measure this case alone. May be repeated.")]
PeerOption = Annotated[Peer | None, typer.Option(help="Give the same work to this program too, in turns.")]
RepeatsOption = Annotated[int | None, typer.Option(min=1, help="How often to measure; medians are shown. Left out: 5.")]
LengthsOption = Annotated[str, typer.Option(help="Contexts in tokens, with commas between. Left out: each case's own.")]
BatchesOption = Annotated[
    str, typer.Option(help="Rows that decode together, with commas between. Left out: each case's own.")
]
TextsOption = Annotated[
    str, typer.Option(help="Kinds of replies of the case ahead, with commas between. Left out: all.")
]
KvPolicyOption = Annotated[str, typer.Option(help="As for `kvasir up`.")]
MemoryOption = Annotated[float | None, typer.Option(min=0.001, help="For KV, in GiB. Left out: 4.")]
TimeLimitOption = Annotated[
    float | None, typer.Option(help="Begin nothing new after so many seconds; what is known is shown.")
]
ResultsFileOption = Annotated[
    Path | None, typer.Option("--results", exists=True, dir_okay=False, help="Measure nothing: show this kept JSON.")
]


def engine(
    context: typer.Context,
    model: shown.ModelOption = "",
    only: OnlyOption = None,
    peer: PeerOption = None,
    repeats: RepeatsOption = None,
    lengths: LengthsOption = "",
    batches: BatchesOption = "",
    texts: TextsOption = "",
    kv_policy: KvPolicyOption = "",
    memory_gib: MemoryOption = None,
    time_limit_s: TimeLimitOption = None,
    results_file: ResultsFileOption = None,
    plots: shown.PlotsOption = None,
    as_markdown: shown.MarkdownOption = False,
    quick: shown.QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Decode, first token, pairs, gaps, cancel, memory, reuse. Ends with 1 when a target is missed.

    Needs a quiet machine: results are ratios within one run, but a run that is disturbed in its middle says little. The
    names in the JSON are below, and do not change."""
    caller = caller_of(context, as_json)
    if results_file is not None:
        results = shown.read_results(results_file, "engine", report)
    else:
        options = shown.given(context, but=("only", "results_file", "plots", "as_markdown", "as_json"))
        cases = ["--only", *(case.value for case in only)] if only else []
        with shown.progress(caller, "measuring the engine; minutes at full size", plots) as say:
            results = measured_by("engine", "the engine could not be measured", options, say, *cases)
    shown.show(caller, results, report, plots, as_markdown=as_markdown)
    shown.end(results, is_quick=results["settings"]["is_quick"])
