"""`kvasir`: every command in one tree. Start here for the command line."""

import io
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import kvasir
from kvasir.cli import agents, doctor, engine, failures, keys, moving, pairing, store
from kvasir.cli.backups.commands import backup, restore
from kvasir.cli.caller import Caller, JsonOption, caller_of, command, with_options
from kvasir.cli.callers import audit, reload, tokens
from kvasir.cli.demo import demo
from kvasir.cli.fleet import commands as fleet
from kvasir.cli.own_services.second_process import SecondProcess
from kvasir.cli.running import group, up
from kvasir.cli.running.home import DEFAULT_HOME
from kvasir.cli.running.program import end_with_input
from kvasir.cli.scenarios import commands as scenarios
from kvasir.cli.settings import showing
from kvasir.cli.showing import help_words
from kvasir.cli.showing.arguments import option
from kvasir.cli.sleeping import commands as sleeping
from kvasir.cli.talking import browser, chat
from kvasir.errors import FailedPrecondition

help_words.show_plain_words()
app = typer.Typer(
    name="kvasir",
    help="An agent's KV cache is its memory. Kvasir keeps it.",
    epilog=failures.HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long options off in a terminal of 80 columns
)
_OF_HOME: list[Callable[..., None]] = [up.up, group.down, group.status, group.logs, reload.reload, backup, restore]
_COMMANDS: list[Callable[..., None]] = [audit.audit, chat.chat, demo.demo, doctor.doctor, engine.stats, pairing.pair]
_COMMANDS.append(fleet.gateway)
for _function in (*_OF_HOME, *_COMMANDS):
    command(app, _function.__name__)(_function)
command(app, "open")(browser.open_page)
app.add_typer(engine.models, name="models")
for _of_agents in (moving.pull, moving.move, moving.sync, moving.claim, sleeping.sleep, sleeping.wake):
    command(agents.app, _of_agents.__name__)(_of_agents)
app.add_typer(agents.app, name="agents")
app.add_typer(pairing.app, name="peers")
app.add_typer(store.app, name="store")
app.add_typer(fleet.app, name="fleet")
app.add_typer(tokens.app, name="tokens")
app.add_typer(keys.app, name="keys")
app.add_typer(showing.app, name="config")
app.add_typer(scenarios.app, name="scenario")


def _without_bench() -> None:
    """Measure Kvasir (not installed)."""
    raise FailedPrecondition("it is not installed; install kvasir[bench]", reason="NOT_INSTALLED")


def add_bench(tree: typer.Typer) -> None:
    """Add `kvasir bench …` and `kvasir prove`, or without their package commands that report that it is missing."""
    try:
        from kvasir_bench.commands.tree import app as bench
        from kvasir_bench.prove.command import HELP, prove
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("kvasir_bench"):
            raise
        any_words = {"allow_extra_args": True, "ignore_unknown_options": True}
        for name in ("bench", "prove"):
            tree.command(name, context_settings=any_words)(_without_bench)
    else:
        tree.add_typer(bench, name="bench")
        command(tree, "prove", HELP)(prove)


add_bench(app)


def _print_version(context: typer.Context, value: bool) -> None:
    if value:
        text = f"kvasir {kvasir.__version__}"
        caller_of(context).result({"kvasir": kvasir.__version__}, text)
        raise typer.Exit


def _directory(given: str | Path) -> Path:
    """Of a script's unset variable, which would be the current directory, nothing is made."""
    if given == "":
        raise typer.BadParameter("expected a directory, got ''")
    return Path(given)


@dataclass(frozen=True)
class CallerOptions:
    home: Annotated[
        Path,
        option(
            "The directory of `kvasir up`'s data, tokens and logs.",
            envvar="KVASIR_HOME",
            parser=_directory,
            metavar="PATH",
        ),
    ] = DEFAULT_HOME
    address: Annotated[
        str, option("The store: unix:/path or HOST:PORT. Default: the store of the home.", metavar="ADDRESS")
    ] = ""
    engine: Annotated[
        str, option("The engine: unix:/path or HOST:PORT. Default: the engine of the home.", metavar="ADDRESS")
    ] = ""
    token_file: Annotated[Path | None, option("File with the bearer token, mode 0600.")] = None
    ca_file: Annotated[Path | None, option("PEM certificate that the service must show.")] = None


@app.callback()
@with_options
def everywhere(
    context: typer.Context,
    options: CallerOptions,
    as_json: JsonOption = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
    _version: Annotated[
        bool, option("Print the version.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options of every command. `--until-eof`: a program that was killed leaves no command of its own behind."""
    if until_eof:
        end_with_input()
    caller_of(context, as_json).take(options.home, options.address, options.engine, options.token_file, options.ca_file)


def main(second: SecondProcess | None = None) -> None:
    """Run the command line and end the process with its exit code. `second`: for a command that detaches."""
    _end_at_signals()
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # A letter that the terminal lacks ends no reply.
        sys.stdout.reconfigure(errors="backslashreplace")
    # A command that cannot be understood is refused as JSON too.
    caller = Caller(as_json="--json" in sys.argv, second=second)
    sys.exit(failures.code_of(lambda: app(obj=caller, prog_name="kvasir", standalone_mode=False), caller))


def _end_at_signals() -> None:
    """SIGTERM, and a terminal that closes (not under nohup), end a command in order, with services that it started."""
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]

    def end(number: int, _frame: Any) -> None:
        for each in numbers:  # one is enough: another would cut the way out short
            signal.signal(each, signal.SIG_IGN)
        # No KeyboardInterrupt: Ctrl-C ends only a line or a reply of `kvasir chat`.
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
