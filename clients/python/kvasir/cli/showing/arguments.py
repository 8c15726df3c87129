"""The help of options and arguments, as the parameters of a command's function are annotated with it."""

from typing import Any

import typer


def option(text: str, *names: str, **about: Any) -> Any:
    """`names`: as it is typed, where the parameter has another name or wants no value; `about`: as typer has it."""
    return typer.Option(*names, help=text, **about)


def argument(text: str, metavar: str | None = None, **about: Any) -> Any:
    return typer.Argument(help=text, metavar=metavar, **about)
