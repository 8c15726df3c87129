"""A table of options: a frozen dataclass whose fields are made by `option`, each with its limits and its help."""

import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Value = TypeVar("_Value")
_ABOUT = "option"
_OPTIONS: "dict[type[Table], dict[str, Option]]" = {}


class Shape(Enum):
    """How often an option is given, and in which form."""

    SWITCH = auto()  # given or not
    ANSWER = auto()  # yes, no, or left out
    VALUE = auto()
    LIST = auto()
    PAIRS = auto()  # NAME=VALUE, once for each
    NUMBERS = auto()  # a JSON object of numbers, null for none


@dataclass(frozen=True, slots=True)
class UpFlag:
    """How `kvasir up` takes an option: by this flag, in the words that people use."""

    name: str
    metavar: str = ""
    convert: Callable[[str], str] = str
    """People's words as the service's; "" for none. Raises ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFacts:
    """A table's facts about an option beside its type and its default."""

    help: str
    metavar: str = ""
    none: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    check: Callable[[str], object] | None = None
    usual_name: str = ""
    up: UpFlag | None = None
    of_home: bool = False
    needed: bool = False


def option(
    default: _Value,
    help: str,  # noqa: A002  as argparse and typer call it
    *,
    up: "UpFlag | str | None" = None,
    **about: Any,
) -> _Value:
    """A field of a table. `least`, `above` and `most` are a number's limits; `check` raises ValueError for a text that
    cannot be; `none`: the word for None; `usual_name`: that of a VALUE alone, where NAME=VALUE may be given; `needed`:
    there is no default."""
    facts = OptionFacts(help=help, up=UpFlag(up) if isinstance(up, str) else up, **about)
    metadata = {_ABOUT: facts}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return field(default=default, metadata=metadata)  # type: ignore[return-value]


class WrongOption(ValueError):
    """A value that does not go with the others."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, kw_only=True)
class Table:
    """The settings of a program; what makes them is `kvasir.options.finding`."""

    program: ClassVar[str] = ""

    def check(self) -> None:
        """Raises WrongOption."""


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    shape: Shape
    item: Any
    """What one text becomes: str, int, float, Path, or the choices in a tuple."""
    default: Any
    about: OptionFacts

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def help(self) -> str:
        default = "" if self.about.needed or self.shape is not Shape.VALUE else self.default
        return f"{self.about.help} Default: {default}." if default else self.about.help

    @property
    def is_repeated(self) -> bool:
        return self.shape in (Shape.LIST, Shape.PAIRS)

    @property
    def metavar(self) -> str:
        if self.about.metavar or self.shape in (Shape.SWITCH, Shape.ANSWER):
            return self.about.metavar
        if isinstance(self.item, tuple):
            return "|".join(self.item)
        if self.shape in (Shape.PAIRS, Shape.NUMBERS):
            return "NAME=VALUE" if self.shape is Shape.PAIRS else "JSON"
        return {str: "TEXT", Path: "PATH"}.get(self.item, "N")


def options_of(table: type[Table]) -> dict[str, Option]:
    """The options of a program by name: its own, then those that it shares."""
    if table not in _OPTIONS:
        hints, of_table = get_type_hints(table), {each.name: each for each in fields(table)}
        parts = [fields(part) for part in table.__mro__ if is_dataclass(part)]
        place = {each.name: number for number, part in enumerate(parts) for each in part}  # of the class that has it
        _OPTIONS[table] = {
            name: Option(name, *_form(hints[name]), _default(of_table[name]), of_table[name].metadata[_ABOUT])
            for name in sorted(of_table, key=place.__getitem__)
        }
    return _OPTIONS[table]


def _default(one: "Field[Any]") -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _form(hint: Any) -> tuple[Shape, Any]:
    is_optional = get_origin(hint) in (Union, types.UnionType)
    if is_optional:
        [hint] = [part for part in get_args(hint) if part is not types.NoneType]
    if hint is bool:
        return (Shape.ANSWER if is_optional else Shape.SWITCH), bool
    if get_origin(hint) is Literal:
        return Shape.VALUE, get_args(hint)
    if get_origin(hint) is tuple:
        return Shape.LIST, get_args(hint)[0]
    if get_origin(hint) is dict:
        _, item = _form(get_args(hint)[1])
        return (Shape.NUMBERS if item in (int, float) else Shape.PAIRS), item
    return Shape.VALUE, hint
