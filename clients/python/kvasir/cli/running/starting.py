"""Runs the services of a plan as one group until they are told to stop, and writes where they are found."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvasir.cli.caller import Caller
from kvasir.cli.running.home import Home, Running
from kvasir.cli.running.plan import Plan
from kvasir.cli.running.supervisor import Supervisor

ENGINE_KILLED = "but for what the engine had not stored: it did not stop, and was killed"


class EngineKilledError(Exception):
    """The group was requested to stop and has stopped, and its engine had to be killed."""


async def run_group(caller: Caller, plan: Plan, descriptor: int, http_remark: str) -> None:
    """Until SIGINT, SIGTERM or a terminal that closes. The services inherit `descriptor`, a lock. `http_remark`: why no
    gateway starts. Raises EngineKilledError."""
    home = caller.home
    supervisor = Supervisor(
        [each.service() for each in (plan.store, plan.engine, plan.gateway) if each is not None],
        say=caller.note,
        clock=time.monotonic,
        keep_descriptor=descriptor,
    )
    _stop_at_signals(supervisor)
    was_ready = False

    def tell_others() -> None:
        home.write_running(_facts(home, plan, supervisor, was_ready, http_remark))

    def tell_that_all_is_ready() -> None:
        nonlocal was_ready
        was_ready = True
        tell_others()
        facts = _facts(home, plan, supervisor, was_ready, http_remark)
        answer = asdict(facts) | {"home": str(home.root), "logs": str(home.logs)}
        if caller.as_json:
            caller.line(answer)
        greet(caller.note, home, answer, "Ctrl-C stops all")

    caller.note(f"Starting in {home.root}; logs are in {home.logs}")
    tell_others()
    try:
        await supervisor.run(tell_that_all_is_ready, tell_others)
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
    return Running(
        pid=os.getpid(),
        store=store.endpoint.address,
        engine=engine.endpoint.address,
        token_file=str(home.tokens / "client.token") if has_token else "",
        ca_file=str(store.options.get("tls_cert_file") or engine.options.get("tls_cert_file") or ""),
        store_pid=supervisor.pid("store"),
        engine_pid=supervisor.pid("engine"),
        is_ready=is_ready,
        http=gateway.endpoint.address if gateway else "",
        http_url=f"http://{gateway.endpoint.address}/v1" if gateway else "",
        http_pid=supervisor.pid("http") if gateway else 0,
        http_remark=http_remark,
        metrics={
            "store": str(store.options.get("metrics_listen", "")),
            "engine": str(engine.options.get("metrics_listen", "")),
            "http": str(gateway.options.get("metrics_listen", "")) if gateway else "",
        },
    )


def greet(say: Callable[[str], object], home: Home, answer: dict[str, Any], how_to_stop: str) -> None:
    """Say where the services of a running group are."""
    say(f"engine: {answer['engine']}")
    say(f"store:  {answer['store']}")
    if answer["http"]:
        say(f"http:   {answer['http_url']} (the key is the token)")
    if answer["http_remark"]:
        say(f"        {answer['http_remark']}")
    if answer["token_file"]:
        say(f"token:  {answer['token_file']} (commands with this home find it; others say --token-file)")
    browser = f", or in a browser with `{home.command('open')}`" if answer["http"] else ""
    say(f"Talk to an agent with `{home.command('chat ada')}`{browser}; {how_to_stop}.")
