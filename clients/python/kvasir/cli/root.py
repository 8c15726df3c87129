"""The root of the command line: the options of every command, and how one runs."""

import io
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import kvasir
from kvasir.cli import failures
from kvasir.cli.caller import Caller, JsonOption, caller_of, with_options
from kvasir.cli.own_services.second_process import SecondProcess
from kvasir.cli.running.home import DEFAULT_HOME
from kvasir.cli.running.program import end_with_input
from kvasir.cli.showing import help_words
from kvasir.cli.showing.arguments import option

help_words.show_plain_words()


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


def new_app() -> typer.Typer:
    """The tree, still without commands."""
    app = typer.Typer(
        name="kvasir",
        help="An agent's KV cache is its memory. Kvasir keeps it.",
        epilog=failures.HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut long options off in a terminal of 80 columns
    )
    app.callback()(everywhere)
    return app


def run(app: typer.Typer, second: SecondProcess | None = None) -> None:
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
