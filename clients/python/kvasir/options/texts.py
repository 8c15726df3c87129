"""Texts become an option's value, or are refused with what was expected."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir.options.table import Option, OptionFacts, Shape

_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def value_of(option: Option, texts: Sequence[str]) -> Any:
    """The value that the texts mean: one text, or several where the option is repeated. An empty one, or the option's
    word for it, means none, where the default is that. Raises ValueError."""
    if tuple(texts) == (option.about.none,) and option.default in (None, "", (), {}):
        return option.default
    match option.shape:
        case Shape.SWITCH | Shape.ANSWER:
            return _truth(texts[-1])
        case Shape.LIST:
            return tuple(_item(option, text) for text in texts)
        case Shape.PAIRS:
            return _pairs(option, texts)
        case Shape.NUMBERS:
            return _numbers(option, texts[-1])
    return _item(option, texts[-1])


def texts_of(option: Option, value: object) -> tuple[str, ...]:
    """A value as texts: of a command line, a settings file, or one that a program sets. Raises ValueError."""
    if isinstance(value, bool):
        return (str(value).lower(),)
    if isinstance(value, Mapping):
        if option.shape is Shape.NUMBERS:
            return (json.dumps(value),)
        value = [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, list | tuple):
        if len(value) != 1 and not option.is_repeated:
            raise ValueError(f"expected one value, got {len(value)}")
        return tuple(map(str, value))
    return (str(value),)


def words_of(option: Option, text: str) -> tuple[str, ...]:
    """The texts of a variable of the environment, which separates several by commas."""
    return tuple(part for part in text.split(",") if part) if option.is_repeated else (text,)


def arguments_of(option: Option, texts: Sequence[str]) -> list[str]:
    """The words of a command line that give the option these texts."""
    match option.shape:
        case Shape.SWITCH:
            return [option.flag] if _truth(texts[-1]) else []
        case Shape.ANSWER:
            return [option.flag if _truth(texts[-1]) else f"--no-{option.key}"]
    return [word for text in texts for word in _words(option.flag, text)]


def _words(flag: str, text: str) -> tuple[str, ...]:
    # A text that begins with a dash would be taken for an option.
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)


def _truth(text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise ValueError(f"expected true or false, got {text!r}")
    return _TRUTHS[text.lower()]


def _item(option: Option, text: str) -> Any:
    item, about = option.item, option.about
    if isinstance(item, tuple):
        if text not in item:
            raise ValueError(f"expected one of {', '.join(item)}, got {text!r}")
        return text
    if item in (int, float):
        return _number(item, text, about)
    if about.check is not None:
        about.check(text)
    return path_of(text) if item is Path else text


def path_of(text: str) -> Path:
    """Raises ValueError for an empty text, which would be the directory that the program runs in."""
    if not text:
        raise ValueError("expected a path, got ''")
    return Path(text)


def _number(kind: type[int] | type[float], text: str, about: OptionFacts) -> int | float:
    try:
        value = kind(text)
        is_within = (
            math.isfinite(value)
            and (about.least is None or value >= about.least)
            and (about.above is None or value > about.above)
            and (about.most is None or value <= about.most)
        )
    except ValueError:
        is_within = False
    if not is_within:
        raise ValueError(f"expected {_limits(kind, about)}, got {text!r}")
    return value


def _limits(kind: type, about: OptionFacts) -> str:
    number = "a whole number" if kind is int else "a number"
    if about.least is not None and about.most is not None:
        return f"{number} from {about.least:g} to {about.most:g}"
    if about.least is not None:
        return f"{number} of at least {about.least:g}"
    return number if about.above is None else f"{number} above {about.above:g}"


def _pairs(option: Option, texts: Sequence[str]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for text in texts:
        name, value = _pair_with_usual_name(text) if option.about.usual_name else text.partition("=")[::2]
        name = name or option.about.usual_name
        if not (name and value):
            raise ValueError(f"expected {option.metavar}, got {text!r}")
        if name in pairs:
            raise ValueError(f"{name!r} is given twice")
        pairs[name] = _item(option, value)
    return pairs


def _pair_with_usual_name(text: str) -> tuple[str, str]:
    """Name and value; no name where there is the value alone. An absolute path may hold an = itself."""
    if text.startswith("/"):
        return "", text
    name, is_absolute, path = text.partition("=/")
    return (name, f"/{path}") if is_absolute else text.rpartition("=")[::2]


def _numbers(option: Option, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"expected a JSON object of numbers by name, null for none, got {text!r}")
    found = {}
    for name, each in given.items():
        try:
            found[name] = None if each is None else _number(option.item, str(each), option.about)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found
