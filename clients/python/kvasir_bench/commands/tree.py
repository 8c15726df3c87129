"""`kvasir bench …`: the services' speed beside the speed of this machine's wire, disk and hash, in one run."""

from pathlib import Path
from typing import Annotated

import typer
from kvasir.cli.caller import JsonOption, caller_of
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.help_words import described

from kvasir_bench.attention import report as attention_report
from kvasir_bench.commands import engine, fleet, load, make_model, memory, memory_path, quality
from kvasir_bench.commands.paper.command import paper
from kvasir_bench.commands.shown import QuickOption, end, progress, show
from kvasir_bench.engine import report as engine_report
from kvasir_bench.fleet import report as fleet_report
from kvasir_bench.load import report as load_report
from kvasir_bench.memory_path import findings
from kvasir_bench.paper import report as paper_report
from kvasir_bench.program import measured_by
from kvasir_bench.quality import report as quality_report
from kvasir_bench.store import measuring


def store(
    context: typer.Context,
    directory: Annotated[
        Path | None, typer.Option(help="Where the measured stores lie, on the disk that is measured.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put, get, pull, find and start, beside raw TCP, write + fsync and BLAKE3. Ends with 1 when a target is missed."""
    caller = caller_of(context, as_json)
    check_installed("store")
    with progress(caller, "measuring the store; minutes at full size"):
        results = measuring.run(directory, is_quick=quick)
    show(caller, results, measuring)
    end(results, is_quick=quick)


def attention(context: typer.Context, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Attention over quantized pages beside MLX's own and a copy. Ends with 1 when a target is missed.

    It needs a GPU: on a CPU it shows that everything works, and its times mean nothing."""
    caller = caller_of(context, as_json)
    with progress(caller, "measuring attention") as say:
        results = measured_by("attention", "attention could not be measured", {"--quick": quick}, say)
    show(caller, results, attention_report)
    end(results, is_quick=False)  # a quick run has no targets


app = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)
app.command("store", **described(store))(store)
app.command("engine", epilog=engine_report.help_text(), **described(engine.engine))(engine.engine)
app.command("attention", epilog=attention_report.KEYS, **described(attention))(attention)
app.command("quality", epilog=quality_report.KEYS, **described(quality.quality))(quality.quality)
app.command("load", epilog=load_report.KEYS, **described(load.load))(load.load)
app.command("memory-path", epilog=findings.KEYS, **described(memory_path.memory_path))(memory_path.memory_path)
app.command("memory", **described(memory.memory))(memory.memory)
app.command("paper", epilog=paper_report.KEYS, **described(paper))(paper)
app.command("fleet", epilog=fleet_report.KEYS, **described(fleet.fleet))(fleet.fleet)
app.command("make-model", **described(make_model.make_model))(make_model.make_model)
