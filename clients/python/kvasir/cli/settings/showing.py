"""`kvasir config show`: every option of the services, its value, and where that came from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kvasir.cli.caller import Caller, command
from kvasir.cli.running.holding import is_led
from kvasir.cli.running.home import Home
from kvasir.cli.running.plan import Plan, plan_of
from kvasir.cli.settings.asked import Asked, asked_of
from kvasir.cli.settings.flags import ConfigOption
from kvasir.cli.showing.tables import table
from kvasir.credentials import replace_private_text
from kvasir.options.finding import HOME, Found
from kvasir.options.table import options_of
from kvasir.options.texts import texts_of
from kvasir.options.up import SERVICES

app = typer.Typer(no_args_is_help=True, help="Show the settings of the services.")


@command(app, "show")
def show(caller: Caller, config: ConfigOption = None) -> None:
    """Show each option of the services with its value and the source of that: a flag, the environment, the settings
    file, the home, or the default.

    While the services of this home run, these are their values; else those that `kvasir up` would use.
    """
    home = caller.home
    rows = None if config is not None or not is_led(home) else _written(home)
    if rows is None:
        asked = asked_of(home, {}, config)
        rows = list(_rows(asked, plan_of(asked)))
    caller.result(rows, lambda out: _show(out, rows))


def write_settings(asked: Asked, plan: Plan) -> None:
    """Keep what the services of the home are started with, for `show`."""
    replace_private_text(_file(asked.home), json.dumps(list(_rows(asked, plan))))


def last_value(home: Home, service: str, option: str) -> str:
    """What an option of a service was when the services of the home last started; "" if that is not known."""
    rows = _written(home) or []
    return next((row["value"] for row in rows if (row["service"], row["option"]) == (service, option)), "")


def _written(home: Home) -> list[dict[str, Any]] | None:
    """None: an older `kvasir up` wrote none."""
    try:
        rows: list[dict[str, Any]] = json.loads(_file(home).read_text(encoding="utf-8"))
        return rows
    except (OSError, ValueError):
        return None


def _file(home: Home) -> Path:
    return home.run / "settings.json"


def _rows(asked: Asked, plan: Plan) -> Iterator[dict[str, Any]]:
    of_homes = {"store": plan.store.options, "engine": plan.engine.options}
    of_homes["gateway"] = plan.gateway.options if plan.gateway is not None else {}
    is_started = {"gateway": "http" in plan.starts, **{name: name in plan.starts for name in ("store", "engine")}}
    for service, options in SERVICES.items():
        if not is_started[service]:
            continue
        of_home = of_homes[service]
        for name, option in options_of(options).items():
            found = asked.services[service][name]
            if name not in asked.passed_on(service) and (value := of_home.get(name)):
                found = Found(value, HOME)
            named = found.given.named if found.given else ""
            shown = "" if found.value is None or found.value == {} else ",".join(texts_of(option, found.value))
            told = {"value": shown, "from": found.source, "named": named}
            yield {"service": service, "option": option.key, **told}


def _show(out: Console, rows: list[dict[str, Any]]) -> None:
    cells = ((row["service"], row["option"], row["value"], row["named"] or row["from"]) for row in rows)
    out.print(table(("service", "option", "value", "from"), cells, whole="option"))
