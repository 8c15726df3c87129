"""`kvasir bench …`: what the services do beside what this machine's wire, disk and hash could, in one run."""

from pathlib import Path
from typing import Annotated

import typer

from kvasir.bench import store as store_bench
from kvasir.cli.caller import JsonOption, caller_of
from kvasir.cli.failures import PROBLEMS

app = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)


@app.callback()
def everywhere() -> None:
    """What every measurement takes: nothing so far."""


@app.command("store")
def store(
    context: typer.Context,
    directory: Annotated[
        Path | None, typer.Option(help="Where the stores of the measurement lie: the disk that is measured.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Move less, for a look.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put, get, pull, find and start, beside raw TCP, write + fsync and BLAKE3. Ends with 1 when a target is missed."""
    caller = caller_of(context, as_json)
    said: list[str] = []
    with caller.busy("measuring the store; minutes at full size"):
        results = store_bench.run(as_json, directory=directory, is_quick=quick, say=said.append)
    caller.out.file.write("\n".join(said) + "\n")
    if not quick and not all(target["is_met"] for target in results["targets"]):
        raise typer.Exit(PROBLEMS)
