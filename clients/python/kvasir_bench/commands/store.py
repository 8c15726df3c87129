"""`kvasir bench store`."""

from pathlib import Path
from typing import Annotated

import typer
from kvasir.cli.caller import JsonOption, caller_of
from kvasir.cli.running.checks import check_installed

from kvasir_bench.commands.shown import QuickOption, end, progress, show
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
