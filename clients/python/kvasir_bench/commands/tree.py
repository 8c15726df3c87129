"""`kvasir bench …`: the services' speed beside the speed of this machine's wire, disk and hash, in one run."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from kvasir.cli.caller import Caller, command
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.arguments import option

from kvasir_bench.attention import report as attention_report
from kvasir_bench.commands import engine, fleet, load, make_model, memory, memory_path, quality
from kvasir_bench.commands.paper.command import paper
from kvasir_bench.commands.shown import KeptOption, QuickOption, end, show
from kvasir_bench.engine import report as engine_report
from kvasir_bench.fleet import report as fleet_report
from kvasir_bench.load import report as load_report
from kvasir_bench.memory_path import findings
from kvasir_bench.paper import report as paper_report
from kvasir_bench.program import keep, measured_by
from kvasir_bench.quality import report as quality_report
from kvasir_bench.store import measuring


def store(
    caller: Caller,
    directory: Annotated[Path | None, option("A directory for the stores, on the disk to measure.")] = None,
    kept: KeptOption = None,
    quick: QuickOption = False,
) -> None:
    """Measure put, get, pull, find and start beside raw TCP, write + fsync and BLAKE3. Ends with 1 if a target is
    missed."""
    check_installed("store")
    with caller.busy("measuring the store; minutes at full size") as say:
        results = measuring.run(directory, say, partial(keep, kept), is_quick=quick)
    show(caller, results, measuring)
    end(results, is_quick=quick)


def attention(caller: Caller, quick: QuickOption = False) -> None:
    """Measure attention over quantized pages beside MLX's own and a copy. Ends with 1 if a target is missed.

    It needs a GPU: on a CPU it only shows that everything works, and its times mean nothing."""
    with caller.busy("measuring attention") as say:
        results = measured_by("attention", "attention could not be measured", {"--quick": quick}, say)
    show(caller, results, attention_report)
    end(results, is_quick=False)  # a quick run has no targets


app = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)
command(app, "store")(store)
command(app, "engine", epilog=engine_report.help_text())(engine.engine)
command(app, "attention", epilog=attention_report.KEYS)(attention)
command(app, "quality", epilog=quality_report.KEYS)(quality.quality)
command(app, "load", epilog=load_report.KEYS)(load.load)
command(app, "memory-path", epilog=findings.KEYS)(memory_path.memory_path)
command(app, "memory")(memory.memory)
command(app, "paper", epilog=paper_report.KEYS)(paper)
command(app, "fleet", epilog=fleet_report.KEYS)(fleet.fleet)
command(app, "make-model")(make_model.make_model)
