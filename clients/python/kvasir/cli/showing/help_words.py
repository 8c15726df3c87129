"""How `--help` names what is typed: a flag wants nothing, a value is a word in capitals, an argument is its name.
A list of commands has the first sentence of each."""

import inspect
from collections.abc import Callable
from typing import Any

from typer.core import TyperArgument, TyperOption

_WORDS = {"bool": "", "path": "PATH", "dir": "PATH", "file": "PATH", "str": "TEXT", "int": "N", "float": "N"}


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """A command's help for typer, from its docstring: typer itself would end lines where the source does."""
    paragraphs = [" ".join(each.split()) for each in inspect.cleandoc(function.__doc__ or "").split("\n\n")]
    first, *more = paragraphs[0].split(". ")
    return {"help": "\n\n".join(paragraphs), "short_help": f"{first}." if more else first}


def show_plain_words() -> None:
    """Let typer show these words instead of Python's types. A `metavar` goes before them."""
    pythons = getattr(TyperOption, "display_type", None)
    if pythons is None:
        return  # a typer that has another way: its own words are better than no command line

    def word(option: TyperOption, ctx: Any) -> str:
        kind = str(pythons(option, ctx)).strip("<>").removesuffix(" range")
        if kind.startswith("list["):
            kind = kind.removeprefix("list[").removesuffix("]")
        return _WORDS.get(kind, kind)

    for kind, shown in ((TyperOption, word), (TyperArgument, lambda _argument, ctx: "")):  # noqa: ARG005  typer's name
        setattr(kind, "display_type", shown)  # noqa: B010  mypy forbids to assign a method
