"""Runs the services of a plan as one group until they must stop, and writes where they are found."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvasir.cli.caller import Caller
from kvasir.cli.failures import relayed
from kvasir.cli.own_services.engine_ahead import begun_engine
from kvasir.cli.own_services.installed_messages import import_messages
from kvasir.cli.own_services.second_process import SecondProcess
from kvasir.cli.running.home import Endpoint, Home, Running
from kvasir.cli.running.logs import rotate_log
from kvasir.cli.running.plan import Plan, ServiceProcess
from kvasir.cli.running.supervisor import Supervisor
from kvasir.errors import Unavailable

ENGINE_KILLED = "except those that the engine had not stored: it did not stop, and was killed"


class EngineKilledError(Exception):
    """The group was requested to stop and has stopped, and its engine had to be killed."""


async def run_group(caller: Caller, plan: Plan, descriptor: int, http_remark: str) -> None:
    """Until SIGINT, SIGTERM or a terminal that closes. The services inherit `descriptor`, a lock. `http_remark`: why no
    gateway starts. Raises EngineKilledError."""
    home = caller.home
    supervisor = Supervisor(
        [each.service() for each in plan.started],
        say=caller.note,
        keep_descriptor=descriptor,
        ahead=begun_engine(),
    )
    _stop_at_signals(supervisor)
    was_ready = False

    def report_to_others() -> None:
        home.write_running(_facts(home, plan, supervisor, was_ready, http_remark))

    def report_all_ready() -> None:
        nonlocal was_ready
        was_ready = True
        report_to_others()
        facts = _facts(home, plan, supervisor, was_ready, http_remark)
        answer = asdict(facts) | {"home": str(home.root), "logs": str(home.logs)}
        if caller.as_json:
            caller.line(answer)
        greet(caller.note, home, answer, "Ctrl-C stops all")

    caller.note(f"Starting in {home.root}; logs are in {home.logs}")
    report_to_others()
    try:
        await supervisor.run(report_all_ready, report_to_others)
    finally:
        if "engine" not in supervisor.killed:  # else `kvasir down` knows it by the file
            home.running_file.unlink(missing_ok=True)
    if "engine" in supervisor.killed:
        caller.note(f"All have stopped, {ENGINE_KILLED}")
        raise EngineKilledError
    caller.note("All have stopped.")


def _stop_at_signals(supervisor: Supervisor) -> None:
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)


def _facts(home: Home, plan: Plan, supervisor: Supervisor, is_ready: bool, http_remark: str) -> Running:
    store, engine, gateway = plan.store, plan.engine, plan.gateway
    has_token = engine.options.get("credentials_file") is not None
    is_elsewhere = "store" not in plan.starts
    has_engine = "engine" in plan.starts
    return Running(
        pid=os.getpid(),
        store=store.endpoint.address,
        engine=engine.endpoint.address if has_engine else "",
        token_file=str(home.tokens / "client.token") if has_token else "",
        ca_file=_text(store, "tls_cert_file") or _text(engine, "tls_cert_file"),
        store_pid=0 if is_elsewhere else supervisor.pid("store"),
        engine_pid=supervisor.pid("engine") if has_engine else 0,
        is_ready=is_ready,
        http=gateway.endpoint.address if gateway else "",
        http_url=f"http://{gateway.endpoint.address}/v1" if gateway else "",
        http_pid=supervisor.pid("http") if gateway else 0,
        http_remark=http_remark,
        metrics={
            "store": _text(store, "metrics_listen"),
            "engine": _text(engine, "metrics_listen") if has_engine else "",
            "http": _text(gateway, "metrics_listen") if gateway else "",
        },
        store_elsewhere=_files(store.endpoint) if is_elsewhere else None,
    )


def _files(endpoint: Endpoint) -> dict[str, str]:
    return {"token_file": str(endpoint.token_file or ""), "ca_file": str(endpoint.ca_file or "")}


def _text(process: ServiceProcess, name: str) -> str:
    """An option that the home sets, or a flag of `kvasir store serve`."""
    value = process.options.get(name) or ""
    return str(value[0] if isinstance(value, tuple) else value)


def greet(say: Callable[[str], object], home: Home, answer: dict[str, Any], how_to_stop: str) -> None:
    """Show where the services of a running group are."""
    if answer["engine"]:
        say(f"engine: {answer['engine']}")
    say(f"store:  {answer['store']}{', elsewhere' if answer['store_elsewhere'] else ''}")
    if answer["http"]:
        say(f"http:   {answer['http_url']} (the key is the token)")
    if answer["http_remark"]:
        say(f"        {answer['http_remark']}")
    if answer["token_file"]:
        say(f"token:  {answer['token_file']} (commands with this home find it; others need --token-file)")
    if not answer["engine"]:
        pinned = f" --store-ca-file {shlex.quote(str(Path(answer['ca_file']).absolute()))}" if answer["ca_file"] else ""
        say(f"Engines use it with `kvasir up --store {answer['store']}{pinned}`; {how_to_stop}.")
        return
    browser = f", or in a browser with `{home.command('open')}`" if answer["http"] else ""
    say(f"Talk to an agent with `{home.command('chat ada')}`{browser}; {how_to_stop}.")


def detached(caller: Caller) -> None:
    """Run the same command in the background, wait until all is ready, and print its lines."""
    second = caller.second or SecondProcess(sys.argv[1:])
    log = caller.home.logs / "up.log"
    rotate_log(log)
    log.touch(0o600)
    log.chmod(0o600)
    child = second.go_on(log)
    assert child.stdout is not None
    with caller.busy("starting"), child.stdout as out:
        try:
            import_messages()  # meanwhile
            answer = json.loads(out.readline() or b"{}")
        except BaseException:  # Ctrl-C or SIGTERM: it ends with us
            child.terminate()
            raise
    if "error" in answer:
        raise relayed(child.wait(), answer["error"])
    if "pid" not in answer:
        what = f"it ended before all was ready, as by `{caller.home.command('down')}` or a kill"
        raise Unavailable(f"{what} (exit code {child.wait()}, log: {log})", reason="SERVICE_DID_NOT_START")
    home = caller.home
    caller.result(answer, lambda out: greet(out.print, home, answer, f"`{home.command('down')}` stops it"))
