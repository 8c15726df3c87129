"""`kvasir reload`: the running services of this home read credentials and peers again."""

import contextlib
import os
import signal
import time
from datetime import UTC, datetime
from typing import Any

import typer

from kvasir.cli.caller import JsonOption, caller_of
from kvasir.cli.running.audit import lines_of
from kvasir.cli.running.holding import holders
from kvasir.cli.running.home import Home
from kvasir.credentials import CredentialFileError, read_credentials
from kvasir.errors import FailedPrecondition, Unavailable

_PATIENCE_S = 10.0


def reload(context: typer.Context, as_json: JsonOption = False) -> None:
    """Let the running services read credentials and peers again. Calls of whoever was removed end."""
    caller = caller_of(context, as_json)
    home = caller.home
    pids = _pids(home)
    if not pids:
        raise Unavailable(f"no service of {home.root} runs", reason="NOT_RUNNING")
    try:
        read_credentials(home.credentials_file)
    except CredentialFileError as error:
        raise FailedPrecondition(str(error), reason="UNUSABLE_CREDENTIALS") from None
    told = {}
    with caller.busy("reloading"):
        for service, pid in pids.items():  # the store first: what the engine has read, it shows to the store
            began = datetime.now(UTC).isoformat(timespec="milliseconds")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
            told[service] = _told(home, service, began)
    caller.result(told, lambda out: out.print("\n".join(f"{name}: {_words(line)}" for name, line in told.items())))
    if wrong := [service for service, line in told.items() if line.get("outcome") != "allowed"]:
        text = f"{', '.join(wrong)}: the old set stays; `kvasir logs` says why"
        raise FailedPrecondition(text, reason="NOT_RELOADED")


def _pids(home: Home) -> dict[str, int]:
    """The services of this home that live, by name."""
    running, alive = home.running(), holders(home.services_lock_file)
    named = {service: getattr(running, f"{service}_pid", 0) for service in ("store", "engine", "http")}
    return {service: pid for service, pid in named.items() if pid in alive}


def _told(home: Home, service: str, began: str) -> dict[str, Any]:
    """What the service's audit says of this reload; nothing if it says nothing in time."""
    give_up = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        for line in lines_of(home.audit_file(service)):
            if line.get("what") == "reload" and str(line["at"]) >= began:
                return line
        time.sleep(0.05)
    return {}


def _words(line: dict[str, Any]) -> str:
    if not line:
        return "said nothing"
    if line.get("outcome") != "allowed":
        return str(line.get("reason"))
    return f"read {line.get('parts') or 'nothing: it has no such file'}; {line.get('ended_calls', 0)} calls ended"
