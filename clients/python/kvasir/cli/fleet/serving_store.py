"""`kvasir store serve`: the home's store without an engine, as one group that `status`, `logs` and `down` know."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from kvasir.address import AddressError, parse_address
from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.running import checks
from kvasir.cli.running.holding import led, locked
from kvasir.cli.running.logs import rotate_own_log
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.cli.running.plan import plan_of
from kvasir.cli.running.program import MODULE
from kvasir.cli.running.starting import detached, run_group
from kvasir.cli.settings.asked import Asked
from kvasir.cli.settings.showing import write_settings
from kvasir.options.finding import ENVIRONMENT, FLAG, ConfigError, Found, Given, add_options, environment, find
from kvasir.options.store import StoreTable
from kvasir.options.table import options_of
from kvasir.options.texts import texts_of
from kvasir.options.up import UpTable

_HELP = """kvasir store serve [-d] [OPTIONS]: run the store of the home without an engine.

Engines elsewhere use it with `kvasir up --store`. It listens on a Unix socket of the home, or at --listen HOST:PORT,
which wants --tls-cert-file and --tls-key-file but on 127.0.0.1. Engines show the token tokens/engine.token of the home.
With -d (--detach) it returns when the store is ready; `kvasir status`, `logs` and `down` look after it. With --data-dir
it serves other data, as a plain process. The options are those of its program:
"""


def serve_store(caller: Caller, words: Sequence[str], *, detach: bool) -> None:
    """Until Ctrl-C or SIGTERM; `detach`: return when it is ready. For `--help` and for other data than the home's this
    process becomes the store's own program. Raises WrongUsage, FailedPrecondition, Unavailable."""
    if "--help" in words:
        print(_HELP, flush=True)
        _become(words)
    flags = _flags(words)
    if "data_dir" in flags:
        if detach:
            raise WrongUsage.of("--detach", "it is for the home's own data: name another --home instead")
        _become([*words, *_left_out(caller, flags)])
    home, asked = caller.home, _asked(caller, flags)
    home.make()
    with led(home), locked(home, caller.say) as descriptor:
        if asked.up.store_listen and not asked.up.store_listen.startswith("unix:"):
            checks.check_free(asked.up.store_listen, "--listen")
        for socket in ("store", "engines"):
            checks.check_socket_free(home.run / f"{socket}.sock")
        if not detach:
            rotate_own_log(home.logs / "up.log")
            make_credentials(home)
            plan = replace(plan_of(asked), starts=("store",))
            write_settings(asked, plan)
            asyncio.run(run_group(caller, plan, descriptor, ""))
            return
    detached(caller)


def _flags(words: Sequence[str]) -> dict[str, Given]:
    """The options that are given. Raises WrongUsage."""
    parser, options = _Parser(prog="kvasir store serve", add_help=False), options_of(StoreTable)
    add_options(parser, StoreTable)
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    try:
        return {name: Given(texts_of(options[name], value), options[name].flag) for name, value in given.items()}
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _asked(caller: Caller, flags: dict[str, Given]) -> Asked:
    """Raises WrongUsage, also for an address of other machines without TLS."""
    try:
        own = find(StoreTable, {FLAG: flags})
        found: dict[str, Found] = find(StoreTable, {FLAG: flags, ENVIRONMENT: environment(StoreTable)})
        listen: str = own["listen"].value
        is_open = bool(listen) and not parse_address(listen).is_loopback
    except ConfigError as error:
        raise WrongUsage(str(error), field=error.field) from None
    except AddressError as error:
        raise WrongUsage.of("--listen", error) from None
    certificate, key = own["tls_cert_file"].value, own["tls_key_file"].value
    if is_open and (certificate is None or key is None):
        text = f"{listen} is open to other machines: TLS is needed, --tls-cert-file and --tls-key-file"
        raise WrongUsage.of("--listen", text)
    return Asked(caller.home, UpTable(store_listen=listen, tls_cert=certificate, tls_key=key), {"store": found})


def _left_out(caller: Caller, flags: dict[str, Given]) -> list[str]:
    """What a store of other data takes from the home."""
    words = [] if any(name.startswith("seal_") for name in flags) else [*caller.home.seal_options()]
    if "listen" not in flags:
        caller.home.make()
        words += ["--listen", caller.home.socket_address("store")]
    return words


def _become(words: Sequence[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, MODULE, "cachestore_svc", "serve", *words])  # noqa: S606  it becomes it


class _Parser(argparse.ArgumentParser):
    """Refuses as the command line does."""

    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message}. See `kvasir store serve --help`")
