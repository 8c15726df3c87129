"""The flags of `kvasir up`, made of the tables of options, as typer wants them: parameters of a function."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvasir.options.finding import Given
from kvasir.options.table import Option, Shape
from kvasir.options.texts import texts_of
from kvasir.options.up import flags

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="A settings file (TOML): the flags of `kvasir up` by name, and of each service those options that have no "
        "flag there, in [store], [engine] and [gateway].",
        metavar="FILE",
    ),
]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see a parameter for each flag of `kvasir up` where the function has `**flags`."""
    own = inspect.signature(command, eval_str=True)
    [context, *others] = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [context, *(_parameter(*each) for each in flags().items()), *others]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def given_flags(values: Mapping[str, Any]) -> dict[str, Given]:
    """What typer has read, by the flag's name without dashes in front. A flag that was left out is None or False."""
    found = {}
    for parameter, value in values.items():
        name = parameter.replace("_", "-")
        if value is None or (value is False and flags()[name].shape is Shape.SWITCH):
            continue
        found[name] = Given(texts_of(flags()[name], value), f"--{name}")
    return found


def _parameter(name: str, option: Option) -> inspect.Parameter:
    metavar = option.about.up.metavar if option.about.up is not None else ""
    words = f"--{name}/--no-{name}" if option.shape is Shape.ANSWER else f"--{name}"
    word = None if isinstance(option.item, tuple) else metavar or option.metavar or None
    return inspect.Parameter(
        name.replace("-", "_"),
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=False if option.shape is Shape.SWITCH else None,
        annotation=Annotated[_kind(option), typer.Option(words, help=option.help, metavar=word)],
    )


def _kind(option: Option) -> Any:
    if option.shape is Shape.SWITCH:
        return bool
    if option.shape is Shape.ANSWER:
        return bool | None
    if option.is_repeated:
        return list[str] | None
    if isinstance(option.item, tuple):
        return Literal[option.item] | None
    return Path | None if option.item is Path else str | None
