"""Finds the values of a program's options: those of its command line, then of the environment, then the defaults."""

import argparse
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvasir.options.table import Option, Shape, Table, WrongOption, options_of
from kvasir.options.texts import arguments_of, texts_of, value_of, words_of

_Table = TypeVar("_Table", bound=Table)
FLAG, ENVIRONMENT, FILE, HOME, DEFAULT = "flag", "environment", "file", "home", "default"


class ConfigError(ValueError):
    """The configuration cannot be used. The message has the remedy; `field` is the option as it was given."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Given:
    """One place's word about an option: its texts, and how the option is named there."""

    texts: tuple[str, ...]
    named: str


@dataclass(frozen=True, slots=True)
class Found:
    """An option's value, the place that it came from, and how that names the option."""

    value: Any
    source: str = DEFAULT
    given: Given | None = None


def find(table: type[Table], places: Mapping[str, Mapping[str, Given]]) -> dict[str, Found]:
    """Every option of a program; the first place that names it counts. Raises ConfigError."""
    found = {}
    for name, option in options_of(table).items():
        source, given = next(((source, says[name]) for source, says in places.items() if name in says), (DEFAULT, None))
        found[name] = Found(_value(option, given), source, given) if given else Found(option.default)
    return found


def settings_of(table: type[_Table], found: Mapping[str, Found]) -> _Table:
    """The settings with these values. Raises ConfigError where one is missing, or does not go with the others."""
    for name, option in options_of(table).items():
        if option.about.needed and found[name].given is None:
            raise ConfigError(f"{option.flag}: it is needed: {option.about.help}", option.flag)
    settings = table(**{name: each.value for name, each in found.items()})
    try:
        settings.check()
    except WrongOption as wrong:
        given = found[wrong.name].given
        named = given.named if given else options_of(table)[wrong.name].flag
        raise ConfigError(f"{named}: {wrong}", named) from None
    return settings


def read(table: type[_Table], arguments: Mapping[str, object]) -> _Table:
    """The settings by a command line's arguments, None for those left out, and the environment. Raises ConfigError."""
    options = options_of(table)
    flags = {
        name: Given(texts_of(options[name], value), options[name].flag)
        for name, value in arguments.items()
        if value is not None
    }
    return settings_of(table, find(table, {FLAG: flags, ENVIRONMENT: environment(table)}))


def environment(table: type[Table]) -> dict[str, Given]:
    """The options of KVASIR_PROGRAM_OPTION variables. An empty one sets nothing."""
    named = {name: f"KVASIR_{table.program.upper()}_{name.upper()}" for name in options_of(table)}
    return {
        name: Given(words_of(options_of(table)[name], os.environ[variable]), variable)
        for name, variable in named.items()
        if os.environ.get(variable)
    }


def variables(others: Collection[str] = ()) -> dict[str, str]:
    """All variables of the environment that may give options, and these others."""
    return {name: value for name, value in os.environ.items() if name.startswith("KVASIR_") or name in others}


def add_options(parser: argparse.ArgumentParser, table: type[Table], names: Iterable[str] = ()) -> None:
    """Add a program's options to its command line: these, or all."""
    options = options_of(table)
    for option in [options[name] for name in names] or options.values():
        how: dict[str, Any] = {"action": "append" if option.is_repeated else "store", "metavar": option.metavar}
        if option.shape is Shape.SWITCH:
            how = {"action": "store_const", "const": True}
        elif option.shape is Shape.ANSWER:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(option.flag, dest=option.name, help=option.help.replace("%", "%%"), **how)


def command_line(table: type[Table], values: Mapping[str, object]) -> tuple[str, ...]:
    """The words of a program's command line that set these options. What is None or empty is left out."""
    options = options_of(table)
    given = [(options[name], value) for name, value in values.items() if value or value in (0, False)]
    return tuple(word for option, value in given for word in arguments_of(option, texts_of(option, value)))


def _value(option: Option, given: Given) -> Any:
    try:
        return value_of(option, given.texts)
    except ValueError as error:
        raise ConfigError(f"{given.named}: {error}", given.named) from None
