"""`kvasir`: every command in one tree. Start here for the command line."""

from collections.abc import Callable

import typer

from kvasir.cli import agents, doctor, engine, keys, moving, pairing, store
from kvasir.cli.backups.commands import backup, restore
from kvasir.cli.caller import command
from kvasir.cli.callers import audit, reload, tokens
from kvasir.cli.demo import demo
from kvasir.cli.fleet import commands as fleet
from kvasir.cli.own_services.second_process import SecondProcess
from kvasir.cli.root import new_app, run
from kvasir.cli.running import group, up
from kvasir.cli.scenarios import commands as scenarios
from kvasir.cli.settings import showing
from kvasir.cli.sleeping import commands as sleeping
from kvasir.cli.talking import browser, chat
from kvasir.errors import FailedPrecondition

app = new_app()
_OF_HOME: list[Callable[..., None]] = [up.up, group.down, group.status, group.logs, reload.reload, backup, restore]
_COMMANDS: list[Callable[..., None]] = [audit.audit, chat.chat, demo.demo, doctor.doctor, engine.stats, pairing.pair]
_COMMANDS.append(fleet.gateway)
for _function in (*_OF_HOME, *_COMMANDS):
    command(app, _function.__name__)(_function)
command(app, "open")(browser.open_page)
app.add_typer(engine.models, name="models")
for _of_agents in (moving.pull, moving.move, moving.sync, moving.claim, sleeping.sleep, sleeping.wake):
    command(agents.app, _of_agents.__name__)(_of_agents)
app.add_typer(agents.app, name="agents")
app.add_typer(pairing.app, name="peers")
app.add_typer(store.app, name="store")
app.add_typer(fleet.app, name="fleet")
app.add_typer(tokens.app, name="tokens")
app.add_typer(keys.app, name="keys")
app.add_typer(showing.app, name="config")
app.add_typer(scenarios.app, name="scenario")


def _without_bench() -> None:
    """Measure Kvasir (not installed)."""
    raise FailedPrecondition("it is not installed; install kvasir[bench]", reason="NOT_INSTALLED")


def add_bench(tree: typer.Typer) -> None:
    """Add `kvasir bench …` and `kvasir prove`, or without their package commands that report that it is missing."""
    try:
        from kvasir_bench.commands.tree import app as bench
        from kvasir_bench.prove.command import HELP, prove
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("kvasir_bench"):
            raise
        any_words = {"allow_extra_args": True, "ignore_unknown_options": True}
        for name in ("bench", "prove"):
            tree.command(name, context_settings=any_words)(_without_bench)
    else:
        tree.add_typer(bench, name="bench")
        command(tree, "prove", HELP)(prove)


add_bench(app)


def main(second: SecondProcess | None = None) -> None:
    """See `run`."""
    run(app, second)
