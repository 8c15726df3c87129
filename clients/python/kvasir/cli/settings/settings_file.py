"""The settings file of `kvasir up --config` (TOML): its flags by name, and of each service the options without a flag.

memory-gib = 16
[store]
write-budget-bytes = 50_000_000_000"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.cli.failures import WrongUsage
from kvasir.options.finding import Given
from kvasir.options.table import Option, options_of
from kvasir.options.texts import texts_of
from kvasir.options.up import SERVICES, flags

TOP = ""


def read_file(path: Path | None) -> dict[str, dict[str, Given]]:
    """The file's settings: at its top by the flag's name, and of each service by the option's. Raises WrongUsage,
    NotFound and FailedPrecondition."""
    if path is None:
        return {part: {} for part in (TOP, *SERVICES)}
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise WrongUsage.of("--config", f"{path}: {error}") from None
    # `store = "HOST:PORT"` is the flag of that name; a table is the service's.
    of_services = {
        key: said[key] for key in SERVICES if key in said and not (key in flags() and isinstance(said[key], str))
    }
    top = {key: value for key, value in said.items() if key not in of_services}
    return {
        TOP: _given(path, TOP, top, flags()),
        **{service: _given(path, service, of_services.get(service, {}), _of_service(service)) for service in SERVICES},
    }


def _of_service(service: str) -> dict[str, Option]:
    options = options_of(SERVICES[service]).values()
    return {option.key: option for option in options if option.about.up is None and not option.about.of_home}


def _given(path: Path, part: str, said: Any, options: Mapping[str, Option]) -> dict[str, Given]:
    found = {}
    if not isinstance(said, dict):
        raise WrongUsage(f"--config: {path}: {part}: expected a table, [{part}]", field=part)
    for key, value in said.items():
        named = f"{path}: [{part}] {key}" if part else f"{path}: {key}"
        if key not in options:
            raise WrongUsage(f"{named}: {_why_not(part, key, options)}", field=key)
        try:
            found[options[key].name if part else key] = Given(texts_of(options[key], value), named)
        except ValueError as error:
            raise WrongUsage(f"{named}: {error}", field=key) from None
    return found


def _why_not(part: str, key: str, options: Mapping[str, Option]) -> str:
    for service, table in SERVICES.items():
        option = options_of(table).get(key.replace("-", "_"))
        if option is None:
            continue
        if option.about.of_home:
            return "`kvasir up` sets it itself"
        if option.about.up is not None and part == service:
            return f"it stands at the top, as {option.about.up.name}"
        if option.about.up is None:
            return f"it stands in [{service}]"
    near = difflib.get_close_matches(key, options, n=1)
    return f"there is no such option; is it {near[0]!r}?" if near else "there is no such option"
