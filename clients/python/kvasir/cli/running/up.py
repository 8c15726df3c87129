"""`kvasir up`: store, engine and HTTP gateway as one group under one home, until Ctrl-C or SIGTERM."""

import asyncio
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvasir.address import PAIRING_PORT, parse_address
from kvasir.cli.caller import Caller
from kvasir.cli.failures import PROBLEMS
from kvasir.cli.fleet.elsewhere import check_store
from kvasir.cli.own_services.second_process import BEFORE_WITH_VALUE
from kvasir.cli.running import at_login as at_login_jobs
from kvasir.cli.running import checks
from kvasir.cli.running.holding import is_led, led, locked
from kvasir.cli.running.home import has_files
from kvasir.cli.running.logs import rotate_own_log
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.cli.running.plan import plan_of
from kvasir.cli.running.starting import EngineKilledError, detached, run_group
from kvasir.cli.running.supervisor import NotStartedError
from kvasir.cli.settings.asked import Asked, asked_of
from kvasir.cli.settings.flags import ConfigOption, given_flags, with_flags
from kvasir.cli.settings.showing import last_value, write_settings
from kvasir.cli.showing.arguments import option
from kvasir.errors import FailedPrecondition
from kvasir.options.gateway import DEFAULT_LISTEN

_TRIED_PORTS = 10  # from the usual one on
_ONLY_HERE = ("-d", "--detach", "--json", "--at-login")


@with_flags
def up(
    caller: Caller,
    config: ConfigOption = None,
    detach: Annotated[
        bool, option("Return when all services are ready; `kvasir down` stops them.", "--detach", "-d")
    ] = False,
    at_login: Annotated[
        bool, option("Start now and at each login, by launchd or the user's systemd.", "--at-login")
    ] = False,
    remove_at_login: Annotated[bool, option("Stop, and no longer start at login.", "--remove-at-login")] = False,
    as_login_job: Annotated[bool, typer.Option("--as-login-job", hidden=True)] = False,
    **flags: Any,
) -> None:
    """Run store, engine and HTTP gateway as one group, until Ctrl-C; with -d in the background, until `kvasir down`.

    --json: one object on standard output when all is ready, with the addresses and the token's file (also in the home,
    as run/up.json). Other messages go to standard error."""
    home = caller.home
    if remove_at_login:
        _remove_at_login(caller)
        return
    asked = asked_of(home, given_flags(flags), config)
    for model in asked.models_to_fetch:  # before anything starts, with its progress
        from kvasir.cli.hub import fetch

        fetch(caller, model.path)
    if not as_login_job or not asked.up.store:  # at login the network may come later, and the engine goes on asking
        _check_store(caller, asked)
    home.make()
    if at_login:
        _start_at_login(caller)
        return
    _note_full_disk(caller, asked)
    with led(home), locked(home, caller.say) as descriptor:
        for option, address in asked.addresses.items():
            checks.check_free(address, option)
        for socket in ("store", "engine", "engines"):
            checks.check_socket_free(home.run / f"{socket}.sock")
        if not detach:
            rotate_own_log(home.logs / "up.log")
            make_credentials(home)
            try:
                while not _ran(caller, asked, descriptor):
                    caller.note("another program has taken the gateway's port meanwhile; trying the next port")
            except EngineKilledError:
                if not as_login_job:  # the system would start again what it was requested to end
                    raise typer.Exit(PROBLEMS) from None
            return
    detached(caller)


def _check_store(caller: Caller, asked: Asked) -> None:
    """Raises FailedPrecondition where an empty store would take the place of one whose disk is not mounted."""
    home, has_data = asked.home, has_files(asked.home.store_data)
    if asked.up.store:
        check_store(home, asked.up)
        if has_data:
            caller.note(f"the store of this home, {home.store_data}, does not start: its agents are not served")
        return
    ran_here = (
        last_value(home, "store", "data-dir") == str(home.store_data) and (home.engine_state / "lease-owner").exists()
    )
    lies_elsewhere = asked.value("store", "catalog")  # then the store knows what it lost, if anything
    if ran_here and not has_data and not lies_elsewhere and not asked.value("store", "accept_older"):
        raise FailedPrecondition(
            f"{home.store_data} is gone or empty, with all memories. If its disk is not mounted, mount it; "
            f"`{home.command('up --accept-older')}` begins an empty store",
            reason="STORE_MISSING",
        )


