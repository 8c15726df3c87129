"""The command line as `kvasir up -d` needs it: the services would wait for the modules of other commands."""

from kvasir.cli.caller import command
from kvasir.cli.own_services.second_process import SecondProcess
from kvasir.cli.root import new_app, run
from kvasir.cli.running import up


def main(second: SecondProcess | None = None) -> None:
    """See `run`."""
    app = new_app()
    command(app, "up")(up.up)
    run(app, second)
