"""`kvasir scenario …`: run scenarios of several agents, go on with them, and report what happened."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from kvasir.cli import failures
from kvasir.cli.caller import Caller, command
from kvasir.cli.rows import counted
from kvasir.cli.showing.arguments import argument, option
from kvasir.errors import FailedPrecondition, KvasirError

app = typer.Typer(help="Let several agents talk in phases, each with its own memory.", no_args_is_help=True)

FileArgument = Annotated[str, argument("A scenario's YAML file, or the name of one of `kvasir scenario ls`.", "FILE")]


@command(app, "ls")
def ls(caller: Caller) -> None:
    """List the scenarios that come with Kvasir."""
    _runs().show_shipped(caller)


@command(app, "show")
def show(caller: Caller, file: FileArgument) -> None:
    """Print a scenario's file, as a start for your own: kvasir scenario show gossip > mine.yaml."""
    text = _runs().scenario_of(file).text
    caller.result({"text": text}, lambda out: out.print(text, end=""))


@command(app, "schema")
def schema(caller: Caller) -> None:
    """Print the JSON schema of scenario files, for editors."""
    _runs().show_schema(caller)


@dataclass(frozen=True)
class RunOptions:
    """What is run, and how fast."""

    model: Annotated[str, option("One of the engine's models. Default: the loaded one.")] = ""
    variant: Annotated[int, option("Draw other words for the scenario's values. 0: the first word of each.", min=0)] = 0
    journal: Annotated[Path | None, option("The run's journal. Default: a file in the home.")] = None
    retries: Annotated[int, option("How often to retry a failed turn.", min=0)] = 6
    parallel: Annotated[int, option("The most turns at the same time.", min=1, max=100)] = 16
    namespace: Annotated[
        list[str] | None,
        option("The token file of a namespace that the scenario names. Repeatable.", metavar="NAME=FILE"),
    ] = None


@command(app, "run")
def run(
    caller: Caller,
    file: FileArgument,
    options: RunOptions,
    dry_run: Annotated[
        bool, option("Print every prompt and its expected reuse, and run no turn.", "--dry-run")
    ] = False,
    fresh: Annotated[
        bool,
        option("First delete the scenario's own agents with their memories, and start from the beginning.", "--fresh"),
    ] = False,
) -> None:
    """Run a scenario, or continue a stopped run. Ends with 1 if an outcome is not met."""
    runs = _runs()
    scenario = runs.scenario_of(file, options.variant)
    if dry_run:
        runs.show_prompts(caller, scenario)
        return
    tokens = runs.tokens_of(scenario, options.namespace or [])
    with failures.naming("engine", caller), runs.journal_of(caller, scenario, options.journal, fresh=fresh) as begun:
        try:
            how = {"model": options.model, "tokens": tokens, "retries": options.retries, "parallel": options.parallel}
            is_met = asyncio.run(runs.run(caller, scenario, begun, **how))
        except (KeyboardInterrupt, SystemExit, KvasirError):
            done = counted(len(begun.answers), "turn")
            caller.say(f"\nstopped after {done}; run it again, without --fresh, to go on")
            raise
    if not is_met:
        raise typer.Exit(failures.PROBLEMS)


@command(app, "report")
def report(
    caller: Caller,
    file: Annotated[str, argument("A scenario's file or name (its newest run), or a journal.", "FILE")],
    out: Annotated[Path, option("The page to write. It replaces an older one.")] = Path("scenario.html"),
) -> None:
    """Write a run as one HTML page: each message with its speaker and its readers, and the reuse of each turn."""
    _runs().write_report(caller, file, out)


def _runs() -> ModuleType:
    """What needs the extra. Raises FailedPrecondition where it is not installed."""
    try:
        from kvasir.cli.scenarios import runs
    except ModuleNotFoundError as error:
        if error.name not in ("kvasir_orchestrator", "jinja2", "pydantic", "yaml"):
            raise
        text = "scenarios need the extra `orchestrator`: pip install 'kvasir[orchestrator]'"
        raise FailedPrecondition(text, reason="EXTRA_MISSING") from None
    return runs