def _note_full_disk(caller: Caller, asked: Asked) -> None:
    """Such a store starts, serves what it has, and takes no turn."""
    if asked.up.store or asked.value("store", "blobs"):
        return
    home, kept = caller.home, asked.value("store", "free_disk_reserve_bytes")
    free = shutil.disk_usage(home.store_data if home.store_data.exists() else home.root).free
    if free <= kept:
        from kvasir.cli.rows import size

        lack = f"has {size(free)} free, and {size(kept)} must stay free ([store] free-disk-reserve-bytes)"
        caller.note(f"the disk of {home.root} {lack}: no turn will be stored")


def _start_at_login(caller: Caller) -> None:
    """Let the system run this command, without the flags of this call alone."""
    job = at_login_jobs.job_of(caller.home, [word for word in _words_of_up() if word not in _ONLY_HERE])
    if is_led(caller.home) and not job.file.exists():
        raise FailedPrecondition(
            f"`kvasir up` runs here: `{caller.home.command('down')}` first", reason="ALREADY_RUNNING"
        )
    at_login_jobs.start_at_login(job)
    text = f"{job.file}: it starts now and at each login; `kvasir status` shows when it is ready"
    caller.result({"file": str(job.file)}, text)


def _words_of_up() -> list[str]:
    """The words behind the command's name, which may be the value of an option before it, too."""
    words = iter(sys.argv[1:])
    for word in words:
        if word in BEFORE_WITH_VALUE:
            next(words)
        elif not word.startswith("-"):
            break
    return list(words)


def _remove_at_login(caller: Caller) -> None:
    job = at_login_jobs.job_of(caller.home, ())
    was_there = at_login_jobs.forget_at_login(job)
    answer = "it starts no more" if was_there else "is not there: nothing starts at login"
    caller.result({"file": str(job.file), "was_there": was_there}, f"{job.file}: {answer}")


def _ran(caller: Caller, asked: Asked, descriptor: int) -> bool:
    """Run the group to its end. False if the port that was chosen for its gateway went to another program before it
    listened there, as by a `kvasir up` of another home."""
    is_said = bool(asked.up.http) or asked.up.no_http
    with ExitStack() as held:
        http, remark = (asked.up.http, "") if is_said else _usual_http(asked.addresses, held)
        if is_said and http and (claimed := checks.claim_given(http, "--http")) is not None:
            held.enter_context(claimed)
        asked = replace(asked, up=replace(asked.up, http=http))
        plan = plan_of(asked)
        write_settings(asked, plan)
        try:
            asyncio.run(run_group(caller, plan, descriptor, remark))
        except NotStartedError:
            if is_said or not http or checks.is_free(http, "--http"):
                raise
            return False
    return True


def _usual_http(addresses: Mapping[str, str], held: ExitStack) -> tuple[str, str]:
    """The gateway's usual address, or the next port that is free, or none; and a remark unless it is the usual one. No
    other home chooses it while it is `held`."""
    if not checks.has_gateway():
        return "", "none: its packages are not installed (kvasir[gateway])"
    usual = parse_address(DEFAULT_LISTEN)
    given = {PAIRING_PORT, *(parse_address(address).port for address in addresses.values())}
    last = usual.port + _TRIED_PORTS - 1
    for port in range(usual.port, last + 1):
        listen = f"{usual.host}:{port}"
        if port in given or not checks.is_free(listen, "--http") or (claimed := checks.claim(listen)) is None:
            continue
        held.enter_context(claimed)
        is_usual = port == usual.port
        return listen, "" if is_usual else f"{DEFAULT_LISTEN} is in use; `--http {listen}` keeps this one"
    return "", f"none: ports {usual.port} to {last} are in use; name another with --http 127.0.0.1:PORT"
