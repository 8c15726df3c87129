"""`kvasir reload`: a token that was removed ends at every service, also when another service hangs."""

import contextlib
import os
import signal
import time
from datetime import UTC, datetime
from typing import Any

from kvasir.cli.caller import Caller
from kvasir.cli.callers.audit import lines_of
from kvasir.cli.rows import counted
from kvasir.cli.running.holding import holders
from kvasir.cli.running.home import Home
from kvasir.credentials import CredentialFileError, read_credentials
from kvasir.errors import FailedPrecondition, Unavailable
from kvasir.waits import PATIENCE_S, SOON_S


def reload(caller: Caller) -> None:
    """Make the running services read credentials, peers and the engine's tokens again.

    The engine also serves new namespaces. Calls of removed callers end."""
    home = caller.home
    pids = _pids(home)
    if not pids:
        raise Unavailable(f"no service of {home.root} runs: `{home.command('up')}` starts them", reason="NOT_RUNNING")
    try:
        read_credentials(home.credentials_file)
    except CredentialFileError as error:
        raise FailedPrecondition(str(error), reason="UNUSABLE_CREDENTIALS") from None
    with caller.busy("reloading"):
        asked = _ask_all(home, pids)
        give_up = time.monotonic() + PATIENCE_S
        told = {service: _answer(home, service, pid, asked[service], give_up) for service, pid in pids.items()}
    caller.result(told, "\n".join(f"{name}: {_words(line)}" for name, line in told.items()))
    problems = {
        "refused": "it keeps the old settings where the new ones are wrong; `kvasir logs` shows why",
        "silent": (
            "a service that hangs keeps the old set until it runs again; one that cannot write its audit (is the "
            "disk full?) has the new set, and cannot report it"
        ),
    }
    named = {outcome: [name for name, line in told.items() if line["outcome"] == outcome] for outcome in problems}
    if text := "; ".join(f"{', '.join(names)}: {problems[outcome]}" for outcome, names in named.items() if names):
        raise FailedPrecondition(text, reason="NOT_RELOADED")


def _pids(home: Home) -> dict[str, int]:
    """The services of this home that live, by name."""
    running, alive = home.running(), holders(home.services_lock_file)
    named = {service: getattr(running, f"{service}_pid", 0) for service in ("store", "engine", "http")}
    return {service: pid for service, pid in named.items() if pid in alive}


def _ask_all(home: Home, pids: dict[str, int]) -> dict[str, str]:
    """Signal each service; returns when, as its audit writes times."""
    asked = dict[str, str]()
    try:
        if "store" in pids:  # first: what the engine has read, it shows to the store
            asked["store"] = _ask(pids["store"])
            # So long a removed token goes on elsewhere if the store hangs.
            _answer(home, "store", pids["store"], asked["store"], time.monotonic() + SOON_S)
    finally:
        asked |= {service: _ask(pid) for service, pid in pids.items() if service not in asked}
    return asked


def _ask(pid: int) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGHUP)
    return now


def _answer(home: Home, service: str, pid: int, asked: str, give_up: float) -> dict[str, Any]:
    """The service's audit line of this reload, or that it has ended, or wrote none until `give_up`."""
    while True:
        for line in lines_of(home.audit_file(service)):
            if line.get("what") == "reload" and str(line["at"]) >= asked:
                return line
        if pid not in holders(home.services_lock_file):
            return {"service": service, "outcome": "ended"}
        if time.monotonic() > give_up:
            return {"service": service, "outcome": "silent"}
        time.sleep(0.05)


def _words(line: dict[str, Any]) -> str:
    match line["outcome"]:
        case "allowed":
            parts = line.get("parts") or "nothing: it has no such file"
            return f"read {parts}; {counted(line.get('ended_calls', 0), 'call')} ended"
        case "ended":
            return "has ended; it reads the new set when it is started again"
        case "silent":
            return "notes nothing in its audit; if it hangs, it reads the new set once it runs"
    return str(line.get("reason"))
