"""The options of every command, and how results are shown: they alone go to stdout, all else to stderr."""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from kvasir.address import AddressError, parse_address
from kvasir.cli.own_services.second_process import SecondProcess
from kvasir.cli.running.home import DEFAULT_HOME, Endpoint, Home
from kvasir.cli.showing.arguments import option
from kvasir.cli.showing.help_words import described
from kvasir.cli.showing.terminal import PlainConsole, visible
from kvasir.errors import NotFound

_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass
class Caller:
    """One invocation. `main` makes it, the options fill it, every command reads it."""

    home: Home = field(default_factory=lambda: Home(DEFAULT_HOME.expanduser()))
    store_address: str = ""
    engine_address: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None
    as_json: bool = False
    second: SecondProcess | None = None  # rests, for a command that detaches
    out: Console = field(default_factory=PlainConsole)
    err: Console = field(default_factory=lambda: PlainConsole(stderr=True))

    def take(self, home: Path, address: str, engine: str, token_file: Path | None, ca_file: Path | None) -> None:
        """Take the options of every command."""
        try:
            self.home = Home(home.expanduser().absolute())
        except RuntimeError:  # Path's word for ~ of nobody
            raise typer.BadParameter(f"{home}: there is no such user", param_hint="--home") from None
        for name, given in (("--address", address), ("--engine", engine)):
            try:
                parse_address(given or "localhost:1")
            except AddressError as error:
                raise typer.BadParameter(str(error), param_hint=name) from None
        for name, file in (("--token-file", token_file), ("--ca-file", ca_file)):
            if file is not None and not file.exists():
                raise NotFound.of(name, f"{file}: there is no such file", reason="FILE_NOT_FOUND")
        self.store_address, self.engine_address = address, engine
        self.token_file, self.ca_file = token_file, ca_file

    @property
    def store(self) -> Endpoint:
        return self._endpoint("store", self.store_address)

    @property
    def engine(self) -> Endpoint:
        return self._endpoint("engine", self.engine_address)

    @property
    def is_engine_of_store(self) -> bool:
        """The home's engine has the home's agents, not those of another store that is named."""
        return bool(self.engine_address) or self.store.address == self.home.endpoint("store").address

    def _endpoint(self, service: str, address: str) -> Endpoint:
        known = self.home.endpoint(service)
        if address and not is_same_service(address, known.address):
            return Endpoint(address, self.token_file, self.ca_file)
        return Endpoint(known.address, self.token_file or known.token_file, self.ca_file or known.ca_file)

    def result(self, value: object, shown: RenderableType | Callable[[Console], None]) -> None:
        """Print a command's result: as JSON for scripts, else what people are shown, or what shows it."""
        if self.as_json:
            self.out.file.write(self._json(value, indent=2) + "\n")
        elif callable(shown):
            shown(self.out)
        else:
            self.out.print(shown)

    def line(self, value: object) -> None:
        """Print one object of a stream on a line of its own."""
        self.out.file.write(self._json(value) + "\n")
        self.out.file.flush()

    def _json(self, value: object, indent: int | None = None) -> str:
        """Escapes of JSON's own for letters that the output's encoding may lack."""
        return json.dumps(value, ensure_ascii=not self.out.encoding.startswith("utf"), indent=indent)

    def note(self, text: str) -> None:
        """Print a line about what goes on, for people and for the log of a program that starts this one."""
        self.err.print(text)

    def say(self, text: str) -> None:
        """Print a remark for people; scripts do not get it."""
        if not self.as_json:
            self.err.print(text)

    @contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show what is being done: a spinner at a terminal, a line elsewhere. Gives what shows the next step of it."""
        if self.shows_progress:
            with self.err.status(Text(visible(text))) as status:
                yield lambda step: status.update(Text(visible(step)))
        else:
            self.say(f"{text} …")
            yield self.say

    @property
    def shows_progress(self) -> bool:
        return not self.as_json and self.err.is_terminal


def is_same_service(address: str, known: str) -> bool:
    """Whether two addresses are one: the same text, or the same port of this machine."""
    try:
        one, other = parse_address(address), parse_address(known)
    except AddressError:
        return False  # the connection reports what is wrong with it
    return one == other or (one.port == other.port != 0 and one.is_loopback and other.is_loopback)


def completing(context: typer.Context) -> Caller:
    """The invocation whose words the shell completes: nothing of it has run."""
    given, caller = context.find_root().params, Caller()
    caller.take(*(given[name] for name in ("home", "address", "engine", "token_file", "ca_file")))
    return caller


JsonOption = Annotated[bool, option("Print JSON, for scripts.", "--json")]


def caller_of(context: typer.Context, as_json: bool = False) -> Caller:
    """The invocation that a command belongs to."""
    caller: Any = context.find_root().obj
    assert isinstance(caller, Caller)
    caller.as_json = caller.as_json or as_json
    return caller


def command(group: typer.Typer, name: str, epilog: str | None = None) -> Callable[[_Command], _Command]:
    """Make a function a command of the group: its first argument is the caller, the others are its options, or records
    of options, and --json is the last of them."""

    def add(function: _Command) -> _Command:
        spread = with_options(function)

        @functools.wraps(function)
        def run(context: typer.Context, as_json: bool = False, **options: Any) -> None:
            spread(caller=caller_of(context, as_json), **options)

        [_, *own] = inspect.signature(spread).parameters.values()
        context = inspect.Parameter("context", _KIND, annotation=typer.Context)
        as_json = inspect.Parameter("as_json", _KIND, annotation=JsonOption, default=False)
        _show_parameters(run, [context, *own, as_json])
        group.command(name, epilog=epilog, **described(function))(run)
        return function

    return add


_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """The function with each field of its records of options as a parameter, as typer wants them."""
    taken = inspect.signature(function, eval_str=True).parameters.values()

    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**{each.name: _value(each, values) for each in taken})

    _show_parameters(run, [option for each in taken for option in _options(each)])
    return run


def _show_parameters(function: Any, parameters: Sequence[inspect.Parameter]) -> None:
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {each.name: each.annotation for each in parameters}


def _is_record(kind: Any) -> bool:
    return is_dataclass(kind) and kind is not Caller


def _options(parameter: inspect.Parameter) -> Iterable[inspect.Parameter]:
    if not _is_record(parameter.annotation):
        return [parameter]
    return inspect.signature(parameter.annotation, eval_str=True).parameters.values()


def _value(parameter: inspect.Parameter, values: Mapping[str, Any]) -> Any:
    if not _is_record(parameter.annotation):
        return values[parameter.name]
    return parameter.annotation(**{option.name: values[option.name] for option in _options(parameter)})
